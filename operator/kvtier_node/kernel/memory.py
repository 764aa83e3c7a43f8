"""Memory for secrets: filled by getrandom(2) in place, locked, left out of core dumps, wiped in forked children.

Leaves to others: what the secret is for (`backends.key_child`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["secret_page"]

LIBC: Final = ctypes.CDLL(None, use_errno=True)


_MADV_WIPEONFORK: Final = 18  # linux/mman.h; Python's mmap module does not name it


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@contextmanager
def secret_page(size_bytes: int) -> Iterator[memoryview]:
    """A view of `size_bytes` (at most a page) of fresh random bytes; zeroed when the block ends. Raises OSError."""
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page.madvise(mmap.MADV_DONTDUMP)
        page.madvise(_MADV_WIPEONFORK)
        holder = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        address = ctypes.addressof(holder)
        view = memoryview(page)[:size_bytes]
        try:
            _check(LIBC.mlock(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)))
            filled = 0
            while filled < size_bytes:
                filled += _check(
                    LIBC.getrandom(ctypes.c_void_p(address + filled), ctypes.c_size_t(size_bytes - filled), 0)
                )
            yield view
        finally:
            view[:] = bytes(size_bytes)
            view.release()
            del holder
