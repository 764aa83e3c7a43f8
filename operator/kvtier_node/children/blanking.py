"""Making a block device blank, in a child: it takes as long as the device is slow, and can hang.

By the descriptor that the caller has looked at, never by a path: the path may name another device by now.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from kvtier_node.kernel import constants, libc

__all__ = ["discard", "zero"]

_CHUNK_BYTES: Final = 1 << 30  # so that a kill comes through
_NOT_SUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL})


def discard(*, fds: dict[str, int]) -> dict[str, object]:
    """Discard every block of `fds["device"]` (BLKDISCARD); `done` is false where the device takes no discard."""
    try:
        _over_all(fds["device"], constants.BLKDISCARD)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return {"done": False}
    return {"done": True}


def zero(*, fds: dict[str, int]) -> dict[str, object]:
    """Zero every block of `fds["device"]` (BLKZEROOUT), durably."""
    _over_all(fds["device"], constants.BLKZEROOUT)
    os.fsync(fds["device"])
    return {}


def _over_all(device: int, request: int) -> None:
    size = os.lseek(device, 0, os.SEEK_END)
    for offset in range(0, size, _CHUNK_BYTES):
        span = struct.pack("=2Q", offset, min(_CHUNK_BYTES, size - offset))
        libc.ioctl(device, request, ctypes.create_string_buffer(span, len(span)))
