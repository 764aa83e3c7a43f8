"""Processes by what the kernel vouches for: pidfds, start times and the boot id. Never names, never ages.

A pid alone is not an identity: numbers are reused. (boot id, pid, start time) is one, and a pidfd is one.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtier_api.errors import KernelError, NotFound

__all__ = ["PidFd", "boot_id", "mount_namespace", "new_pidfd_from_child", "pids", "start_time"]


def boot_id() -> str:
    """The kernel's random id of this boot (proc(5), random/boot_id)."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def pids() -> list[int]:
    """Every process that this one's /proc shows, the lowest number first. Some may have ended when they are looked at."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def mount_namespace(pid: int) -> int | None:
    """The number of the mount namespace that the process is in; None if it has ended, or may not be asked.

    Another namespace can have the number once nothing is left of this one: it tells living processes apart, and no more.
    """
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of process `pid` (proc(5), stat field 22). Raises NotFound."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound("no such process", obj=f"process {pid}") from error
    # The name in parentheses may hold spaces and parentheses itself.
    return int(raw[raw.rindex(b")") + 2 :].split(b" ")[19])


class PidFd:
    """A process that cannot be mistaken for another. A context manager; `close` is idempotent."""

    def __init__(self, fd: int, pid: int, started: int | None) -> None:
        self.fd = fd
        self.pid = pid
        self.start_time = started
        """Clock ticks since boot; None where the process had ended before it could be read."""

    @classmethod
    def open(cls, pid: int, start_time: int | None = None) -> Self:
        """The process `pid`, if it started at `start_time` ticks (None: whichever has the number now).

        A zombie opens, and is `exited`. Raises NotFound if there is none, or the number belongs to another by now.
        """
        try:
            fd = os.pidfd_open(pid)
        except (ProcessLookupError, ValueError, OverflowError) as error:
            raise NotFound("no such process", obj=f"process {pid}") from error
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # the number is a thread's by now
                raise NotFound("no such process", obj=f"process {pid}") from error
            raise KernelError(f"pidfd_open: {error.strerror}", obj=f"process {pid}") from error
        process = cls(fd, pid, None)
        try:
            process._identify(start_time)
        except BaseException:
            process.close()
            raise
        return process

    def _identify(self, expected: int | None) -> None:
        found = start_time(self.pid)
        # Not reaped after the read means that the number was this process's during the read.
        if self._reaped():
            raise NotFound("the process has ended", obj=f"process {self.pid}")
        if expected is not None and found != expected:
            raise NotFound(
                f"the process has ended, and its number belongs to another: started at tick {found}, not {expected}",
                obj=f"process {self.pid}",
            )
        self.start_time = found

    def _reaped(self) -> bool:
        for line in Path(f"/proc/self/fdinfo/{self.fd}").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "Pid":
                return int(value) <= 0
        raise KernelError("fdinfo of a pidfd has no Pid line", obj=f"process {self.pid}", remedy="mount /proc")

    def fileno(self) -> int:
        """For select, poll and asyncio's add_reader: readable once the process has ended."""
        return self.fd

    def exited(self) -> bool:
        """Whether every thread of the process has ended; a zombie has."""
        return self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the end; whether it has come. Reaps nothing."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def send_signal(self, number: int) -> bool:
        """Send a signal; False if the process has ended."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def new_pidfd_from_child(pid: int) -> PidFd:
    """A child of this process that was not waited for yet: its number cannot have been reused."""
    return PidFd.open(pid)
