"""A volume in the hands of its guardian: its row, its lock, its marker, and the descriptors of its slot files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvtier_api.marker import MARKER_NAME, SLOTS_DIRECTORY
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.guardian import Guardian
from kvtier_node.kernel.files import FileIdentity
from kvtier_node.ledger import VolumeRow
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.containers import Between
from kvtier_node.receipts import utc_now
from kvtier_node.sampling import Range
from kvtier_node.shared_memory import SharedMemoryWatch
from kvtier_node.slots import SlotWatch

__all__ = ["Death", "LiveVolume", "ranges_of", "request_of"]


@dataclass(frozen=True)
class Death:
    """When the consumer was seen dead: wall time for the record, CLOCK_MONOTONIC seconds for the deadline."""

    at: str
    monotonic: float

    @classmethod
    def now(cls) -> Death:
        return cls(utc_now(), time.monotonic())


@dataclass
class LiveVolume:
    """A volume that this process guards."""

    row: VolumeRow
    guardian: Guardian
    watch: SlotWatch | None = None
    shared: SharedMemoryWatch | None = None
    between: Between | None = None
    """Of a pod: which of its containers have the volume, and who waits for it."""
    attempts: int = 0
    death: Death | None = None
    """Kept over failed attempts to erase: the deadline runs from the death, not from the last try."""
    said: str = ""
    """The last failure on record: the same one is not put there again at every look."""

    @property
    def volume_id(self) -> str:
        return self.row.volume_id

    @property
    def marker_path(self) -> str:
        return f"{self.row.place}/{MOUNT_NAME}/{MARKER_NAME}"

    @property
    def slots_path(self) -> str:
        return f"{self.row.place}/{MOUNT_NAME}/{SLOTS_DIRECTORY}"

    def close_slots(self) -> None:
        """Let go of the descriptors of the slot files alone."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None

    def close_watch(self) -> None:
        self.close_slots()
        if self.between is not None:
            self.between.close()
            self.between = None


def request_of(row: VolumeRow) -> VolumeRequest:
    """What the backend was asked for, from the record."""
    return VolumeRequest(
        volume_id=row.volume_id,
        slots_bytes=row.bytes_per_rank * row.ranks,
        cipher=row.cipher,
        uid=int(row.facts["uid"]),
        gid=int(row.facts["gid"]),
        device=row.spec.get("device"),
        own_inodes=frozenset(row.facts.get("inodes", ())),
        image=FileIdentity.recorded(image) if (image := row.facts.get("image")) else None,
        device_taken=bool(row.facts.get("device_taken")),
        device_marks=frozenset(row.facts.get("device_marks", ())),
    )


def ranges_of(row: VolumeRow) -> list[Range]:
    """Where the slot files were laid when the volume was made."""
    found: list[list[Any]] = row.facts.get("data_ranges", [])
    return [Range(int(offset), int(length)) for offset, length in found]
