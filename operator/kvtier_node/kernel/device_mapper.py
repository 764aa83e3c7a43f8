"""Device mapper by its ioctls (linux/dm-ioctl.h): the part of it that a key passes through, or that destroys one.

`dmsetup table --showkeys` would put a key into the memory of two more processes. Here the kernel writes it once, into a
buffer that the caller has locked, and wipes its own copies (DM_SECURE_DATA_FLAG). Making devices, removing them and their
nodes in /dev/mapper is left to cryptsetup and dmsetup. Suspending can wait for I/O: for child processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc

__all__ = ["Table", "clear", "control", "exists", "live_table", "load_error", "message", "names", "resume", "suspend"]

_CONTROL: Final = "/dev/mapper/control"
_CONTROL_NUMBER: Final = os.makedev(10, 236)  # linux/miscdevice.h: MAPPER_CTRL_MINOR
# struct dm_ioctl: version[3], data_size, data_start, target_count, open_count, flags, event_nr, padding, dev, name, uuid
_HEAD: Final = struct.Struct("=3I3IiI2IQ128s129s7x")
# struct dm_target_spec: sector_start, length, status, next, target_type
_TARGET: Final = struct.Struct("=2QiI16s")
_MESSAGE: Final = struct.Struct("=Q")  # struct dm_target_msg: sector, then the text
_VERSION: Final = (4, 0, 0)
_GOING: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EINVAL})
"""What sysfs answers for a device that is being removed (drivers/md/dm-sysfs.c)."""
_WIPED: Final = frozenset(b"0-")  # "-" where a table has no key at all


@dataclass(frozen=True, slots=True)
class Table:
    """The live table of a device, the key itself left out. `target` is empty where the device has no live table."""

    target: str = ""
    sectors: int = 0
    inactive: bool = False
    """Another table is loaded and waits for a resume; it may hold a key."""
    cipher: str = ""
    key_bits: int = 0
    wiped: bool = False
    """The kernel's key is all zeros."""
    device: str = ""
    """MAJOR:MINOR of what the crypt target lies on."""


def names() -> list[str]:
    """The names of device mapper's devices now, by sysfs. Raises OSError where there is no sysfs."""
    found = []
    for entry in os.listdir("/sys/block"):
        if entry.startswith("dm-"):
            try:
                found.append(Path(f"/sys/block/{entry}/dm/name").read_text(encoding="utf-8").strip())
            except OSError as error:
                if error.errno not in _GOING:
                    raise
    return found


def exists(name: str) -> bool:
    """Whether device mapper has a device of this name now. Raises as `names` does."""
    return name in names()


@contextmanager
def control() -> Iterator[int | None]:
    """Device mapper's control device; None where this kernel has no device mapper now. Raises KernelError, OSError."""
    lines = Path("/proc/misc").read_text(encoding="ascii").splitlines()
    if not any(line.split()[1:] == ["device-mapper"] for line in lines):
        yield None
        return
    if not os.path.exists(_CONTROL):  # a container's own /dev
        os.makedirs(os.path.dirname(_CONTROL), mode=0o755, exist_ok=True)
        os.mknod(_CONTROL, stat.S_IFCHR | 0o600, _CONTROL_NUMBER)
    fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_rdev != _CONTROL_NUMBER:
            raise KernelError("not device mapper's control device", obj=_CONTROL, remedy="remove it")
        yield fd
    finally:
        os.close(fd)


