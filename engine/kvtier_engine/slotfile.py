"""One rank's slot file: opened safely, read and written by offset, never created, never resized.

O_DIRECT is used where it is measured to work: the kernel must offer it for this file (STATX_DIOALIGN), the slot size
must suit its alignment, and a probe read must succeed. Otherwise the file is opened through the page cache and
`direct_reason` says why. Each transfer first looks at the inode: a file that was unlinked or cut short takes no
more bytes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import Final

from kvtier_api.errors import EngineError, NotFound, UnsafePath
from kvtier_engine import kernel_calls
from kvtier_engine.staging import PAGE_BYTES, aligned_memory

__all__ = ["SlotFile"]

_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_REMEDY: Final = "the node agent provisions slot files; the engine never creates or resizes one"


def _advance(views: list[memoryview], count: int) -> list[memoryview]:
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if views and count else views


def _refuse_unsuitable(info: os.stat_result, path: str, min_bytes: int) -> None:
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise UnsafePath("not a regular file with exactly one name", obj=path, remedy=_REMEDY)
    if info.st_size < min_bytes:
        raise EngineError(f"the slot file has {info.st_size} bytes, {min_bytes} are needed", obj=path, remedy=_REMEDY)


def _refuse_device(path: str) -> None:
    raise UnsafePath("not on the device of its directory: something is mounted over it", obj=path, remedy=_REMEDY)


class SlotFile:
    """Raises on opening: NotFound, UnsafePath (not a regular file, more than one name), EngineError (too small)."""

    def __init__(
        self, path: str, *, min_bytes: int, slot_size_bytes: int, direct: bool = True, dir_fd: int | None = None
    ):
        self.path = path
        self.min_bytes = min_bytes
        try:
            fd = os.open(path, _FLAGS, dir_fd=dir_fd)
        except FileNotFoundError as error:
            raise NotFound("no slot file", obj=path, remedy=_REMEDY) from error
        except OSError as error:
            kind = UnsafePath if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO} else EngineError
            raise kind(f"cannot open the slot file: {error.strerror}", obj=path, remedy=_REMEDY) from error
        try:
            info = os.fstat(fd)
            _refuse_unsuitable(info, path, min_bytes)
            if dir_fd is not None and info.st_dev != os.fstat(dir_fd).st_dev:
                _refuse_device(path)
            self.size_bytes = info.st_size
            self.direct_reason = self._why_not_direct(fd, slot_size_bytes) if direct else "switched off"
            if not self.direct_reason:
                self.direct_reason = self._probe(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    @staticmethod
    def _why_not_direct(fd: int, slot_size_bytes: int) -> str:
        alignment = kernel_calls.direct_alignment(fd)
        if alignment is None:  # unknown: the probe decides, with the strictest alignment in use
            alignment = kernel_calls.DirectAlignment(PAGE_BYTES, PAGE_BYTES)
        elif not alignment.offset_bytes:
            return "the kernel offers no direct I/O for this file"
        if slot_size_bytes % alignment.offset_bytes or alignment.memory_bytes > PAGE_BYTES:
            return f"the slot size {slot_size_bytes} is not a multiple of {alignment.offset_bytes} bytes"
        return ""

    @staticmethod
    def _probe(fd: int) -> str:
        """Switch O_DIRECT on for `fd` and read once; on failure switch it off again and say why."""
        plain = os.O_RDWR | os.O_NONBLOCK
        try:
            _set_status_flags(fd, plain | os.O_DIRECT)
            with memoryview(aligned_memory(PAGE_BYTES)) as page:
                os.preadv(fd, [page], 0)
        except OSError as error:
            _set_status_flags(fd, plain)
            return f"O_DIRECT probe: {error.strerror}"
        return ""

    @property
    def direct(self) -> bool:
        return not self.direct_reason

    def _check_inode(self) -> None:
        info = os.fstat(self._fd)
        if not info.st_nlink:
            raise OSError(errno.ESTALE, "the slot file was unlinked", self.path)
        if info.st_size < self.min_bytes:
            raise OSError(errno.ESTALE, "the slot file was cut short", self.path)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write all bytes at `offset`. Raises OSError; after a short write, with the error of the rest."""
        self._check_inode()
        rest = list(views)
        while rest:
            count = os.pwritev(self._fd, rest, offset)
            if not count:
                raise OSError(errno.EIO, "a write of no bytes", self.path)
            offset += count
            rest = _advance(rest, count)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all views from `offset`. Raises OSError, also at the end of the file."""
        self._check_inode()
        rest = list(views)
        while rest:
            count = os.preadv(self._fd, rest, offset)
            if not count:
                raise OSError(errno.EIO, "the file ends before the slot does", self.path)
            offset += count
            rest = _advance(rest, count)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _set_status_flags(fd: int, flags: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
