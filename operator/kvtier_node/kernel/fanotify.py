"""Opens of a file system's files that wait for a permission of this process (fanotify(7), FAN_OPEN_PERM).

Whoever opens a regular file of a marked file system, through whatever mount and in whatever namespace, waits in open(2) until the
answer; only its own SIGKILL ends the wait otherwise. Directories and descriptors that are open already are not asked about. When
the group's descriptor is closed, by the death of its process too, everything that waits goes on.

This process's own opens are asked about as well: who reads must never wait for one of them. The kernel opens each file for the
reader too, without waiting: one that somebody has a lease on is refused (EPERM) instead of asked about.

Needs CAP_SYS_ADMIN, and a kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS and FAN_REPORT_PIDFD (5.15).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc
from kvtier_node.kernel.processes import PidFd

__all__ = ["OpenAttempt", "OpenPermissions"]

_METADATA: Final = struct.Struct(
    "=IBBHQii"
)  # struct fanotify_event_metadata: length, version, -, its size, mask, fd, pid
_PIDFD: Final = struct.Struct("=BBHi")  # struct fanotify_event_info_pidfd: type, -, length, pidfd
_ANSWER: Final = struct.Struct("=iI")  # struct fanotify_response
_ROOM: Final = 4096
_NOT_IN_THIS_KERNEL: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})


@dataclass
class OpenAttempt:
    """A process that waits in open(2). It has to be answered once (`OpenPermissions.answer`), which closes what is held of it."""

    fd: int
    """The file, as the kernel opened it for us to look at."""
    process: PidFd | None
    """Who waits; None if it has ended."""
    pid: int
    """0: a process that this one's PID namespace does not show."""


class OpenPermissions:
    """One group of marks. `close` lets all go on that wait, unless they were answered before."""

    def __init__(self) -> None:
        """Raises KernelError where the kernel has no such thing, or gives none (128 groups a user: fs.fanotify)."""
        flags = c.FAN_CLOEXEC | c.FAN_NONBLOCK | c.FAN_CLASS_CONTENT | c.FAN_UNLIMITED_QUEUE | c.FAN_REPORT_PIDFD
        try:
            self._fd = libc.fanotify_init(flags, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | c.O_LARGEFILE)
        except OSError as error:
            raise KernelError(
                f"opens cannot be held back: {error.strerror}",
                obj="fanotify_init(2)",
                remedy="use a kernel of 5.15 or later with CONFIG_FANOTIFY_ACCESS_PERMISSIONS"
                if error.errno in _NOT_IN_THIS_KERNEL
                else "raise fs.fanotify.max_user_groups (sysctl)",
            ) from error

    def fileno(self) -> int:
        return self._fd

    def mark_file_system(self, fd: int) -> None:
        """From now on opens of the files of `fd`'s file system wait. The mark ends with its last mount. Raises KernelError."""
        try:
            libc.fanotify_mark(self._fd, c.FAN_MARK_ADD | c.FAN_MARK_FILESYSTEM, c.FAN_OPEN_PERM, fd)
        except OSError as error:
            raise KernelError(
                f"opens cannot be held back: {error.strerror}",
                obj="fanotify_mark(2)",
                remedy="use a kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS",
            ) from error

    def attempts(self) -> Iterator[OpenAttempt]:
        """Those that came since the last call; none if there are none. Never waits for one."""
        while True:
            try:
                raw = os.read(self._fd, _ROOM)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise
                continue  # the kernel could not open the file for us (a lease, no key, no descriptor left), and refused it
            yield from _parse(raw)

    def answer(self, attempt: OpenAttempt, *, allowed: bool) -> None:
        """Let it go on, or refuse it (EPERM)."""
        try:
            os.write(self._fd, _ANSWER.pack(attempt.fd, c.FAN_ALLOW if allowed else c.FAN_DENY))
        except FileNotFoundError:
            pass  # it was killed while it waited
        finally:
            os.close(attempt.fd)
            if attempt.process is not None:
                attempt.process.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _parse(raw: bytes) -> Iterator[OpenAttempt]:
    at = 0
    while at < len(raw):
        length, version, _, size, _, fd, pid = _METADATA.unpack_from(raw, at)
        if version != c.FANOTIFY_METADATA_VERSION:
            raise KernelError(f"another version of fanotify's structures: {version}", obj="fanotify(7)")
        pidfd = -1
        info = at + size
        while info < at + length:
            kind, _, info_length, value = _PIDFD.unpack_from(raw, info)
            if kind == c.FAN_EVENT_INFO_TYPE_PIDFD:
                pidfd = value
            info += info_length
        yield OpenAttempt(fd, PidFd(pidfd, pid, None) if pidfd >= 0 else None, pid)
        at += length
