"""Which processes of a pod have its volume: by cgroup whose pod, by mount table whose volume. Asked once before a `gate` opens,
and again and again where the kernel has none.

kubelet says nothing when a container ends and another one starts in the same pod. A container has a mount namespace of its own,
so a process of the pod that has the volume in its mount table is of a container that mounts it; the pod's sandbox and its other
containers do not count. Held by pidfd: a number that is used again is another process.

That nobody is seen proves nothing: a virtual machine's processes are not this kernel's, and an agent without the host's PID
namespace sees its own alone. Only the end of a process that was seen with the volume counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import NotFound
from kvtier_node.kernel import mounts
from kvtier_node.kernel.processes import PidFd
from kvtier_node.pods.gate import Gate
from kvtier_node.pods.members import PodMembers
from kvtier_node.pods.regions import PodRegions

__all__ = ["Between", "ContainerWatch", "Snapshot", "users_of"]

_AGAIN_S: Final = 0.5
_IDLE_AGAIN_S: Final = 5.0

Snapshot = frozenset[tuple[int, int, int]]
"""Of every file of a volume: inode, size, and when its content changed (ns)."""


def users_of(members: PodMembers, device: int) -> list[PidFd]:
    """The pod's processes with this volume (st_dev of its files) in their mount table: a look at each process of the machine."""
    found = []
    for pid in members.all():
        if _has_volume(pid, device):
            try:
                found.append(PidFd.open(pid))
            except NotFound:
                continue
    return found


def _has_volume(pid: int, device: int) -> bool:
    try:
        return any(entry.device == device for entry in mounts.mountinfo(pid))
    except OSError:  # it ended while it was looked at
        return False


class ContainerWatch:
    """The processes of one pod's containers that have one volume. `close` lets go of them."""

    def __init__(self, members: PodMembers, device: int) -> None:
        self._members = members
        self._device = device
        self._users: list[PidFd] = []
        self._seen = False
        self._looked_at = 0.0

    def in_use(self, *, touched: bool) -> bool | None:
        """Whether a container has the volume. False: every one that was seen with it has ended. None: not known.

        `touched`: something in the volume changed, so look soon.
        """
        ended = [user for user in self._users if user.exited()]
        for user in ended:
            self._users.remove(user)
            user.close()
        if self._users:
            return True
        pause_s = _AGAIN_S if touched or ended else _IDLE_AGAIN_S
        if time.monotonic() - self._looked_at < pause_s:
            return None
        return True if self.look() else (False if self._seen else None)

    def emptied(self) -> None:
        """What the containers left is gone: from now on only one that is seen anew counts."""
        self._seen = False

    def look(self) -> bool:
        """Look at every process of the machine now."""
        self._looked_at = time.monotonic()
        self.close()
        self._users = users_of(self._members, self._device)
        self._seen = self._seen or bool(self._users)
        return bool(self._users)

    @property
    def users(self) -> list[int]:
        """The processes that were seen with the volume and have not ended."""
        return [user.pid for user in self._users if not user.exited()]

    def close(self) -> None:
        for user in self._users:
            user.close()
        self._users.clear()


@dataclass
class Between:
    """What a guardian remembers of one pod's volume. `clean`: the files as they were when nothing of a container was in them."""

    members: PodMembers
    containers: Gate | ContainerWatch
    regions: PodRegions
    clean: Snapshot | None

    def close(self) -> None:
        """Let go of processes and folders, and hold back nobody any more."""
        self.containers.close()
        self.regions.close()
