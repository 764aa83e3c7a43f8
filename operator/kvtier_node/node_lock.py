"""One `kvtier node` for each state directory: a lock that the kernel drops when its holder ends, by whatever means.

Not needed for safety, which the guardians' locks give; two agents would only do every look and every measurement twice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from types import TracebackType
from typing import Final, Self

from kvtier_api.errors import Busy, KernelError, NotFound
from kvtier_node.state_dir import StateDirectory

__all__ = ["NodeLock", "running_node"]

LOCK_NAME: Final = "node.lock"
_FLOCK: Final = "hhqqixxxx"  # struct flock of fcntl(2) on 64-bit Linux


def _flock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


class NodeLock:
    """Held from `acquire` to `close`, or to the end of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def acquire(cls, state_dir: str) -> Self:
        """Become the one `kvtier node` of `state_dir`, which is made if needed.

        Raises Busy while another is, and what `StateDirectory.open` raises.
        """
        state = StateDirectory.open(state_dir)
        try:
            fd = state.open_file(LOCK_NAME, os.O_RDWR | os.O_CREAT)
            try:
                _take(fd, state.path)
                os.ftruncate(fd, 0)
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
            except BaseException:
                os.close(fd)
                raise
            return cls(fd)
        finally:
            state.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take(fd: int, where: str) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise Busy(
                f"another 'kvtier node' (process {_pid(fd)}) uses this state directory",
                obj=where,
                remedy="stop that one first, or give --state-dir a directory of its own",
            ) from error
        raise KernelError(f"cannot lock: {error.strerror}", obj=where, remedy="use a local file system") from error


def _pid(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else 0


def running_node(state_dir: str) -> int | None:
    """The process id of the `kvtier node` that runs with `state_dir` now; None where none does.

    Raises what `StateDirectory.open` raises, but for a directory that does not exist.
    """
    try:
        state = StateDirectory.open(state_dir, create=False)
    except NotFound:
        return None
    try:
        if state.file_status(LOCK_NAME) is None:
            return None
        fd = state.open_file(LOCK_NAME, os.O_RDONLY)
        try:
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
            return None if struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK else _pid(fd)
        finally:
            os.close(fd)
    finally:
        state.close()
