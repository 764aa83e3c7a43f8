"""Reads any file or block device as chunks of bytes: the reader under the attack and the canary search.

It knows nothing of what is inside. Holes of a sparse file read as zeros and are skipped, which changes only the time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier_api.errors import KernelError, NotFound

__all__ = ["CHUNK_BYTES", "Bytes", "allocated_bytes", "chunks", "copy_data"]

CHUNK_BYTES: Final = 8 * 1024 * 1024
Bytes = npt.NDArray[np.uint8]


def allocated_bytes(path: str | Path) -> int:
    """Bytes that a file occupies on its file system; 0 where there is no such file."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def chunks(path: str | Path, *, overlap_bytes: int) -> Iterator[tuple[int, int, Bytes]]:
    """Yield (offset, own, data) over the whole file, in order, offsets multiples of 4096.

    The first `own` bytes of `data` are this chunk's; up to `overlap_bytes` of what follows come after, so that what
    crosses a border is seen whole. Count what starts below `own`, and nothing is counted twice.
    Raises NotFound where the file is not there or cannot be opened, KernelError where it cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotFound(f"cannot be opened ({error.strerror})", obj=str(path)) from error
    try:
        info = os.fstat(fd)
        size = os.lseek(fd, 0, os.SEEK_END)
        if stat.S_ISBLK(info.st_mode):
            # A device's own page cache may be older than what its file system wrote through another mapping.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        extents = _data_extents(fd, size) if stat.S_ISREG(info.st_mode) else iter([(0, size)])
        for begin, end in extents:
            for offset in range(begin, end, CHUNK_BYTES):
                own = min(CHUNK_BYTES, end - offset)
                yield offset, own, _read(fd, offset, own + overlap_bytes)
    except OSError as error:
        raise KernelError(f"cannot be read ({error.strerror})", obj=str(path)) from error
    finally:
        os.close(fd)


def _data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    at = 0
    while at < size:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            return  # ENXIO: only a hole is left
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin - begin % 4096, at


def _read(fd: int, offset: int, length: int) -> Bytes:
    buffer = bytearray(length)
    filled = 0
    while filled < length:
        count = os.preadv(fd, [memoryview(buffer)[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return np.frombuffer(buffer, dtype=np.uint8, count=filled)


def copy_data(source: str | Path, target: str | Path) -> None:
    """Copy what `source` holds to a new file of mode 0600, holes left out. Raises FileExistsError, else as `chunks`."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for offset, own, data in chunks(source, overlap_bytes=0):
            written = 0
            while written < own:
                written += os.pwrite(fd, data[written:own].tobytes(), offset + written)
    finally:
        os.close(fd)
