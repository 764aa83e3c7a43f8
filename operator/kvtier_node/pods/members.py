"""Which processes are a pod's: by the cgroup that kubelet made for it, whatever they are called and in whatever namespace."""

from __future__ import annotations

from pathlib import Path

from kvtier_node.kernel.processes import pids

__all__ = ["PodMembers"]


class PodMembers:
    """The processes of the pod with this uid, as far as this process's PID namespace shows them."""

    def __init__(self, pod_uid: str) -> None:
        # systemd's cgroup names have underscores in the place of dashes.
        self._names = (f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}")

    def has(self, pid: int) -> bool:
        """False too for one that ended while it was looked at. Raises OSError where it cannot be told (no descriptor left)."""
        try:
            cgroups = Path(f"/proc/{pid}/cgroup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return any(name in cgroups for name in self._names)

    def all(self) -> list[int]:
        """Every process of the pod: a look at each process of the machine. Raises OSError."""
        return [pid for pid in pids() if self.has(pid)]
