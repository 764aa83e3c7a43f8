"""What a consumer leaves in /dev/shm: vLLM's `vllm_offload_*` regions, plaintext of all ranks, which a crashed engine leaves.

A file is a consumer's because the kernel showed it open or mapped in the consumer's own process tree while that lived, in a
process of the file's owner (an O_PATH open needs no right to it): device and inode are then put on record. After the consumer's
end it is overwritten and unlinked, if nobody else has it open. Never by name or age alone: what was not seen so is somebody's.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_api.errors import Busy, NotFound
from kvtier_node.kernel import bounded, lease
from kvtier_node.kernel.processes import PidFd, start_time
from kvtier_node.receipts import Step

__all__ = [
    "FACT",
    "Process",
    "SharedFile",
    "SharedMemoryWatch",
    "erase",
    "erase_file",
    "files_of",
    "in_use",
    "is_running",
    "open_or_mapped",
    "regions_in",
    "user_of",
]

FACT: Final = "shared_memory"
"""Under this name a volume's facts keep the files that were seen."""
DIRECTORY: Final = "/dev/shm"  # noqa: S108  looked at, not trusted
_PREFIX: Final = "vllm_offload_"
_SCAN_AGAIN_S: Final = 2.0
_LIMIT_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 200 << 20
# A process that ends while it is looked at.
_GONE: Final = (FileNotFoundError, ProcessLookupError)

Process = tuple[int, int]
"""pid and start time (clock ticks since boot): together one process of this boot."""


@dataclass(frozen=True)
class SharedFile:
    """A file in /dev/shm that processes of the consumer's tree had open or mapped."""

    name: str
    device: int
    inode: int
    users: tuple[Process, ...]

    def record(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "device": self.device,
            "inode": self.inode,
            "users": [list(user) for user in self.users],
        }


def files_of(facts: dict[str, Any]) -> list[SharedFile]:
    """The files on record in a volume's facts."""
    return [
        SharedFile(
            str(found["name"]),
            int(found["device"]),
            int(found["inode"]),
            tuple((int(pid), int(started)) for pid, started in found["users"]),
        )
        for found in facts.get(FACT, [])
    ]


@dataclass
class SharedMemoryWatch:
    """Looks at the process tree of one consumer."""

    files: dict[tuple[int, int], SharedFile] = field(default_factory=dict)
    _tree: set[Process] = field(default_factory=set)
    _candidates: set[tuple[int, int]] = field(default_factory=set)
    _scanned_at: float = 0.0

    @classmethod
    def resume(cls, files: Sequence[SharedFile]) -> SharedMemoryWatch:
        """Go on where an earlier guardian stopped."""
        return cls({(file.device, file.inode): file for file in files}, {user for file in files for user in file.users})

    def look(self, pid: int) -> bool:
        """Look who in the tree of process `pid` has which region; whether something new was seen.

        Costs one directory listing, unless there are regions: then the tree is scanned when one is new, and every 2 s.
        """
        candidates = regions_in(DIRECTORY)
        self._remember_tree(pid)
        now = time.monotonic()
        if not candidates or (set(candidates) <= self._candidates and now - self._scanned_at < _SCAN_AGAIN_S):
            return False
        self._candidates, self._scanned_at = set(candidates), now
        new = False
        for process in self._tree:
            user = user_of(process[0])
            for key in open_or_mapped(process[0], candidates):
                name, owner = candidates[key]
                known = self.files.get(key)
                if known is None and owner != user:
                    continue  # what the process could not remove itself is not removed for it
                users = known.users if known else ()
                if process not in users:
                    self.files[key] = SharedFile(name, *key, (*users, process))
                    new = True
        return new

    def _remember_tree(self, pid: int) -> None:
        """Add what the tree has become; a member whose parent ended stays one. Those that ended, and reused pids, go."""
        members = {process for process in self._tree if is_running(process)}
        for member in _descendants({pid} | {process[0] for process in members}):
            try:
                members.add((member, start_time(member)))
            except NotFound:
                continue
        self._tree = members


def regions_in(directory: str) -> dict[tuple[int, int], tuple[str, int]]:
    """The regions that are there now: name and owner by device and inode."""
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(_PREFIX):
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISREG(info.st_mode):
                        found[(info.st_dev, info.st_ino)] = (entry.name, info.st_uid)
    except FileNotFoundError:
        pass  # a host without /dev/shm
    return found


