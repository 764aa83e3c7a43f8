"""The kernel's exact answer to "has anybody else this file open or mapped?": a write lease (fcntl(2), F_SETLEASE).

A write lease is granted only while no other open file description of the inode exists, in whatever process, mount or
PID namespace, mappings and inherited descriptors included. Not seen: O_PATH descriptors (they cannot read), and
duplicates of the prober's own description, so probe on a descriptor of your own. Needs the file's owner or CAP_LEASE.
"""

from __future__ import annotations

import errno
import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvtier_api.errors import Busy, KernelError, NotPermitted

__all__ = ["hold", "sole_holder", "wanted_by_another"]

# A lease that another's open breaks sends SIGIO, which ends a process by default, even in the microseconds of a probe.
# SIGURG is ignored by default, and needs no handler.
_BREAK_SIGNAL: Final = signal.SIGURG


def _take(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, _BREAK_SIGNAL)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
        if error.errno == errno.EACCES:
            raise NotPermitted(
                "a lease needs the file's owner or CAP_LEASE", obj=f"descriptor {fd}", remedy="run the agent as root"
            ) from error
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            raise KernelError(
                "the file system has no leases, or this is no regular file",
                obj=f"descriptor {fd}",
                remedy="put the tier on a local file system (ext4, XFS, f2fs)",
            ) from error
        raise
    return True


def sole_holder(fd: int) -> bool:
    """Whether `fd`, opened by the caller itself, is the only open description of its file. Nothing is kept."""
    if not _take(fd):
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


@contextmanager
def hold(fd: int) -> Iterator[None]:
    """Keep everybody else from opening the file while the block runs, for at most /proc/sys/fs/lease-break-time seconds
    from another's first try (O_NONBLOCK opens fail at once with EWOULDBLOCK). Raises Busy if another has it open.
    """
    if not _take(fd):
        raise Busy("another process has the file open or mapped", obj=f"descriptor {fd}", remedy="wait until it ends")
    try:
        yield
    finally:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def wanted_by_another(fd: int) -> bool:
    """While `hold` runs: whether somebody waits to open the file, or got it because the break time passed."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_WRLCK
