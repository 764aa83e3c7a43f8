"""How often texts stand on the disk: files read past the page cache, by name or by a descriptor that outlives the name."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path

__all__ = ["hits_in_file", "hits_in_folder"]

_CHUNK = 4 << 20


def hits_in_file(fd: int, texts: Mapping[str, bytes]) -> dict[str, int]:
    """Each text's hits in an open file, up to the end it had. The overlap of chunks is as long as a text, so none is missed."""
    overlap = max(map(len, texts.values()))
    found = dict.fromkeys(texts, 0)
    tail = b""
    with mmap.mmap(-1, _CHUNK) as buffer:
        offset = 0
        while got := os.preadv(fd, [buffer], offset):
            offset += got
            content = tail + buffer[:got]
            tail = content[-(overlap - 1) :]
            for name, text in texts.items():
                found[name] += content.count(text) - tail.count(text)
            if got % mmap.PAGESIZE:
                break  # the end of a log that grows: O_DIRECT reads nothing from such an offset on
    for name, text in texts.items():
        found[name] += tail.count(text)
    return found


def hits_in_folder(folder: Path, texts: Mapping[str, bytes]) -> dict[str, int]:
    """Each text's hits in every regular file of `folder`'s own file system. What goes meanwhile is not counted."""
    os.sync()
    found = dict.fromkeys(texts, 0)
    for at, _, names in os.walk(folder):
        for name in names:
            try:
                fd = _open(f"{at}/{name}")
            except FileNotFoundError:
                continue
            if fd is None:
                continue
            try:
                for text, count in hits_in_file(fd, texts).items():
                    found[text] += count
            finally:
                os.close(fd)
    return found


def _open(path: str) -> int | None:
    if not stat.S_ISREG(os.lstat(path).st_mode):
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no O_DIRECT has no cache to pass
            raise
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
