"""Which block device a path names now, told so that another one under the same name is seen.

/dev/sdb is another disk after a restart, or after a cable was moved. A *mark* names one device alone: a number that the kernel
gives once per boot (diskseq, Linux 5.15), or an id of the hardware's or device mapper's own. Two looks at a path met the same
device if they share a mark.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from kvtier_api.errors import ForeignData
from kvtier_node.kernel.processes import boot_id

__all__ = ["THIS_BOOT", "marks", "open_alone", "open_device", "serial_of", "size_bytes"]

_SERIALS: Final = ("serial", "device/serial", "wwid", "device/wwid", "device/cid")
_NO_ID: Final = frozenset({"(null)", "none", "unknown", "default", "not specified", "n/a"})
"""What drivers and disks without a serial number say (User-mode Linux: `(null)`)."""
THIS_BOOT: Final = "boot "
"""How a mark begins that holds until the next restart only."""
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})
"""ENODEV: the attribute was opened, and its device went (kernfs)."""
_IDS: Final = ("dm/uuid", "wwid", "device/wwid", "serial", "device/cid")
"""Not `device/serial`: of NVMe it is the controller's, which several namespaces share."""


def open_device(path: str, flags: int) -> int:
    """A descriptor of the block device at `path`. Links are followed: the names of an LV are links. Raises ForeignData."""
    try:
        fd = os.open(os.path.realpath(path), flags | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ForeignData(
            f"the device cannot be had: {error.strerror}", obj=path, remedy="see lsblk what it is, and who uses it"
        ) from error
    if not stat.S_ISBLK(os.fstat(fd).st_mode):
        os.close(fd)
        raise ForeignData("not a block device", obj=path, remedy="name a block device or an LV in spec.device")
    return fd


def open_alone(path: str, flags: int) -> int:
    """The same, if no mount, swap, device mapper or other exclusive user has it (O_EXCL, open(2)). Raises ForeignData."""
    return open_device(path, flags | os.O_EXCL)


def size_bytes(fd: int) -> int:
    return os.lseek(fd, 0, os.SEEK_END)


def marks(fd: int) -> list[str]:
    """Every mark of the open block device. Raises OSError where there is no sysfs."""
    where, part = _disk_of(os.fstat(fd).st_rdev)
    part = f" size {size_bytes(fd)}{part}"
    sequence = _text(f"{where}/diskseq")
    found = [f"{THIS_BOOT}{boot_id()} disk {sequence}{part}"] if sequence else []
    return found + [f"{name} {value}{part}" for name, value in _ids(where, _IDS)]


def serial_of(number: int) -> str | None:
    """The serial number of the disk with this device number (st_dev, st_rdev), or of its partition; None without one."""
    return next((value for _, value in _ids(_disk_of(number)[0], _SERIALS)), None)


def _disk_of(number: int) -> tuple[str, str]:
    """The whole disk's directory in sysfs, and where on it the partition begins; "" for a whole disk."""
    where = os.path.realpath(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not _text(f"{where}/partition"):
        return where, ""
    return os.path.dirname(where), f" from {_text(f'{where}/start')}"


def _ids(where: str, names: tuple[str, ...]) -> list[tuple[str, str]]:
    found = [(name, _text(f"{where}/{name}")) for name in names]
    return [(name, value) for name, value in found if len(set(value)) > 1 and value.lower() not in _NO_ID]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError as error:
        if error.errno in _NOT_THERE:
            return ""
        raise
