"""A file system mounted where no path leads: the new mount calls (fsopen, fsconfig, fsmount; Linux 5.2).

For a look at a device's file system that depends on no mount point, and that shows to nobody. A file system that is mounted
already, in whatever namespace, is the same one here (one superblock a device): its keys and open files too. Can hang on a
device that does not answer: for child processes.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["mounted"]

# linux/mount.h; the numbers of the calls are the same on every architecture (asm-generic/unistd.h).
_SYS_FSOPEN: Final = 430
_SYS_FSCONFIG: Final = 431
_SYS_FSMOUNT: Final = 432
_CLOEXEC: Final = 1
_FSCONFIG_SET_STRING: Final = 1
_FSCONFIG_CMD_CREATE: Final = 6
_NOSUID_NODEV_NOEXEC: Final = 0x2 | 0x4 | 0x8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: ctypes.c_long | ctypes.c_char_p | ctypes.c_void_p) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


@contextmanager
def mounted(source: str, fs_type: str) -> Iterator[int]:
    """A descriptor of the root directory of the file system on `source`, there while the block runs. Raises OSError."""
    number, text, none = ctypes.c_long, ctypes.c_char_p, ctypes.c_void_p(None)
    context = _call(_SYS_FSOPEN, text(fs_type.encode()), number(_CLOEXEC))
    try:
        _call(_SYS_FSCONFIG, number(context), number(_FSCONFIG_SET_STRING), text(b"source"), text(os.fsencode(source)),
              number(0))  # fmt: skip
        _call(_SYS_FSCONFIG, number(context), number(_FSCONFIG_CMD_CREATE), none, none, number(0))
        mount = _call(_SYS_FSMOUNT, number(context), number(_CLOEXEC), number(_NOSUID_NODEV_NOEXEC))
    finally:
        os.close(context)
    try:
        root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount)
        try:
            yield root
        finally:
            os.close(root)
    finally:
        os.close(mount)  # the mount goes with it