def live_table(control_fd: int, name: str, reply: memoryview) -> Table | None:
    """The live table; None where there is no such device. The kernel writes the key into `reply`: locked, wiped by the caller.

    Raises KernelError for a table of several targets, or one too large for `reply`; OSError.
    """
    _HEAD.pack_into(reply, 0, *_VERSION, len(reply), _HEAD.size, 0, 0, c.DM_STATUS_TABLE_FLAG | c.DM_SECURE_DATA_FLAG, 0, 0, 0,
                    name.encode(), b"")  # fmt: skip
    # The address, not a copy: the memory is the caller's for as long as this runs.
    address = ctypes.addressof((ctypes.c_char * len(reply)).from_buffer(reply))
    try:
        libc.ioctl(control_fd, c.DM_TABLE_STATUS, address)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
    _, _, _, _, start, targets, _, flags, *_ = _HEAD.unpack_from(reply)
    inactive = bool(flags & c.DM_INACTIVE_PRESENT_FLAG)
    if targets == 0:
        return Table(inactive=inactive)
    if targets > 1 or flags & c.DM_BUFFER_FULL_FLAG:
        raise KernelError(f"its table has {targets} targets, or is too long", obj=name, remedy="it is not kvtier's")
    _, sectors, _, _, kind = _TARGET.unpack_from(reply, start)
    target = kind.rstrip(b"\0").decode()
    if target != "crypt":
        return Table(target, sectors, inactive)
    # cipher, key, offset of the iv, device, ...: slices of the caller's memory, so that no copy of the key is made
    words = _words(reply[start + _TARGET.size :], 4)
    return Table(
        target,
        sectors,
        inactive,
        cipher=bytes(words[0]).decode(),
        key_bits=len(words[1]) * 4,
        wiped=all(byte in _WIPED for byte in words[1]),
        device=bytes(words[3]).decode(),
    )


def _words(text: memoryview, count: int) -> list[memoryview]:
    """The first `count` words of a NUL-terminated text, each a slice of it."""
    found = []
    begin = 0
    for position, byte in enumerate(text):
        if byte in b" \0":
            found.append(text[begin:position])
            begin = position + 1
            if len(found) == count or byte == 0:
                break
    if len(found) < count:
        raise KernelError(
            "a crypt target's table is shorter than known", obj="device mapper", remedy="please report it"
        )
    return found


def _command(control_fd: int, request: int, name: str, flags: int = 0, *, targets: int = 0, data: bytes = b"") -> None:
    size = max(512, _HEAD.size + len(data))
    head = _HEAD.pack(*_VERSION, size, _HEAD.size, targets, 0, flags, 0, 0, 0, name.encode(), b"")
    libc.ioctl(control_fd, request, ctypes.create_string_buffer(head + data, size))


def suspend(control_fd: int, name: str) -> None:
    """Hold back all I/O, without waiting for what is under way, or for the file system above. Idempotent. Raises OSError."""
    _command(control_fd, c.DM_DEV_SUSPEND, name, c.DM_SUSPEND_FLAG | c.DM_SKIP_LOCKFS_FLAG | c.DM_NOFLUSH_FLAG)


def resume(control_fd: int, name: str) -> None:
    """Put the loaded table, if there is one, in the place of the live one, and let I/O through. Raises OSError."""
    _command(control_fd, c.DM_DEV_SUSPEND, name, c.DM_SKIP_LOCKFS_FLAG | c.DM_NOFLUSH_FLAG)


def message(control_fd: int, name: str, text: str) -> None:
    """Send a message to the device's first target. Raises OSError."""
    _command(control_fd, c.DM_TARGET_MSG, name, data=_MESSAGE.pack(0) + text.encode() + b"\0")


def load_error(control_fd: int, name: str, sectors: int) -> None:
    """Load a table that answers every read and write with an error; `resume` makes it the live one. Raises OSError."""
    parameters = bytes(8)  # none; the next target begins at a multiple of 8
    target = _TARGET.pack(0, sectors, 0, _TARGET.size + len(parameters), b"error")
    _command(control_fd, c.DM_TABLE_LOAD, name, targets=1, data=target + parameters)


def clear(control_fd: int, name: str) -> None:
    """Destroy the table that is loaded and not live, and the key in it. Raises OSError."""
    _command(control_fd, c.DM_TABLE_CLEAR, name)
