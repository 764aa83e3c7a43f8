"""What an errno means for a path: the one translation from OSError to kvtier's errors, with what to do about it."""

from __future__ import annotations

import errno
import os
from typing import Final

from kvtier_api.errors import (  # fmt: skip
    Busy,
    ForeignData,
    InsufficientSpace,
    KernelError,
    KvtierError,
    NotFound,
    NotPermitted,
    UnsafePath,
)

__all__ = ["as_refusal", "refused", "shown"]

_FOREIGN: Final = (ForeignData, "something is there that kvtier did not make", "look what it is, and move it away")
_LOCKED: Final = (NotPermitted, None, "look at owner, mode, mount options, and lsattr (immutable bit)")
_IN_USE: Final = (Busy, None, "look for a mount or a swap file there")
_MEANINGS: Final[dict[int, tuple[type[KvtierError], str | None, str]]] = {
    errno.ELOOP: (UnsafePath, "a symbolic link is on the way", "give the real path, as realpath shows it"),
    errno.EXDEV: (
        UnsafePath,
        "another mount begins here",
        "unmount it, or make the mount point itself an allowed root",
    ),
    errno.ENOTDIR: (UnsafePath, "not a directory", "move it away, or choose another path"),
    errno.ENAMETOOLONG: (UnsafePath, None, "choose a shorter name"),
    errno.ENOENT: (NotFound, "it does not exist", ""),
    errno.EEXIST: _FOREIGN,
    errno.ENOTEMPTY: _FOREIGN,
    errno.EISDIR: _FOREIGN,
    errno.EROFS: (NotPermitted, "the file system is read-only", "mount it read-write"),
    errno.EACCES: _LOCKED,
    errno.EPERM: _LOCKED,
    errno.EBUSY: _IN_USE,
    errno.ETXTBSY: _IN_USE,
}


def shown(path: str) -> str:
    """A path as an error shows it: on one line, whatever is in it."""
    return path if path.isprintable() else ascii(path)


def refused(error: OSError, where: str, *, at_fd: int | None = None) -> KvtierError:
    """The error to raise for `where`. `at_fd`: a descriptor whose file system's free space is named, if that is it."""
    number = error.errno or 0
    if number in (errno.ENOSPC, errno.EDQUOT):
        free = ""
        if at_fd is not None:
            there = os.fstatvfs(at_fd)
            free = f": {there.f_bavail * there.f_frsize} bytes and {there.f_favail} inodes are free"
        return InsufficientSpace(f"{error.strerror}{free}", obj=shown(where), remedy="free space on this file system")
    kind, cause, remedy = _MEANINGS.get(number, (KernelError, None, ""))
    return kind(cause or str(error.strerror or error), obj=shown(where), remedy=remedy)


def as_refusal(error: KvtierError | OSError, where: str) -> KvtierError:
    """kvtier's own error as it is, with the object that it names; the kernel's as `refused` tells it of `where`."""
    return error if isinstance(error, KvtierError) else refused(error, where)