def is_running(process: Process) -> bool:
    """Whether it has not ended: not a zombie, and not another with its number."""
    try:
        with PidFd.open(*process) as handle:
            return not handle.exited()
    except NotFound:
        return False


def user_of(pid: int) -> int | None:
    """The uid of a process, where it has but one: a setuid program holds what another user opened. None: it ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Uid:"):
                    uids = set(line.split()[1:])
                    return int(uids.pop()) if len(uids) == 1 else None
    except _GONE:
        pass
    return None


def _descendants(pids: set[int]) -> set[int]:
    """`pids` and everything that they and their children started (proc(5), /proc/PID/task/TID/children), each looked at once."""
    found, left = set(pids), list(pids)
    while left:
        pid = left.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except _GONE:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    children = {int(child) for child in file.read().split()} - found
            except _GONE:
                continue
            found |= children
            left += children
    return found


def open_or_mapped(pid: int, wanted: Collection[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which of the `wanted` files the process has open or mapped. By device and inode, whatever path it sees."""
    found = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            try:
                if _PREFIX in os.readlink(path):  # before stat: that could wait for a file system that hangs
                    info = os.stat(path)
                    found.add((info.st_dev, info.st_ino))
            except _GONE:
                continue
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if _PREFIX in line:
                    _, _, _, device, inode, *_ = line.split()
                    major, minor = (int(part, 16) for part in device.split(":"))
                    found.add((os.makedev(major, minor), int(inode)))
    except (*_GONE, PermissionError):  # another user's, or not dumpable, and we are not root: not seen, so not erased
        pass
    return found & set(wanted)


def in_use(files: Sequence[SharedFile]) -> str:
    """Which process of the consumer's tree still lives and has a region open or mapped; "" if none."""
    for file in files:
        alive = [pid for pid, started in file.users if is_running((pid, started))]
        if alive and any(
            (file.device, file.inode) in open_or_mapped(pid, {(file.device, file.inode)}) for pid in alive
        ):
            return f"process {alive[0]} of the consumer has {DIRECTORY}/{file.name} open"
    return ""


def erase(files: Sequence[SharedFile]) -> list[Step]:
    """Overwrite and unlink the consumer's regions; one step. None there: no step. Raises OSError, KernelError."""
    if not files:
        return []
    told, done = [], True
    directory = os.open(DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for file in files:
            what, ok = erase_file(directory, file)
            told.append(f"{file.name}: {what}")
            done = done and ok
    finally:
        os.close(directory)
    return [Step("shared-memory", True if done else None, "; ".join(told))]


def erase_file(directory: int, file: SharedFile) -> tuple[str, bool]:
    """Overwrite and unlink one region; what was done, and whether nothing of it is left. Raises OSError, KernelError."""
    try:
        found = os.open(file.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return "was gone", True
    try:
        info = os.fstat(found)
        if (info.st_dev, info.st_ino) != (file.device, file.inode):
            return "was gone; another file has its name", True
        try:
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except BlockingIOError:
            return "left: another process has a lease on it", False
    finally:
        os.close(found)
    try:
        with lease.hold(fd):  # nobody opens it until it is empty
            limit_s = _LIMIT_S + info.st_blocks * 512 / _SLOWEST_BYTES_PER_S
            answer = bounded.call("kvtier_node.children.overwriting:clear", timeout_s=limit_s, fds={"file": fd})
            _unlink_exactly(directory, file)
    except Busy:
        return "left: another process, not of this consumer, has it open", False
    finally:
        os.close(fd)
    return f"{answer['written']} bytes overwritten, removed", True


def _unlink_exactly(directory: int, file: SharedFile) -> None:
    """Unlink this very file: under a name of our own first, in case the old one is another's by now."""
    own = f".kvtier-{secrets.token_hex(8)}"
    try:
        os.rename(file.name, own, src_dir_fd=directory, dst_dir_fd=directory)
    except FileNotFoundError:
        return
    info = os.stat(own, dir_fd=directory, follow_symlinks=False)
    if (info.st_dev, info.st_ino) != (file.device, file.inode):
        os.link(own, file.name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    os.unlink(own, dir_fd=directory)
