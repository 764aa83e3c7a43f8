"""When an object may go: the finalizer of a tier, the finalizer of a volume, and what an administrator's word does.

A tier is held until each of its places is Erased, Abandoned, or proven lost with its node's memory. Only a node agent
writes `Erased`, because it signs the receipt. The controller writes one state only: `Abandoned`, on the annotation
`kvtier.dev/abandon`, and only while the node cannot be heard. A node that is heard does it itself, with a receipt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier_operator.places import Place

__all__ = ["Hold", "VolumeStep", "holds", "volume_steps"]


@dataclass(frozen=True, slots=True)
class Hold:
    """A place that keeps its tier from going, and why."""

    place: Place
    why: str


class VolumeStep(Enum):
    """What the controller does to a volume object."""

    HOLD = auto()
    """Add the finalizer: the record of a place must outlive a `kubectl delete`."""
    RELEASE = auto()
    """Take the finalizer away: nothing of the place is readable, or it was given up."""
    ABANDON = auto()
    """Write state Abandoned, with the administrator's reason."""
    RECORD_KEYS_LOST = auto()
    """Make the record (a KVCacheErasure) that the keys went with the node's memory."""


def holds(places: Iterable[Place]) -> list[Hold]:
    """Why a tier with these places cannot go yet. Empty: it can."""
    found = []
    for place in places:
        if not place.counts:
            continue
        volume = place.volume
        if volume.problem:
            why = f"its object cannot be read: {volume.problem}"
        elif place.unheard:
            why = f"{place.unheard}; its keys are only in that node's memory, if it runs"
        else:
            why = f"{volume.state} on {volume.node_name}"
        found.append(Hold(place, why))
    return found


def volume_steps(place: Place, *, tier_deleting: bool) -> Sequence[VolumeStep]:
    """What to do to the volume's object now, in this order."""
    volume = place.volume
    if place.counts and place.unheard and volume.abandon is not None and volume.abandon.strip():
        return [VolumeStep.ABANDON]
    if not place.counts and volume.deleting and volume.held:
        record = [VolumeStep.RECORD_KEYS_LOST] if place.keys_lost else []
        return [*record, VolumeStep.RELEASE]
    if place.keys_lost and tier_deleting:
        return [VolumeStep.RECORD_KEYS_LOST]
    if not volume.is_final and not volume.deleting and not volume.held:
        return [VolumeStep.HOLD]
    return []
