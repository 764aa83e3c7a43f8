"""Consumers: who uses a volume, and whether that still lives. Only what the kernel vouches for counts.

A process is identified by pid, start time and boot id, and watched by pidfd; a reused pid is another process. What it forked
counts through the slot files that are still open (`slots.SlotWatch.holders`). Never names, never ages. A pod is `pods.consumer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from kvtier_api.errors import NotFound
from kvtier_node.kernel.processes import PidFd, boot_id, start_time
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.slots import SlotWatch

__all__ = ["Consumer", "Evidence", "ProcessConsumer", "alive", "consumer_of"]


@dataclass(frozen=True)
class Evidence:
    """Whether a volume is in use, and what says so."""

    alive: bool
    reason: str
    lost: bool = False
    """Somebody took the volume's mount off its place."""


@dataclass(frozen=True)
class ProcessConsumer:
    """One process on this node."""

    pid: int
    start_time: int
    """Clock ticks since boot, field 22 of /proc/PID/stat (proc(5))."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """The living process `pid`. Raises NotFound where there is none."""
        return cls(pid, start_time(pid), boot_id())

    @classmethod
    def from_record(cls, record: dict[str, Any] | None) -> Self | None:
        """The consumer on record in the ledger, or None where there is none of this kind."""
        if not record or record.get("kind") != "process":
            return None
        return cls(int(record["pid"]), int(record["start_time"]), str(record["boot_id"]))

    def record(self) -> dict[str, Any]:
        return {"kind": "process", "pid": self.pid, "start_time": self.start_time, "boot_id": self.boot_id}

    @property
    def title(self) -> str:
        return f"process {self.pid}"

    def alive(self) -> bool:
        if self.boot_id != boot_id():
            return False
        try:
            with PidFd.open(self.pid, self.start_time) as handle:
                return not handle.exited()
        except NotFound:
            return False


Consumer: TypeAlias = ProcessConsumer | PodConsumer


def consumer_of(record: dict[str, Any] | None) -> Consumer | None:
    """The consumer on record, of whatever kind."""
    return ProcessConsumer.from_record(record) or PodConsumer.from_record(record)


def alive(consumer: Consumer | None, watch: SlotWatch | None) -> Evidence:
    """Is the volume in use? The consumer itself first, then anybody who has a slot file open or mapped."""
    if isinstance(consumer, PodConsumer) and watch is not None:
        watch.refresh()  # a container that was started again in its pod: what the old one left and the new one unlinked goes
    if consumer is not None and consumer.alive():
        return Evidence(True, f"{consumer.title} lives")
    if watch is not None:
        watch.refresh()
        busy = watch.holders()
        if busy:
            return Evidence(True, f"{busy} slot file(s) are open or mapped in another process")
    return Evidence(
        False, f"{consumer.title} has ended and no slot file is open" if consumer else "no slot file is open"
    )
