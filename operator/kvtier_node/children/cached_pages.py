"""Plaintext in memory of a volume whose key is gone: the page cache of a file system that somebody still has mounted.

Where nobody has, the kernel drops it with the last mount. In a child: the device answers every call with an error by now, and
what the file system makes of that can take its time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from kvtier_node.kernel import detached, page_cache

__all__ = ["drop"]

_DEEPEST: Final = 32


def drop(*, fds: dict[str, int], source: str, directory: str) -> dict[str, object]:
    """Drop the cached pages of every file below `directory` of the ext4 on `source`; how many files, and pages left.

    `unknown`: files that could not be opened or asked. `mounted` is false where no mount is left, and so no cache.
    """
    del fds
    files = pages = unknown = 0
    try:
        with detached.mounted(source, "ext4") as root:
            top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
            for fd in _files(top, _DEEPEST):
                files += 1
                left = None if fd is None else _drop(fd)
                unknown += left is None
                pages += left or 0
    except OSError:
        # A file system that nobody has mounted would be read from the device, which answers with an error.
        return {"mounted": files > 0, "files": files, "pages": pages, "unknown": unknown + (files > 0)}
    return {"mounted": True, "files": files, "pages": pages, "unknown": unknown}


def _files(directory: int, depth: int) -> Iterator[int | None]:
    """Each regular file below, open until the next one is asked for; None for one that cannot be opened."""
    try:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if not entry.is_symlink()]
        for name, is_directory in found:
            flags = os.O_DIRECTORY if is_directory else os.O_NONBLOCK
            try:
                fd = os.open(name, os.O_RDONLY | flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            except OSError:
                yield None
                continue
            if is_directory:
                if depth > 0:
                    yield from _files(fd, depth - 1)
                else:
                    os.close(fd)
                    yield None
                continue
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    yield fd
            finally:
                os.close(fd)
    finally:
        os.close(directory)


def _drop(fd: int) -> int | None:
    """Pages of the file that are still cached: mapped, most likely. None: the kernel does not say."""
    with suppress(OSError):
        os.fdatasync(fd)  # dirty pages fail to be written, and are clean after that
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    left = page_cache.cached_pages(fd)
    if left:
        with suppress(OSError):  # mapped or dirty: a shorter file has no pages, whoever uses them
            os.truncate(f"/proc/self/fd/{fd}", 0)
        left = page_cache.cached_pages(fd)
    return left
