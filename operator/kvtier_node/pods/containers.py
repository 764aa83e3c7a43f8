"""Which processes of a pod have its volume, as the kernel shows it: by cgroup whose pod, by mount table whose volume.

kubelet says nothing when a container ends and another one starts in the same pod. A container has a mount namespace of its own,
so a process of the pod that has the volume in its mount table is of a container that mounts it; the pod's sandbox and its other
containers do not count. Held by pidfd: a number that is used again is another process.

That nobody is seen proves nothing: a virtual machine's processes are not this kernel's, and an agent without the host's PID
namespace sees its own alone. Only the end of a process that was seen with the volume counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier_api.errors import NotFound
from kvtier_node.kernel import mounts
from kvtier_node.kernel.processes import PidFd, pids
from kvtier_node.pods.regions import PodRegions

__all__ = ["Between", "ContainerWatch", "Snapshot"]

_AGAIN_S: Final = 0.5
_IDLE_AGAIN_S: Final = 5.0

Snapshot = frozenset[tuple[int, int, int]]
"""Of every file of a volume: inode, size, and when its content changed (ns)."""


class ContainerWatch:
    """The processes of one pod's containers that have one volume. `close` lets go of them."""

    def __init__(self, pod_uid: str, device: int) -> None:
        """`device`: the volume's own (st_dev of its files)."""
        # systemd's cgroup names have underscores in the place of dashes.
        self._names = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}")
        self._device = device
        self._users: list[PidFd] = []
        self._seen = False
        self._looked_at = 0.0

    def in_use(self, *, written: bool) -> bool | None:
        """Whether a container has the volume. False: every one that was seen with it has ended. None: not known.

        `written`: something in the volume changed, so look soon.
        """
        ended = [user for user in self._users if user.exited()]
        for user in ended:
            self._users.remove(user)
            user.close()
        if self._users:
            return True
        pause_s = _AGAIN_S if written or ended else _IDLE_AGAIN_S
        if time.monotonic() - self._looked_at < pause_s:
            return None
        return True if self.look() else (False if self._seen else None)

    def forget(self) -> None:
        """What the containers left is gone: from now on only one that is seen anew counts."""
        self._seen = False

    def look(self) -> bool:
        """Look at every process of the machine now."""
        self._looked_at = time.monotonic()
        self.close()
        for pid in pids():
            if not self._is_of_pod(pid) or not self._has_volume(pid):
                continue
            try:
                self._users.append(PidFd.open(pid))
            except NotFound:
                continue
        self._seen = self._seen or bool(self._users)
        return bool(self._users)

    @property
    def users(self) -> list[int]:
        """The processes that were seen with the volume and have not ended."""
        return [user.pid for user in self._users if not user.exited()]

    def members(self) -> list[int]:
        """Every process of the pod, by its cgroup."""
        return [pid for pid in pids() if self._is_of_pod(pid)]

    def _is_of_pod(self, pid: int) -> bool:
        try:
            cgroups = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:  # it ended while it was looked at
            return False
        return any(name in cgroups for name in self._names)

    def _has_volume(self, pid: int) -> bool:
        try:
            return any(entry.device == self._device for entry in mounts.mountinfo(pid))
        except OSError:  # it ended while it was looked at
            return False

    def close(self) -> None:
        for user in self._users:
            user.close()
        self._users.clear()


@dataclass
class Between:
    """What a guardian remembers of one pod's volume. `clean`: the files as they were when nothing of a container was in them."""

    containers: ContainerWatch
    clean: Snapshot | None = None
    regions: PodRegions = field(default_factory=PodRegions)

    def close(self) -> None:
        """Let go of processes and folders."""
        self.containers.close()
        self.regions.close()
