"""Who looks after a volume: the process that holds the write lock on `<state_dir>/volumes/<volume_id>.lock`.

`kvtier run` guards its own volume, `kvtier node` every volume that nobody guards. The lock is an open-file-description lock:
the kernel drops it when its holder ends, by whatever means, so a dead guardian can never be mistaken for a living one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from types import TracebackType
from typing import Final, Self

from kvtier_api.errors import KernelError
from kvtier_node.kernel.refusal import refused

__all__ = ["Guardian"]

_VOLUME_ID: Final = re.compile(r"kvv-[0-9a-f]{20}")
_FLOCK: Final = "hhqqixxxx"  # struct flock of fcntl(2) on 64-bit Linux


class Guardian:
    """Holds the lock of one volume until `close`."""

    def __init__(self, fd: int, path: str, volume_id: str) -> None:
        self._fd = fd
        self._path = path
        self.volume_id = volume_id

    @classmethod
    def try_acquire(cls, state_dir: str, volume_id: str) -> Self | None:
        """Become the guardian of `volume_id`, or return None while another process is.

        Raises KernelError; InsufficientSpace, NotPermitted and others of `refused` where the lock file cannot be made.
        """
        if not _VOLUME_ID.fullmatch(volume_id):
            raise KernelError("not a volume id", obj=repr(volume_id), remedy="this is a defect; please report it")
        directory = os.path.join(state_dir, "volumes")
        path = os.path.join(directory, f"{volume_id}.lock")
        while True:
            try:
                os.makedirs(directory, mode=0o700, exist_ok=True)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise refused(error, path) from error
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return None
                raise KernelError(
                    f"cannot lock: {error.strerror}", obj=path, remedy="use a local file system"
                ) from error
            # The last guardian unlinks the file: a lock on a file without a name guards nothing.
            try:
                named = os.stat(path, follow_symlinks=False)
            except FileNotFoundError:
                os.close(fd)
                continue
            held = os.fstat(fd)
            if (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino):
                return cls(fd, path, volume_id)
            os.close(fd)

    def close(self, *, ended: bool = False) -> None:
        """Stop guarding. `ended` says that the volume is Erased or Abandoned, so that the lock file goes too."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            if ended:
                os.unlink(self._path)
        except FileNotFoundError:
            pass  # a name that is gone already guards nothing
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
