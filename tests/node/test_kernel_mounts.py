"""Mount tables as the kernel writes them, in this mount namespace and in others."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc, mounts
from requirements import need_root, need_tool

CLONE_NEWNS = 0x20000


def test_line_is_read_into_its_fields() -> None:
    raw = b"36 35 98:0 /mnt1 /mnt2 rw,noatime shared:7 master:1 - ext3 /dev/root rw,errors=continue,data=journal\n"
    (entry,) = mounts.parse_mountinfo(raw)
    assert (entry.mount_id, entry.parent_id, entry.device) == (36, 35, os.makedev(98, 0))
    assert (entry.root, entry.mount_point, entry.fs_type, entry.source) == ("/mnt1", "/mnt2", "ext3", "/dev/root")
    assert entry.options == ("rw", "noatime")
    assert entry.optional == ("shared:7", "master:1")
    assert entry.super_options == ("rw", "errors=continue", "data=journal")


@pytest.mark.parametrize(
    ("escaped", "path"),
    [
        (rb"/a\040b", "/a b"),
        (rb"/a\011b", "/a\tb"),
        (rb"/a\012b", "/a\nb"),
        (rb"/a\134040b", r"/a\040b"),
        (rb"/a\134", "/a\\"),
        (rb"/a\043b", "/a#b"),
        (b"/a\rb", "/a\rb"),
        (b"/a\x0bb", "/a\x0bb"),
        (b"/a\xffb", "/a\udcffb"),
        (b"/-", "/-"),
        (b"-", "-"),
        (rb"/a//deleted", "/a//deleted"),
    ],
)
def test_path_is_what_was_mounted_whatever_is_in_it(escaped: bytes, path: str) -> None:
    (entry,) = mounts.parse_mountinfo(b"1 2 0:5 " + escaped + b" " + escaped + b" rw - tmpfs " + escaped + b" rw\n")
    assert (entry.root, entry.mount_point, entry.source, entry.fs_type) == (path, path, path, "tmpfs")
    assert entry.optional == ()


@pytest.mark.parametrize(
    "line", [b"nonsense", b"1 2 0:5 / /a rw tmpfs none rw", b"1 2 05 / /a rw - tmpfs none rw", b"1 2"]
)
def test_line_that_cannot_be_is_an_error_and_not_left_out(line: bytes) -> None:
    with pytest.raises(ValueError, match="not understood"):
        mounts.parse_mountinfo(b"1 2 0:5 / /a rw - tmpfs none rw\n" + line + b"\n")


def test_own_table_has_the_root() -> None:
    table = mounts.mountinfo()
    assert "/" in {entry.mount_point for entry in table}
    assert {entry.mount_id for entry in table} >= {mount_of("/proc")}


def mount_of(path: str) -> int:
    fd = os.open(path, os.O_PATH)
    try:
        return libc.statx_mount_id(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def mounted(target: Path) -> Iterator[int]:
    """A tmpfs; its device number."""
    target.mkdir()
    libc.mount("tmpfs", str(target), "tmpfs", 0, "size=1m")
    try:
        yield target.stat().st_dev
    finally:
        libc.umount2(str(target), c.MNT_DETACH)


@pytest.mark.root
@pytest.mark.parametrize("name", ["plain", "with space", "with\nnewline", "with\\backslash", "with\ttab", "\udcff"])
def test_real_mount_point_is_found_by_device_whatever_its_name(tmp_path: Path, name: str, private_mounts: None) -> None:
    need_root()
    with mounted(tmp_path / name) as device:
        assert [entry.mount_point for entry in mounts.mounts_of_device(device)] == [str(tmp_path / name)]
        assert mounts.mounts_elsewhere(device) == []
    assert mounts.mounts_of_device(device) == []


@pytest.mark.root
def test_mount_point_is_told_from_a_directory_bind_mounts_included(tmp_path: Path) -> None:
    need_root()
    (tmp_path / "source" / "below").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"")
    target = tmp_path / "target"
    target.mkdir()

    def is_mount_point(path: Path) -> bool:
        fd = os.open(path, os.O_PATH)
        try:
            return mounts.is_mount_point(fd)
        finally:
            os.close(fd)

    before = os.open(target, os.O_PATH)
    assert not is_mount_point(target)
    libc.mount(str(tmp_path / "source"), str(target), None, c.MS_BIND, None)
    try:
        assert is_mount_point(target)
        assert not is_mount_point(target / "below")
        assert not is_mount_point(tmp_path / "source")
        assert not mounts.is_mount_point(before), "the directory below the mount is still itself"
    finally:
        libc.umount2(str(target), 0)
        os.close(before)
    assert is_mount_point(Path("/proc"))


@contextlib.contextmanager
def other_namespace(script: str, *arguments: str) -> Iterator[int]:
    """A shell in a mount namespace of its own that has run `script`; its process id."""
    argv = [
        need_tool("unshare"),
        "-m",
        "--propagation",
        "private",
        "sh",
        "-c",
        script + "; echo ready; exec cat",
        *arguments,
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.root
def test_mount_that_leaked_into_another_namespace_is_found_there(tmp_path: Path, private_mounts: None) -> None:
    """firejail#5640, systemd#39062: lsof shows nothing, and the device stays busy for weeks."""
    need_root()
    with mounted(tmp_path / "mnt") as device:
        leak = other_namespace(":")
        pid = leak.__enter__()
    try:
        assert mounts.mounts_of_device(device) == []
        assert mounts.mounts_elsewhere(device) == [(pid, str(tmp_path / "mnt"))]
    finally:
        leak.__exit__(None, None, None)
    # By its path: the number may be another's by now.
    assert str(tmp_path / "mnt") not in [point for _, point in mounts.mounts_elsewhere(device)]


@pytest.mark.root
def test_one_process_stands_for_its_namespace_and_each_namespace_counts(tmp_path: Path, private_mounts: None) -> None:
    need_root()
    with mounted(tmp_path / "mnt") as device:
        (tmp_path / "else where").mkdir()
        move = 'sleep 1000 & mount --move "$0" "$1"'
        with (
            other_namespace(move, str(tmp_path / "mnt"), str(tmp_path / "else where")) as first,
            other_namespace(":") as second,
        ):
            found = set(mounts.mounts_elsewhere(device))
            assert found == {(first, str(tmp_path / "else where")), (second, str(tmp_path / "mnt"))}
            children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
            for child in children:
                os.kill(int(child), 9)


@pytest.mark.root
def test_namespace_of_a_single_thread_counts(tmp_path: Path, private_mounts: None) -> None:
    need_root()
    (tmp_path / "mnt").mkdir()
    inside, leave = threading.Event(), threading.Event()
    device: list[int] = []

    def work() -> None:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        libc.mount(None, "/", None, c.MS_REC | c.MS_PRIVATE, None)
        libc.mount("tmpfs", str(tmp_path / "mnt"), "tmpfs", 0, "size=1m")
        device.append((tmp_path / "mnt").stat().st_dev)
        inside.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        inside.wait()
        assert mounts.mounts_of_device(device[0]) == []
        assert mounts.mounts_elsewhere(device[0]) == [(os.getpid(), str(tmp_path / "mnt"))]
    finally:
        leave.set()
        thread.join()


@pytest.mark.root
def test_dead_process_that_nobody_reaped_hides_nothing(tmp_path: Path, private_mounts: None) -> None:
    need_root()
    with mounted(tmp_path / "mnt") as device, subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        with other_namespace(":") as pid:
            assert mounts.mounts_elsewhere(device) == [(pid, str(tmp_path / "mnt"))]
