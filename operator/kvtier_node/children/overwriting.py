"""Overwriting a file in place, in a child: it is slow, and can hang on a device that does not answer."""

from __future__ import annotations

import errno
import os
from typing import Final

from kvtier_node.kernel import files

__all__ = ["clear", "overwrite", "overwrite_files"]

_CHUNK_BYTES: Final = 4 << 20


def overwrite(*, fds: dict[str, int]) -> dict[str, object]:
    """Overwrite the allocated bytes of `fds["file"]` with random bytes, in place, and make them durable."""
    written = _fill(fds["file"])
    os.fdatasync(fds["file"])
    return {"written": written}


def overwrite_files(*, fds: dict[str, int]) -> dict[str, object]:
    """The same for every file of `fds`; an OSError has the name that it has there.

    All are written before the first is waited for, so that the disk has them together.
    """
    written = 0
    for step in (_fill, os.fdatasync):
        for name, fd in fds.items():
            try:
                written += step(fd) or 0
            except OSError as error:
                raise OSError(error.errno, error.strerror, name) from error
    return {"written": written}


def _fill(fd: int) -> int:
    written = 0
    size = os.fstat(fd).st_size
    for part in files.extents(fd, sync=True):
        end = min(part.logical + part.length, size)
        for offset in range(part.logical, end, _CHUNK_BYTES):
            data = os.urandom(min(_CHUNK_BYTES, end - offset))
            if os.pwrite(fd, data, offset) != len(data):
                raise OSError(errno.EIO, f"short write at byte {offset}")
            written += len(data)
    return written


def clear(*, fds: dict[str, int]) -> dict[str, object]:
    """Overwrite what `fds["file"]` holds with zeros and cut it to nothing: for memory (tmpfs), where in place is in place."""
    fd = fds["file"]
    zeros = bytes(_CHUNK_BYTES)
    written = offset = 0
    size = os.fstat(fd).st_size
    while offset < size:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        end = os.lseek(fd, offset, os.SEEK_HOLE)
        while offset < end:
            count = os.pwrite(fd, zeros[: end - offset], offset)
            offset, written = offset + count, written + count
    os.ftruncate(fd, 0)
    return {"written": written}
