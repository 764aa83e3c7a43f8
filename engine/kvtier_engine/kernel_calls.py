"""The few Linux calls that Python 3.11 does not offer: mlock, prctl and statx, with the kernel's own names.

Nothing here decides anything. Every call raises OSError as the kernel reports it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Final, NamedTuple

__all__ = [
    "MADV_WIPEONFORK",
    "DirectAlignment",
    "address_of",
    "address_of_view",
    "direct_alignment",
    "lock_memory",
    "set_dumpable",
]

# <asm-generic/mman-common.h>; Python's mmap module has no name for it.
MADV_WIPEONFORK: Final = 18
# <linux/prctl.h>
PR_GET_DUMPABLE: Final = 3
PR_SET_DUMPABLE: Final = 4
# <linux/stat.h>, <fcntl.h>
STATX_DIOALIGN: Final = 0x2000
AT_EMPTY_PATH: Final = 0x1000
_STATX_BYTES: Final = 256
_STX_DIO_OFFSET: Final = 152  # stx_dio_mem_align, stx_dio_offset_align

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def address_of(memory: mmap.mmap) -> int:
    """Address of a mapping's first byte."""
    first = ctypes.c_char.from_buffer(memory)
    try:
        return ctypes.addressof(first)
    finally:
        del first  # an exported buffer would keep the mapping from being closed


def address_of_view(view: memoryview) -> int:
    """Address of a writable view's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def lock_memory(memory: mmap.mmap) -> None:
    """Keep a mapping out of swap (mlock(2)). Raises OSError: EPERM or ENOMEM beyond RLIMIT_MEMLOCK."""
    _check(_libc.mlock(address_of(memory), len(memory)), "mlock")


def set_dumpable(dumpable: bool) -> None:
    """PR_SET_DUMPABLE: False means no core dump, and no ptrace, /proc/PID/mem or pidfd_getfd by the same user."""
    _check(_libc.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "prctl(PR_SET_DUMPABLE)")


class DirectAlignment(NamedTuple):
    """What statx(2) says of O_DIRECT on a file, in bytes; both 0 means that the kernel offers none for it."""

    memory_bytes: int
    offset_bytes: int


def direct_alignment(fd: int) -> DirectAlignment | None:
    """STATX_DIOALIGN of an open file; None where kernel (before 6.1) or file system do not report it."""
    if not hasattr(_libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    _check(_libc.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, buffer), "statx")
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & STATX_DIOALIGN:
        return None
    return DirectAlignment(*struct.unpack_from("=II", buffer, _STX_DIO_OFFSET))
