"""How a pod's use of a volume is ended from outside: for an erasure that is asked for while the pod runs.

The target is shut, so that the pod's next container finds an empty, read-only directory there. Then whoever has a file of the
volume open ends: by pidfd, SIGTERM first. A process is a holder because the kernel shows the volume's file among its descriptors,
mappings, or working directories, in whatever namespace; never by name.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import NotFound
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.kernel.processes import PidFd, pids, start_time
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.pods.target import TargetPath, open_target_if_there
from kvtier_node.slots import walk_files

__all__ = ["VolumeFiles", "end_use", "files_of_devices", "files_of_place", "has_file_open", "holders"]

_GONE: Final = (FileNotFoundError, ProcessLookupError)
_ROUNDS: Final = 3


@dataclass(frozen=True)
class VolumeFiles:
    """What is a volume's own: all of a device, or these inodes of it where the file system is shared with others."""

    device: int
    inodes: frozenset[int] | None = None

    def has(self, info: os.stat_result) -> bool:
        return info.st_dev == self.device and (self.inodes is None or info.st_ino in self.inodes)


def files_of_place(place: Directory, *, own_device: bool) -> VolumeFiles | None:
    """The files of the volume at `place`; None where nothing is there any more. Raises KvtierError, OSError."""
    if MOUNT_NAME not in place.names():
        return None
    with place.child(MOUNT_NAME, same_device=False, any_owner=True) as root:
        if own_device:
            return VolumeFiles(os.fstat(root.fd).st_dev) if root.is_mount_point() else None
        if SLOTS_DIRECTORY not in root.names():
            return None
        with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
            inodes = {os.fstat(root.fd).st_ino, os.fstat(slots.fd).st_ino}
            for directory, name in walk_files(slots):
                info = directory.stat_if_there(name)
                if info is not None:
                    inodes |= {info.st_ino, os.fstat(directory.fd).st_ino}
            return VolumeFiles(os.fstat(slots.fd).st_dev, frozenset(inodes))


def files_of_devices(paths: Iterable[str]) -> VolumeFiles | None:
    """The files of a volume that is mounted at its place no more: of the first of these block devices that is there.

    A process that opened one after the first look, in its own mount namespace, is found by it.
    """
    for path in paths:
        try:
            return VolumeFiles(os.stat(path).st_rdev)
        except FileNotFoundError:
            continue
    return None


def holders(files: VolumeFiles) -> list[tuple[int, int]]:
    """Processes (pid, start time) that have a file of the volume open, mapped, or as a working directory; not this one.

    Needs to see every process (a PID namespace that is the host's), and CAP_SYS_PTRACE.
    """
    found = []
    for pid in pids():
        try:
            started = start_time(pid)
        except NotFound:
            continue
        if pid != os.getpid() and any(files.has(info) for info in _used_by(pid)):
            found.append((pid, started))
    return found


def has_file_open(files: VolumeFiles, pid: int) -> bool:
    """Whether the process has a regular file of the volume open or mapped: not one that still waits in open(2)."""
    return any(stat.S_ISREG(info.st_mode) and files.has(info) for info in _open_in(pid))


def _used_by(pid: int) -> Iterator[os.stat_result]:
    for link in ("cwd", "root"):
        yield from _stat(f"/proc/{pid}/{link}")
    yield from _open_in(pid)


def _open_in(pid: int) -> Iterator[os.stat_result]:
    for folder in ("fd", "map_files"):
        try:
            names = os.listdir(f"/proc/{pid}/{folder}")
        except (*_GONE, PermissionError):  # it ended; or a kernel thread, which maps no files
            continue
        for name in names:
            yield from _stat(f"/proc/{pid}/{folder}/{name}")


def _stat(path: str) -> Iterator[os.stat_result]:
    try:
        yield os.stat(path)
    except OSError:  # it ended, or what it had open there does not answer any more: not a file of a volume that lives
        return


def end_use(consumer: PodConsumer, files: VolumeFiles | None, *, grace_s: float) -> None:
    """Shut the target and end the holders: SIGTERM, after `grace_s` SIGKILL. Raises KvtierError, OSError."""
    target = open_target_if_there(TargetPath.parse(consumer.pod.target))
    if target is not None:
        with target:
            target.shut()
    if files is None:
        return
    for round_ in range(_ROUNDS):  # a supervisor in the container may start another
        found = holders(files)
        if not found:
            return
        _end(found, signal.SIGTERM if round_ == 0 else signal.SIGKILL, grace_s)


def _end(processes: list[tuple[int, int]], number: signal.Signals, grace_s: float) -> None:
    """Send a signal to all of them, and wait for their ends, `grace_s` seconds in all."""
    until = time.monotonic() + grace_s
    with ExitStack() as stack:
        sent = []
        for pid, started in processes:
            try:
                process = stack.enter_context(PidFd.open(pid, started))
            except NotFound:
                continue
            process.send_signal(number)
            sent.append(process)
        for process in sent:
            process.wait(max(0.0, until - time.monotonic()))
