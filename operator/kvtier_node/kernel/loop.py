"""Loop devices: a backing image as a block device (loop(4), linux/loop.h).

A device is known by the device and inode number of its backing file, never by a path: the path may say `(deleted)`, or
name another file by now. A number alone is no identity either; it is given to another image after a detach.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier_api.errors import Busy, KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc

__all__ = [
    "LoopDevice",
    "LoopStatus",
    "attach",
    "backing_path",
    "backing_paths",
    "detach",
    "find_by_backing",
    "is_claimed",
    "set_autoclear",
    "status",
    "transient",
]

_ATTACH_TRIES: Final = 64
_DETACH_LOOKS: Final = 20
_DETACH_PAUSE_S: Final = 0.01
# Where a container's /dev lacks a node that the kernel has (util-linux#3197).
_OWN_NODES: Final = "/dev/kvtier"


@dataclass(frozen=True, slots=True)
class LoopDevice:
    """`backing_dev`, `backing_ino`: st_dev and st_ino of the image; 0 where the caller does not know them."""

    path: str
    number: int
    backing_dev: int = 0
    backing_ino: int = 0


@dataclass(frozen=True, slots=True)
class LoopStatus:
    backing_dev: int
    backing_ino: int
    direct_io: bool
    read_only: bool
    autoclear: bool


class _LoopInfo64(ctypes.Structure):
    _fields_ = [
        ("lo_device", ctypes.c_uint64),
        ("lo_inode", ctypes.c_uint64),
        ("lo_rdevice", ctypes.c_uint64),
        ("lo_offset", ctypes.c_uint64),
        ("lo_sizelimit", ctypes.c_uint64),
        ("lo_number", ctypes.c_uint32),
        ("lo_encrypt_type", ctypes.c_uint32),
        ("lo_encrypt_key_size", ctypes.c_uint32),
        ("lo_flags", ctypes.c_uint32),
        ("lo_file_name", ctypes.c_char * 64),
        ("lo_crypt_name", ctypes.c_char * 64),
        ("lo_encrypt_key", ctypes.c_uint8 * 32),
        ("lo_init", ctypes.c_uint64 * 2),
    ]


class _LoopConfig(ctypes.Structure):
    _fields_ = [
        ("fd", ctypes.c_uint32),
        ("block_size", ctypes.c_uint32),
        ("info", _LoopInfo64),
        ("__reserved", ctypes.c_uint64 * 8),
    ]


def _is_node(path: str, device: int) -> bool:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISBLK(found.st_mode) and found.st_rdev == device


def _node(number: int) -> str:
    """A path of the block device `loop<number>`, made from sysfs's numbers where /dev has none. Raises KernelError."""
    name = f"loop{number}"
    try:
        major, minor = Path(f"/sys/block/{name}/dev").read_text(encoding="ascii").strip().split(":")
    except FileNotFoundError as error:
        raise KernelError("the kernel has no such loop device", obj=name) from error
    device = os.makedev(int(major), int(minor))
    own = f"{_OWN_NODES}/{name}"
    for path in (f"/dev/{name}", f"/dev/loop/{number}", own):
        if _is_node(path, device):
            return path
    try:
        os.makedirs(_OWN_NODES, mode=0o700, exist_ok=True)
        folder = os.lstat(_OWN_NODES)
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid() or folder.st_mode & 0o022:
            raise KernelError("somebody else could write here", obj=_OWN_NODES, remedy="remove it")
        if os.path.lexists(own):
            os.unlink(own)  # a number that had another device number before
        os.mknod(own, stat.S_IFBLK | 0o600, device)
    except OSError as error:
        raise KernelError(
            f"/dev has no node for it, and none could be made: {error.strerror}",
            obj=f"{name} ({major}:{minor})",
            remedy=f"mount the host's /dev, or run: mknod /dev/{name} b {major} {minor}",
        ) from error
    return own


def _open(path: str, flags: int = os.O_RDONLY) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY)


def _open_unless_going(path: str, flags: int = os.O_RDONLY) -> int | None:
    """None for a device that its last user is just taking apart (ENXIO): the kernel lets nobody in until that is done."""
    try:
        return _open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _get(fd: int) -> _LoopInfo64 | None:
    info = _LoopInfo64()
    try:
        libc.ioctl(fd, c.LOOP_GET_STATUS64, info)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
    return info


def attach(image_fd: int, *, direct_io: bool = True, read_only: bool = False) -> LoopDevice:
    """A new loop device on the open image (LOOP_CONFIGURE, Linux 5.8: never half set up).

    The device outlives this process: detach it, or `set_autoclear` once it is mounted. `direct_io` is asked for; what
    the kernel granted is in `status`. Raises KernelError, Busy (others took each free device).
    """
    flags = (c.LO_FLAGS_DIRECT_IO if direct_io else 0) | (c.LO_FLAGS_READ_ONLY if read_only else 0)
    fd, device = _configure_free(image_fd, flags)
    os.close(fd)
    return device


def _configure_free(image_fd: int, flags: int) -> tuple[int, LoopDevice]:
    """A free device with the image, and its open descriptor, which is the caller's. Raises as `attach`."""
    try:
        control = _open("/dev/loop-control", os.O_RDWR)
    except OSError as error:
        raise KernelError(
            f"loop devices are not available here: {error.strerror}",
            obj="/dev/loop-control",
            remedy="run as root, load the module `loop`, and mount the host's /dev",
        ) from error
    try:
        for _ in range(_ATTACH_TRIES):
            number = libc.ioctl(control, c.LOOP_CTL_GET_FREE)
            path = _node(number)
            fd = _configure(path, image_fd, flags)
            if fd is not None:
                image = os.fstat(image_fd)
                return fd, LoopDevice(path, number, image.st_dev, image.st_ino)
    finally:
        os.close(control)
    raise Busy(f"each free loop device was taken by others, {_ATTACH_TRIES} times", obj="/dev/loop-control")


