"""How much of a file is in the page cache (cachestat(2), Linux 6.5). Dropping it is `files.drop_cached_pages`."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Final

__all__ = ["cached_pages"]

_SYS_CACHESTAT: Final = 451  # the same on every architecture (asm-generic/unistd.h)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Range(ctypes.Structure):
    _fields_ = [("off", ctypes.c_uint64), ("len", ctypes.c_uint64)]


class _Cachestat(ctypes.Structure):
    _fields_ = [
        ("nr_cache", ctypes.c_uint64),
        ("nr_dirty", ctypes.c_uint64),
        ("nr_writeback", ctypes.c_uint64),
        ("nr_evicted", ctypes.c_uint64),
        ("nr_recently_evicted", ctypes.c_uint64),
    ]


def cached_pages(fd: int) -> int | None:
    """Pages of the file that are in memory; None where the kernel is too old to say. Raises OSError."""
    whole, found = _Range(0, 0), _Cachestat()
    result = _libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT), ctypes.c_uint(fd), ctypes.byref(whole), ctypes.byref(found), ctypes.c_uint(0)
    )
    if result == 0:
        return int(found.nr_cache)
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EOPNOTSUPP):
        return None
    raise OSError(number, os.strerror(number))
