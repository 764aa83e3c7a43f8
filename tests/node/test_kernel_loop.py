"""Real loop devices: known by their image's inode, given back, and never taken from another."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier_api.errors import KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc, loop
from leftovers import eventually_given_back, is_given_back
from requirements import need_root, need_tool

MIB = 2**20
pytestmark = pytest.mark.root


class Images:
    """Open image files; whatever was attached to them is detached at the end."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.fds: list[int] = []

    def new(self, name: str = "volume.img") -> int:
        fd = os.open(self.base / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self.fds.append(fd)
        os.posix_fallocate(fd, 0, 16 * MIB)
        return fd

    def close(self) -> None:
        for fd in self.fds:
            found = os.fstat(fd)
            for device in loop.find_by_backing(found.st_dev, found.st_ino):
                loop.detach(device)
            os.close(fd)


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    need_root()
    made = Images(tmp_path)
    try:
        yield made
    finally:
        made.close()


def make_file_system(device: loop.LoopDevice) -> None:
    subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", "^has_journal", device.path], check=True)


def test_a_descriptor_that_is_closed_at_once_does_not_make_detaching_fail(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another kvtier looks through the devices: it is closed while detaching waits for the third time."""
    device = loop.attach(images.new())
    held = os.open(device.path, os.O_RDONLY)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            os.close(held)
        time.sleep(seconds)

    monkeypatch.setattr(loop, "time", SimpleNamespace(sleep=pause))
    assert loop.detach(device)
    assert len(pauses) >= 3, "it was held until then"


def test_device_is_the_image(images: Images) -> None:
    fd = images.new()
    device = loop.attach(fd)
    assert stat.S_ISBLK(os.stat(device.path).st_mode)
    with open(device.path, "wb", buffering=0) as node:
        node.write(b"through the device" + bytes(4078))
        os.fsync(node.fileno())
    assert os.pread(fd, 18, 0) == b"through the device"
    assert loop.detach(device)
    assert is_given_back(device)


@pytest.mark.parametrize("direct_io", [True, False])
@pytest.mark.parametrize("read_only", [True, False])
def test_device_is_as_it_was_asked_for(images: Images, direct_io: bool, read_only: bool) -> None:
    device = loop.attach(images.new(), direct_io=direct_io, read_only=read_only)
    found = loop.status(device)
    assert found
    assert (found.direct_io, found.read_only, found.autoclear) == (direct_io, read_only, False)
    if read_only:
        with pytest.raises(OSError, match=r"not permitted|Read-only"), open(device.path, "r+b", buffering=0) as node:
            node.write(bytes(4096))


def test_device_is_found_by_inode_whatever_happened_to_the_path(images: Images, tmp_path: Path) -> None:
    fd = images.new()
    device = loop.attach(fd)
    (tmp_path / "volume.img").rename(tmp_path / "renamed")
    assert loop.find_by_backing(device.backing_dev, device.backing_ino) == [device]
    (tmp_path / "renamed").unlink()
    shown = Path(f"/sys/block/loop{device.number}/loop/backing_file").read_text()
    assert "(deleted)" in shown
    assert loop.find_by_backing(device.backing_dev, device.backing_ino) == [device]


def test_another_image_at_the_same_path_is_not_mistaken_for_it(images: Images, tmp_path: Path) -> None:
    """ANOLISA#2965: a path that exists again is another inode."""
    old = loop.attach(images.new())
    (tmp_path / "volume.img").unlink()
    new_fd = images.new()
    found = os.fstat(new_fd)
    assert loop.find_by_backing(found.st_dev, found.st_ino) == []
    new = loop.attach(new_fd)
    assert loop.find_by_backing(found.st_dev, found.st_ino) == [new]
    assert loop.find_by_backing(old.backing_dev, old.backing_ino) == [old]


def test_image_that_is_attached_twice_is_found_twice(images: Images) -> None:
    fd = images.new()
    both = {loop.attach(fd), loop.attach(fd)}
    found = os.fstat(fd)
    assert set(loop.find_by_backing(found.st_dev, found.st_ino)) == both


def test_detaching_twice_is_done(images: Images) -> None:
    device = loop.attach(images.new())
    assert loop.detach(device)
    assert loop.detach(device)


def test_number_that_was_given_to_another_image_is_left_alone(images: Images) -> None:
    old = loop.attach(images.new("old"))
    assert loop.detach(old)
    new = loop.attach(images.new("new"))
    stale = loop.LoopDevice(new.path, new.number, old.backing_dev, old.backing_ino)
    assert loop.detach(stale)
    assert loop.status(new), "the other's device was detached"
    with pytest.raises(KernelError):
        loop.set_autoclear(stale)
    found = loop.status(new)
    assert found
    assert not found.autoclear


def test_device_that_is_mounted_says_so_and_goes_with_its_last_mount(
    images: Images, tmp_path: Path, private_mounts: None
) -> None:
    device = loop.attach(images.new())
    make_file_system(device)
    (tmp_path / "mnt").mkdir()
    assert not loop.is_claimed(device)
    libc.mount(device.path, str(tmp_path / "mnt"), "ext4", 0, None)
    try:
        assert loop.is_claimed(device)
        assert not loop.detach(device), "a mounted device is not free"
        assert loop.find_by_backing(device.backing_dev, device.backing_ino) == [device]
    finally:
        libc.umount2(str(tmp_path / "mnt"), 0)
    assert eventually_given_back(device)
    assert not loop.is_claimed(device) or loop.status(device) is not None, "free; or another's by now"


def test_autoclear_after_mounting_frees_the_device_when_nobody_is_left_to_detach_it(
    images: Images, tmp_path: Path, private_mounts: None
) -> None:
    device = loop.attach(images.new())
    make_file_system(device)
    (tmp_path / "mnt").mkdir()
    libc.mount(device.path, str(tmp_path / "mnt"), "ext4", 0, None)
    try:
        loop.set_autoclear(device)
        found = loop.status(device)
        assert found
        assert found.autoclear
    finally:
        libc.umount2(str(tmp_path / "mnt"), 0)
    assert eventually_given_back(device)


def test_mount_that_only_another_namespace_has_still_claims_the_device(
    images: Images, tmp_path: Path, private_mounts: None
) -> None:
    device = loop.attach(images.new())
    make_file_system(device)
    (tmp_path / "mnt").mkdir()
    script = 'mount "$0" "$1" && echo mounted && exec cat'
    argv = [need_tool("unshare"), "-m", "sh", "-c", script, device.path, str(tmp_path / "mnt")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "mounted\n"
        assert loop.is_claimed(device)
        process.kill()
    for _ in range(6000):
        if not loop.is_claimed(device):
            break
        threading.Event().wait(0.01)
    assert not loop.is_claimed(device)


def test_two_that_attach_at_once_get_two_devices(images: Images) -> None:
    fds = [images.new(f"image{number}") for number in range(8)]
    devices: list[loop.LoopDevice] = []

    def attach(fd: int) -> None:
        devices.append(loop.attach(fd))

    threads = [threading.Thread(target=attach, args=[fd]) for fd in fds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({device.number for device in devices}) == len(fds)
    for device in devices:
        found = loop.status(device)
        assert found
        assert (found.backing_dev, found.backing_ino) == (device.backing_dev, device.backing_ino)


IN_A_BARE_DEV = """
import os, sys
from kvtier_node.kernel import constants as c, libc, loop
from kvtier_node.kernel.namespaces import leave_mount_namespace
from kvtier_api.errors import KernelError
leave_mount_namespace()
fd = os.open(sys.argv[1], os.O_RDWR)
control = os.stat("/dev/loop-control")
libc.mount("tmpfs", "/dev", "tmpfs", int(sys.argv[2]), "mode=755")
if sys.argv[3] == "control":
    os.mknod("/dev/loop-control", control.st_mode, control.st_rdev)
if sys.argv[3] == "planted":
    os.mknod("/dev/loop-control", control.st_mode, control.st_rdev)
    os.mkdir("/dev/kvtier", 0o777)
    os.chmod("/dev/kvtier", 0o777)
try:
    device = loop.attach(fd, direct_io=False)
except KernelError as error:
    print("refused:", error)
else:
    print(device.path, loop.find_by_backing(device.backing_dev, device.backing_ino) == [device], loop.detach(device))
"""


@pytest.mark.parametrize(
    ("flags", "what", "told"),
    [
        (0, "control", "/dev/kvtier/loop"),
        (c.MS_NODEV, "control", "refused:"),
        (0, "nothing", "refused: /dev/loop-control: loop devices are not available here"),
        (0, "planted", "refused: /dev/kvtier: somebody else could write here"),
    ],
)
def test_container_whose_dev_lacks_the_node_gets_one_of_its_own_or_is_told(
    images: Images, tmp_path: Path, flags: int, what: str, told: str
) -> None:
    """util-linux#3197."""
    images.new()
    argv = [sys.executable, "-c", IN_A_BARE_DEV, str(tmp_path / "volume.img"), str(flags), what]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.stdout.startswith(told), done
    if not told.startswith("refused"):
        assert done.stdout.endswith("True True\n")


def test_sysfs_numbers_decide_and_not_a_nodes_name(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node called loopN that is another device is not used."""
    fd = images.new()
    device = loop.attach(fd)
    assert os.stat(device.path).st_rdev == os.makedev(c.LOOP_MAJOR, device.number)
    assert not loop._is_node("/dev/null", os.makedev(c.LOOP_MAJOR, device.number))
    assert not loop._is_node(device.path, os.makedev(c.LOOP_MAJOR, device.number + 1))


def test_what_is_no_image_is_an_error(images: Images) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(KernelError, match="LOOP_CONFIGURE"):
            loop.attach(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_structures_have_the_kernels_sizes() -> None:
    assert ctypes.sizeof(loop._LoopInfo64) == 232
    assert ctypes.sizeof(loop._LoopConfig) == 304


def test_the_paths_of_all_images_are_read_while_devices_come_and_go(tmp_path: Path) -> None:
    """A device that is detached while it is looked at has none, whatever error the kernel gives for that."""
    ends = threading.Event()

    def come_and_go() -> None:
        image = tmp_path / "image"
        image.write_bytes(bytes(1 << 20))
        with image.open("rb") as file:
            while not ends.is_set():
                with loop.transient(file.fileno()):
                    pass

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        seen = 0
        for _ in range(3000):
            seen += any(str(tmp_path) in path for path in loop.backing_paths().values())
        assert seen
    finally:
        ends.set()
        thread.join()
