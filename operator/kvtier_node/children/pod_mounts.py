"""Mounts in kubelet's directories, in a child: the calls can hang on a mount that does not answer.

`attach` uses the new mount calls (open_tree, mount_setattr, move_mount; Linux 5.12), so that the mount has its flags from its
first moment, and leads to descriptors only: no name is looked up.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

from kvtier_node.kernel import constants, libc

__all__ = ["attach", "detach", "shut", "usage"]

# linux/mount.h; the numbers of the calls are the same on every architecture (asm-generic/unistd.h).
_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_MOUNT_SETATTR: Final = 442
_OPEN_TREE_CLONE: Final = 1
_MOVE_MOUNT_F_EMPTY_PATH: Final = 0x4
_MOVE_MOUNT_T_EMPTY_PATH: Final = 0x40
_NOSUID_NODEV_NOEXEC_NOATIME: Final = 0x2 | 0x4 | 0x8 | 0x10
_ATIME_MASK: Final = 0x70
_MOST: Final = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _MountAttributes(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def _call(number: int, *arguments: ctypes.c_long | ctypes.c_char_p | ctypes.c_void_p) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def attach(*, fds: dict[str, int]) -> dict[str, object]:
    """Mount the directory `fds["source"]` on the directory `fds["target"]`: nodev, nosuid, noexec, noatime."""
    number, empty = ctypes.c_long, ctypes.c_char_p(b"")
    tree = _call(
        _SYS_OPEN_TREE,
        number(fds["source"]),
        empty,
        number(_OPEN_TREE_CLONE | constants.AT_EMPTY_PATH | os.O_CLOEXEC),
    )
    try:
        wanted = _MountAttributes(attr_set=_NOSUID_NODEV_NOEXEC_NOATIME, attr_clr=_ATIME_MASK)
        _call(
            _SYS_MOUNT_SETATTR,
            number(tree),
            empty,
            number(constants.AT_EMPTY_PATH),
            ctypes.cast(ctypes.pointer(wanted), ctypes.c_void_p),
            number(ctypes.sizeof(wanted)),
        )
        _call(
            _SYS_MOVE_MOUNT,
            number(tree),
            empty,
            number(fds["target"]),
            empty,
            number(_MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH),
        )
    finally:
        os.close(tree)
    return {}


def detach(*, fds: dict[str, int], name: str) -> dict[str, object]:
    """Take every mount off `name` in the directory `fds["parent"]`, and say how many there were.

    umount2(2) does not ask the file system anything, so a dead one goes too. EINVAL: nothing is mounted there.
    """
    where = f"/proc/self/fd/{fds['parent']}/{name}"
    for count in range(_MOST):
        try:
            libc.umount2(where, constants.MNT_DETACH | constants.UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):
                return {"count": count}
            raise
    raise OSError(errno.EBUSY, f"still mounted after {_MOST} unmounts")


def shut(*, fds: dict[str, int], name: str) -> dict[str, object]:
    """Put an empty, read-only tmpfs over `name` in the directory `fds["parent"]`, in the place of what is mounted there."""
    detach(fds=fds, name=name)
    target = libc.openat2(fds["parent"], name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    flags = constants.MS_RDONLY | constants.MS_NODEV | constants.MS_NOSUID | constants.MS_NOEXEC
    libc.mount("kvtier-erased", f"/proc/self/fd/{target}", "tmpfs", flags, "size=4k,nr_inodes=2,mode=0555")
    return {}


def usage(*, fds: dict[str, int]) -> dict[str, object]:
    """Bytes and inodes of the file system that the directory `fds["root"]` is on (statvfs(3))."""
    found = os.fstatvfs(fds["root"])
    return {
        "bytes_total": found.f_blocks * found.f_frsize,
        "bytes_free": found.f_bfree * found.f_frsize,
        "bytes_available": found.f_bavail * found.f_frsize,
        "inodes_total": found.f_files,
        "inodes_free": found.f_ffree,
    }
