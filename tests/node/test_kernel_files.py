"""Blocks, holes, extents and file systems, on the real disk and on a small real file system."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import InsufficientSpace, KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import files, libc, loop
from requirements import need_root, need_tool

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def small_file_system(tmp_path: Path, features: str) -> Iterator[Path]:
    """An ext4 of 16 MiB on a loop device: a file system that really is full soon."""
    need_root()
    image, target = tmp_path / "image", tmp_path / "small"
    target.mkdir()
    fd = os.open(image, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 16 * MIB)
    device = loop.attach(fd, direct_io=False)
    os.close(fd)
    try:
        subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", features, device.path], check=True)
        libc.mount(device.path, str(target), "ext4", 0, None)
        try:
            yield target
        finally:
            libc.umount2(str(target), 0)
    finally:
        loop.detach(device)  # what another test's new mount namespace copied meanwhile goes with that


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path, "^has_journal") as target:
        yield target


def test_preallocated_bytes_have_blocks_and_read_as_zeros(file: int) -> None:
    files.preallocate(file, 8 * MIB, path="file")
    found = os.fstat(file)
    assert found.st_size == 8 * MIB
    assert found.st_blocks * 512 >= 8 * MIB
    assert os.pread(file, 4096, 8 * MIB - 4096) == bytes(4096)


@pytest.mark.root
@pytest.mark.parametrize("asked_first", [True, False])
def test_what_does_not_fit_is_refused_with_both_numbers_and_takes_no_block(
    small: Path, asked_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not asked first: as when another takes the free space between the question and fallocate."""
    fd = os.open(small / "file", os.O_RDWR | os.O_CREAT)
    try:
        before = files.free_bytes(fd)
        asked = before + MIB
        if not asked_first:
            answers = iter([2**60])
            monkeypatch.setattr(files, "free_bytes", lambda fd: next(answers, before))
        with pytest.raises(InsufficientSpace, match=f"{asked} bytes were asked for, {before} bytes are free"):
            files.preallocate(fd, asked, path=str(small / "file"))
        monkeypatch.undo()
        assert (os.fstat(fd).st_blocks, os.fstat(fd).st_size) == (0, 0)
        assert files.free_bytes(fd) == before
    finally:
        os.close(fd)


def test_file_that_is_too_big_for_the_process_is_refused_with_both_numbers(tmp_path: Path) -> None:
    script = (
        "import os, resource, signal, sys\n"
        "from kvtier_api.errors import InsufficientSpace\n"
        "from kvtier_node.kernel import files\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1048576, 1048576))\n"
        "try:\n    files.preallocate(fd, 2097152, path='file')\n"
        "except InsufficientSpace as error:\n    print(error)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path / "file")]
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "2097152 bytes were asked for" in told
    assert "at most 1048576 bytes" in told
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1048576


@pytest.mark.root
def test_file_system_that_cannot_preallocate_is_named(tmp_path: Path) -> None:
    with small_file_system(tmp_path, "^has_journal,^extent,^64bit") as target:
        fd = os.open(target / "file", os.O_RDWR | os.O_CREAT)
        try:
            with pytest.raises(KernelError, match="ext4 cannot preallocate"):
                files.preallocate(fd, 4096, path="file")
        finally:
            os.close(fd)


def test_hole_gives_blocks_back_and_reads_as_zeros(file: int) -> None:
    os.pwrite(file, b"\xff" * MIB, 0)
    os.fsync(file)
    assert files.extents(file)
    files.punch_hole(file, 0, MIB)
    assert files.extents(file) == []
    assert os.fstat(file).st_size == MIB
    assert os.pread(file, MIB, 0) == bytes(MIB)


def test_extents_are_complete_beyond_one_call(file: int) -> None:
    count = 1300  # more than two calls' worth
    for index in range(count):
        os.pwrite(file, b"x", index * 8192)
    found = files.extents(file)
    assert [extent.logical for extent in found] == [index * 8192 for index in range(count)]
    assert all(extent.length == 4096 and extent.physical for extent in found)
    assert [bool(extent.flags & c.FIEMAP_EXTENT_LAST) for extent in found] == [False] * (count - 1) + [True]


def test_extents_write_dirty_pages_first(file: int) -> None:
    os.pwrite(file, b"x" * 4096, 0)
    (extent,) = files.extents(file)
    assert not extent.flags & (c.FIEMAP_EXTENT_DELALLOC | c.FIEMAP_EXTENT_UNKNOWN)


def test_preallocated_extents_are_unwritten_until_written(file: int) -> None:
    files.preallocate(file, MIB, path="file")
    assert all(extent.flags & c.FIEMAP_EXTENT_UNWRITTEN for extent in files.extents(file))
    os.pwrite(file, b"x" * MIB, 0)
    assert not any(extent.flags & c.FIEMAP_EXTENT_UNWRITTEN for extent in files.extents(file))


def _cached_pages(path: Path) -> int:
    fincore = need_tool("fincore")
    told = subprocess.run([fincore, "-n", "-o", "PAGES", str(path)], capture_output=True, text=True, check=True).stdout
    return int(told)


def test_cached_pages_are_dropped_dirty_ones_included(file: int, tmp_path: Path) -> None:
    os.pwrite(file, b"x" * MIB, 0)
    assert _cached_pages(tmp_path / "file") == 256
    files.drop_cached_pages(file)
    assert _cached_pages(tmp_path / "file") == 0
    assert os.pread(file, 1, 0) == b"x"


def test_file_systems_have_their_names(file: int) -> None:
    told = subprocess.run(
        ["stat", "-f", "-c", "%T", f"/proc/self/fd/{file}"], capture_output=True, text=True, pass_fds=[file]
    )
    ours = files.filesystem_type(file)
    assert ours == told.stdout.strip() or (ours.startswith("ext") and told.stdout.strip() == "ext2/ext3")
    for path, name in {"/proc": "proc", "/sys": "sysfs", "/dev/shm": "tmpfs"}.items():
        fd = os.open(path, os.O_RDONLY)
        assert files.filesystem_type(fd) == name
        os.close(fd)


def test_free_bytes_are_those_of_statvfs(file: int) -> None:
    before = files.free_bytes(file)
    assert 0 < before <= os.statvfs(f"/proc/self/fd/{file}").f_blocks * 4096


@pytest.mark.root
def test_immutable_file_cannot_be_written_until_it_is_not(file: int, tmp_path: Path) -> None:
    need_root()
    files.set_immutable(file, True)
    try:
        with pytest.raises(PermissionError):
            os.open(tmp_path / "file", os.O_WRONLY)
        with pytest.raises(PermissionError):
            os.unlink(tmp_path / "file")
    finally:
        files.set_immutable(file, False)
    os.close(os.open(tmp_path / "file", os.O_WRONLY))


def test_direct_io_alignment_is_what_direct_io_needs(file: int, tmp_path: Path) -> None:
    found = libc.statx_direct_io_align(file)
    if found is None:
        pytest.skip("statx says nothing of direct I/O here")
    _, offset = found
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    try:
        import mmap

        page = mmap.mmap(-1, 4096)
        assert os.pwritev(fd, [page], 0) == 4096
        if offset > 1:
            with pytest.raises(OSError, match="Invalid argument"):
                os.pwritev(fd, [page], 1)
    finally:
        os.close(fd)


def test_errors_of_system_calls_carry_number_and_object() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        libc.openat2(c.AT_FDCWD, "no/such/file", os.O_RDONLY)
    assert caught.value.filename == "no/such/file"
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.statx_mount_id(-1)