def _configure(path: str, image_fd: int, flags: int) -> int | None:
    """An open descriptor of the device; None if another process has taken it, or it is just being taken apart."""
    config = _LoopConfig(fd=image_fd)
    config.info.lo_flags = flags
    fd = _open_unless_going(path, os.O_RDONLY if flags & c.LO_FLAGS_READ_ONLY else os.O_RDWR)
    if fd is None:
        return None
    try:
        libc.ioctl(fd, c.LOOP_CONFIGURE, config)
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EBUSY:
            return None
        raise KernelError(f"LOOP_CONFIGURE: {error.strerror}", obj=path) from error
    return fd


def status(device: LoopDevice) -> LoopStatus | None:
    """What the kernel says of the device; None if nothing is attached to it."""
    try:
        fd = _open_unless_going(device.path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KernelError(f"open: {error.strerror}", obj=device.path) from error
    if fd is None:
        return None
    try:
        info = _get(fd)
    finally:
        os.close(fd)
    if info is None:
        return None
    return LoopStatus(
        backing_dev=info.lo_device,
        backing_ino=info.lo_inode,
        direct_io=bool(info.lo_flags & c.LO_FLAGS_DIRECT_IO),
        read_only=bool(info.lo_flags & c.LO_FLAGS_READ_ONLY),
        autoclear=bool(info.lo_flags & c.LO_FLAGS_AUTOCLEAR),
    )


def _is_still(device: LoopDevice, info: _LoopInfo64) -> bool:
    return not device.backing_ino or (info.lo_device, info.lo_inode) == (device.backing_dev, device.backing_ino)


def detach(device: LoopDevice) -> bool:
    """Give the device back; whether it is free now.

    False: a mount or descriptor still holds it, and the kernel frees it (autoclear) when the last one goes. A device
    that is free already, or has another image by now, is left alone: True. Raises KernelError.
    """
    try:
        fd = _open_unless_going(device.path)
    except FileNotFoundError:
        return True
    if fd is None:
        return True
    try:
        info = _get(fd)
        if info is None or not _is_still(device, info):
            return True
        try:
            libc.ioctl(fd, c.LOOP_CLR_FD)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return True
            raise KernelError(f"LOOP_CLR_FD: {error.strerror}", obj=device.path) from error
    finally:
        os.close(fd)
    # Another kvtier that looks through the devices, or a namespace that was just copied, holds it for a moment only.
    for _ in range(_DETACH_LOOKS):
        now = status(device)
        if now is None or (now.backing_dev, now.backing_ino) != (info.lo_device, info.lo_inode):
            return True
        time.sleep(_DETACH_PAUSE_S)
    return False


def set_autoclear(device: LoopDevice) -> None:
    """The kernel detaches the device when its last user goes. Call it once mounted: with no user it is detached now."""
    fd = _open_unless_going(device.path)
    if fd is None:
        raise KernelError("the device has no image, or another one", obj=device.path)
    try:
        info = _get(fd)
        if info is None or not _is_still(device, info):
            raise KernelError("the device has no image, or another one", obj=device.path)
        info.lo_flags |= c.LO_FLAGS_AUTOCLEAR
        libc.ioctl(fd, c.LOOP_SET_STATUS64, info)
    finally:
        os.close(fd)


def find_by_backing(st_dev: int, st_ino: int) -> list[LoopDevice]:
    """Every loop device whose image is the file with these numbers, unlinked images included."""
    found: list[LoopDevice] = []
    for name in sorted(os.listdir("/sys/block")):
        number = name.removeprefix("loop")
        if not name.startswith("loop") or not number.isdecimal():
            continue
        if not os.path.exists(f"/sys/block/{name}/loop/backing_file"):
            continue  # nothing attached: no node is made for it
        device = LoopDevice(_node(int(number)), int(number), st_dev, st_ino)
        now = status(device)
        if now is not None and (now.backing_dev, now.backing_ino) == (st_dev, st_ino):
            found.append(device)
    return found


def backing_path(device: LoopDevice) -> str | None:
    """The image's path as the kernel shows it (` (deleted)` after its name is gone); None if nothing is attached."""
    return _shown_backing(f"loop{device.number}")


def backing_paths() -> dict[str, str]:
    """The image's path, as the kernel shows it, of every loop device (`loop0`, …) that has one."""
    found = {}
    for name in os.listdir("/sys/block"):
        path = _shown_backing(name) if name.startswith("loop") else None
        if path is not None:
            found[name] = path
    return found


def _shown_backing(name: str) -> str | None:
    try:
        shown = Path(f"/sys/block/{name}/loop/backing_file").read_text(errors="surrogateescape")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENXIO, errno.ENODEV):  # nothing attached, or detached meanwhile
            return None
        raise
    return shown.removesuffix("\n") or None


@contextmanager
def transient(image_fd: int) -> Iterator[LoopDevice]:
    """A loop device for the length of a block, which the kernel itself takes back: after SIGKILL too.

    Autoclear, and open for as long as the block runs: with the last descriptor it is detached. Raises as `attach`.
    """
    fd, device = _configure_free(image_fd, c.LO_FLAGS_AUTOCLEAR)
    try:
        yield device
    finally:
        os.close(fd)


def is_claimed(device: LoopDevice) -> bool:
    """Whether a mount, in any mount namespace, or device mapper holds the block device (open O_EXCL gives EBUSY).

    It claims the device itself for an instant: a mount(2) of it in that instant gets EBUSY.
    """
    try:
        os.close(_open(device.path, os.O_RDONLY | os.O_EXCL))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return True
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return False
        raise
    return False
