"""The state directory: opened safely once, then used by descriptor; its lock and its small durable files.

Every component is walked without following a symlink. A directory that another user could write, or swap, is refused:
who can write the ledger or the node's key can forget a place or forge a receipt. What the files hold is left to
`kvtier_node.ledger` and `kvtier_node.identity`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Self

from kvtier_api.errors import Busy, KernelError, NotFound, NotPermitted, UnsafePath

__all__ = ["StateDirectory"]

LOCK_WAIT_S: Final = 30.0
_LOCK_POLL_S: Final = 0.002
_WALK: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY: Final = "give --state-dir a real directory that only the agent's user can write, all its parents included"


class StateDirectory:
    """An open, checked state directory. `fd` and `path` name the same directory for as long as it is open."""

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, create: bool = True) -> Self:
        """Open `path`, making missing components (0700) when `create`; the last one is set to 0700.

        Raises UnsafePath for a symlink, a foreign owner or a directory that others can write; NotFound when it is
        missing and `create` is false; NotPermitted and KernelError for what the kernel refuses.
        """
        text = os.path.abspath(os.fspath(path))
        if text == "/":
            raise UnsafePath("the state directory cannot be the root directory", obj=text, remedy=_REMEDY)
        walked = "/"
        fd = _enter(-1, "/", walked, create=False, last=False)
        try:
            names = [name for name in text.split("/") if name]
            for position, name in enumerate(names):
                walked = os.path.join(walked, name)
                last = position == len(names) - 1
                child = _enter(fd, name, walked, create=create, last=last)
                os.close(fd)
                fd = child
                _check_directory(os.fstat(fd), walked, last=last)
            if stat.S_IMODE(os.fstat(fd).st_mode) != 0o700:
                os.fchmod(fd, 0o700)
        except OSError as error:
            os.close(fd)
            raise KernelError(f"cannot be made private: {error.strerror}", obj=walked) from error
        except BaseException:
            os.close(fd)
            raise
        return cls(text, fd)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def path_of(self, name: str) -> str:
        return os.path.join(self.path, name)

    def sync(self) -> None:
        """Make names (created, renamed, removed) durable."""
        os.fsync(self.fd)

    def file_status(self, name: str) -> os.stat_result | None:
        """The status of the private file `name`, or None when it is missing.

        It is never opened: closing any descriptor of a SQLite file drops all POSIX locks that this process has on it.
        Raises UnsafePath unless it is a regular file of one name, owned by this user, closed to all others.
        """
        try:
            while not (status := os.stat(name, dir_fd=self.fd, follow_symlinks=False)).st_nlink:
                continue  # removed or replaced between the kernel's two steps: what has the name now is looked at
        except FileNotFoundError:
            return None
        check_private_file(status, self.path_of(name))
        return status

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of the private file `name` (0600 when `flags` creates it), checked like `file_status`."""
        while True:
            try:
                fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.EMLINK):
                    raise UnsafePath("a symbolic link is in the file's place", obj=self.path_of(name)) from error
                raise
            try:
                status = os.fstat(fd)
                if status.st_nlink:
                    check_private_file(status, self.path_of(name))
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed or replaced since it was opened

    def write_new(self, name: str, content: bytes) -> None:
        """Put `content` durably at `name`, which must not exist, in one step: a crash leaves all of it or none.

        The caller holds the exclusive lock.
        """
        temporary = f"{name}.new"
        self.remove(temporary)
        fd = self.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        self.move(temporary, name)
        self.sync()

    def remove(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass

    def move(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    @contextmanager
    def lock(self, *, exclusive: bool) -> Iterator[None]:
        """The directory's lock: shared around each transaction, exclusive to make, replace or move files.

        Not re-entrant. Raises Busy after 30 s.
        """
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise Busy(f"locked for {LOCK_WAIT_S:g} s by another process", obj=self.path) from error
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)


def check_private_file(status: os.stat_result, path: str) -> None:
    """Raise UnsafePath unless `status` is of a regular file, this user's, closed to all others, with one name."""
    remedy = "find out who put it there; move it away if it is not kvtier's"
    if not stat.S_ISREG(status.st_mode):
        raise UnsafePath("not a regular file", obj=path, remedy=remedy)
    if status.st_uid != os.geteuid():
        raise UnsafePath(f"owned by uid {status.st_uid}, not by {os.geteuid()}", obj=path, remedy=remedy)
    if status.st_mode & 0o077:
        raise UnsafePath(f"open to other users (mode {stat.S_IMODE(status.st_mode):04o})", obj=path, remedy=remedy)
    if status.st_nlink != 1:
        raise UnsafePath(f"has {status.st_nlink} names", obj=path, remedy=remedy)


def _enter(parent: int, name: str, walked: str, *, create: bool, last: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC if last else _WALK
    try:
        try:
            return os.open(name, flags, dir_fd=parent if parent >= 0 else None)
        except FileNotFoundError:
            if not create:
                raise
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
            _sync_directory(parent)
        except FileExistsError:
            pass
        return os.open(name, flags, dir_fd=parent)
    except FileNotFoundError as error:
        if create:  # /proc, for one: it is there, and takes no directory
            raise KernelError(f"cannot be made: {error.strerror}", obj=walked, remedy=_REMEDY) from error
        raise NotFound("the state directory does not exist", obj=walked, remedy="start 'kvtier node' once") from error
    except PermissionError as error:
        raise NotPermitted(f"cannot be opened or made: {error.strerror}", obj=walked, remedy=_REMEDY) from error
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise UnsafePath("a symbolic link, or not a directory", obj=walked, remedy=_REMEDY) from error
        raise KernelError(f"cannot be opened or made: {error.strerror}", obj=walked, remedy=_REMEDY) from error


def _sync_directory(path_fd: int) -> None:
    """fsync a directory that is open with O_PATH only, which fsync(2) refuses."""
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=path_fd)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_directory(status: os.stat_result, path: str, *, last: bool) -> None:
    user = os.geteuid()
    if status.st_uid not in ((user,) if last else (user, 0)):
        raise UnsafePath(f"owned by uid {status.st_uid}, not by {user}", obj=path, remedy=_REMEDY)
    sticky = bool(status.st_mode & stat.S_ISVTX) and not last
    others = status.st_mode & stat.S_IWOTH
    group = status.st_mode & stat.S_IWGRP and (last or status.st_gid not in (0, os.getegid()))
    if (others or group) and not sticky:
        raise UnsafePath(
            f"other users can write here (mode {stat.S_IMODE(status.st_mode):04o})", obj=path, remedy=_REMEDY
        )
