"""What a pod's containers leave in its /dev/shm: vLLM's regions outlive the container, in plaintext, and keep the next one from
starting (vllm#54002, #51317).

/dev/shm belongs to the pod's sandbox, or is a volume in memory: the container's end does not empty it. It is reached by the root
of a process that has it, and kept by a descriptor. Which file is whose is told as on a host (`shared_memory`): the kernel showed
it open or mapped in a process of the pod, of the file's owner. Once every process that was seen with it has ended, and nobody
has it open, it is overwritten and removed.

A process may end before it is seen. Where /dev/shm is not the host's, a region of the consumer's user that no process of the pod
has in two looks is the pod's own left-over too: it goes if nobody else has it open either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvtier_api.errors import NotFound
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import files, libc, mounts
from kvtier_node.kernel.processes import start_time
from kvtier_node.shared_memory import (
    Process,
    SharedFile,
    erase_file,
    is_running,
    open_or_mapped,
    regions_in,
    user_of,
)

__all__ = ["PodRegions"]

_FOLDER: Final = "dev/shm"
_INSIDE: Final = c.RESOLVE_BENEATH | c.RESOLVE_NO_SYMLINKS | c.RESOLVE_NO_MAGICLINKS
_AGAIN_S: Final = 1.0
_IDLE_AGAIN_S: Final = 5.0

_Key = tuple[int, int]


@dataclass
class PodRegions:
    """Of one pod, whose files are the user `owner`'s. `close` lets go of its folders; what was seen is forgotten."""

    owner: int
    _folders: dict[_Key, int] = field(default_factory=dict)
    _seen: dict[_Key, tuple[int, SharedFile]] = field(default_factory=dict)
    _unseen: set[_Key] = field(default_factory=set)
    """Found in the last look, and no process with it."""
    _looked_at: float = 0.0

    def look(self, users: Iterable[int], members: Callable[[], Iterable[int]]) -> list[str]:
        """Look once, and erase what nobody has any more; what was done, a line for each file.

        `users` are processes that have the volume now; `members` finds every process of the pod, which is asked where there is a
        region, and now and then while there are no users. Raises OSError, KernelError.
        """
        done = self._erase()
        now, found = time.monotonic(), list(users)
        if now - self._looked_at >= (_AGAIN_S if found else _IDLE_AGAIN_S):
            self._looked_at = now
            for pid in found or members():
                self._find_folder(pid)
            self._find_files(members)
            self._let_go_of_others()
        return done

    def _find_folder(self, pid: int) -> None:
        """By the process's own root, following no link of its making. Only memory: a disk has other remedies."""
        try:
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # it ended
            return
        try:
            folder = libc.openat2(root, _FOLDER, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _INSIDE)
        except OSError:  # a container without one, or with a link in its place
            return
        finally:
            os.close(root)
        info = os.fstat(folder)
        if (info.st_dev, info.st_ino) in self._folders or files.filesystem_type(folder) != "tmpfs":
            os.close(folder)
        else:
            self._folders[info.st_dev, info.st_ino] = folder

    def _find_files(self, members: Callable[[], Iterable[int]]) -> None:
        unseen = set()
        for folder in self._folders.values():
            there = regions_in(f"/proc/self/fd/{folder}")
            if not there:
                continue
            for pid in members():
                user = user_of(pid)
                for key in open_or_mapped(pid, there):
                    name, owner = there[key]
                    known = self._seen[key][1].users if key in self._seen else ()
                    if not known and owner != user:
                        continue  # what the process could not remove itself is not removed for it
                    try:
                        process: Process = (pid, start_time(pid))
                    except NotFound:
                        continue
                    if process not in known:
                        self._seen[key] = (folder, SharedFile(name, *key, (*known, process)))
            if _is_the_hosts(folder):
                continue  # others' regions are there too
            for key, (name, owner) in there.items():
                if key in self._seen or owner != self.owner:
                    continue
                if key in self._unseen:
                    self._seen[key] = (folder, SharedFile(name, *key, ()))
                unseen.add(key)
        self._unseen = unseen

    def _let_go_of_others(self) -> None:
        """A folder in which no file was seen with a process is not kept: the next look finds it by a process that lives."""
        kept = {folder for folder, _ in self._seen.values()}
        for key, folder in list(self._folders.items()):
            if folder not in kept:
                os.close(folder)
                del self._folders[key]

    def _erase(self) -> list[str]:
        done = []
        for key, (folder, file) in list(self._seen.items()):
            if any(is_running(user) for user in file.users):
                continue
            what, ok = erase_file(folder, file)
            if ok:
                del self._seen[key]
                done.append(f"{file.name}: {what}")
        return done

    def close(self) -> None:
        for folder in self._folders.values():
            os.close(folder)
        self._folders.clear()
        self._seen.clear()


def _is_the_hosts(folder: int) -> bool:
    """Whether it is the /dev/shm of the machine's first process: a pod with `hostIPC` has that one."""
    device = os.fstat(folder).st_dev
    return any(entry.device == device and entry.mount_point == f"/{_FOLDER}" for entry in mounts.mountinfo(1))
