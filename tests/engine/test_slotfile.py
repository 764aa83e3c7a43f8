"""Opening slot files: what is refused, and what is said of O_DIRECT."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import EngineError, KvtierError, NotFound, UnsafePath
from kvtier_engine.slotfile import SlotFile
from kvtier_engine.staging import aligned_memory
from leftovers import open_descriptors
from requirements import need_root, need_tool

MIB = 1 << 20


def _file(path: Path, size: int = MIB) -> str:
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return str(path)


def _open(path: str | Path, **options: int) -> SlotFile:
    return SlotFile(str(path), min_bytes=MIB, slot_size_bytes=options.get("slot_size_bytes", 8192))


def _symlink(path: Path) -> None:
    path.symlink_to(_file(path.with_name("target")))


def _hard_link(path: Path) -> None:
    path.hardlink_to(_file(path.with_name("target")))


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: None, NotFound),
        (_symlink, UnsafePath),
        (lambda path: path.symlink_to("/nowhere"), UnsafePath),
        (_hard_link, UnsafePath),
        (lambda path: os.mkfifo(path), UnsafePath),
        (lambda path: path.mkdir(), UnsafePath),
        (_socket, UnsafePath),
        (lambda path: _file(path, MIB - 1), EngineError),
    ],
    ids=["missing", "symlink", "dangling symlink", "hard link", "fifo", "directory", "socket", "too small"],
)
def test_what_is_not_a_slot_file_is_refused_and_left_as_it_is(
    make: Callable[[Path], object], error: type[KvtierError], tmp_path: Path
) -> None:
    path = tmp_path / "slot.rank_0"
    make(path)
    before = sorted((one.name, one.lstat().st_size) for one in tmp_path.iterdir())
    descriptors = open_descriptors()
    with pytest.raises(error) as raised:
        _open(path)
    assert raised.value.obj == str(path)
    assert raised.value.remedy
    assert sorted((one.name, one.lstat().st_size) for one in tmp_path.iterdir()) == before
    assert open_descriptors() == descriptors


def test_descriptors_close_on_exec(tmp_path: Path) -> None:
    file = _open(_file(tmp_path / "f"))
    assert not os.get_inheritable(file._fd)
    file.close()


def test_direct_io_is_used_where_it_works_and_reads_what_it_wrote(tmp_path: Path) -> None:
    file = _open(_file(tmp_path / "f"))
    assert file.direct, file.direct_reason
    data, back = memoryview(aligned_memory(8192)), memoryview(aligned_memory(8192))
    data[:] = os.urandom(8192)
    file.write(16384, [data[:4096], data[4096:]])
    file.read(16384, [back])
    assert back == data
    file.close()


def test_a_slot_size_that_suits_no_direct_io_falls_back_and_says_so(tmp_path: Path) -> None:
    file = _open(_file(tmp_path / "f"), slot_size_bytes=4100)
    assert not file.direct
    assert "4100" in file.direct_reason
    file.write(4100, [memoryview(b"x" * 4100)])
    back = bytearray(4100)
    file.read(4100, [memoryview(back)])
    assert back == b"x" * 4100
    file.close()


@pytest.fixture
def journaled_data_mount(tmp_path: Path) -> Iterator[Path]:
    """ext4 with data=journal: a file system of this machine on which the kernel offers no O_DIRECT."""
    need_root()
    need_tool("mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mnt"
    _file(image, 32 * MIB)
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop,data=journal", str(image), str(mount)], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
def test_a_file_system_without_direct_io_falls_back_and_says_so(journaled_data_mount: Path) -> None:
    file = _open(_file(journaled_data_mount / "f"))
    assert not file.direct
    assert file.direct_reason
    file.write(0, [memoryview(b"y" * 8192)])
    back = bytearray(8192)
    file.read(0, [memoryview(back)])
    file.close()
    assert back == b"y" * 8192


def test_a_file_that_was_unlinked_or_cut_short_takes_no_more_bytes(tmp_path: Path) -> None:
    page = memoryview(aligned_memory(8192))
    for harm in (os.unlink, lambda path: os.truncate(path, 100)):
        path = _file(tmp_path / "f")
        file = _open(path)
        file.write(0, [page])
        harm(path)
        size = os.fstat(file._fd).st_size
        for act in (file.write, file.read):
            with pytest.raises(OSError, match=r"unlinked|cut short"):
                act(0, [page])
        assert os.fstat(file._fd).st_size == size
        file.close()
