"""Which events a change is worth: pure functions of before and after, so that nothing is said twice and nothing on a timer.

A tier's events come from its stored status before and after, so a restarted controller does not repeat them. A volume's
come from the state that this controller saw last; what happened while none ran is in the status. What must be told
whether or not a controller runs is told by the node that did it or found it: `Erased`, `DeadlineMissed`, `ForeignData`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.erasure import ErasureState, KVCacheErasureStatus
from kvtier_api.meta import API_VERSION, Condition, ConditionStatus, ConditionType, find_condition
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTierStatus
from kvtier_api.volume import VolumeState
from kvtier_operator.event_reasons import EVENT_REASONS, EventReason
from kvtier_operator.facts import ErasureFacts, TierFacts, VolumeFacts
from kvtier_operator.places import Place

__all__ = ["NOTE_LIMIT", "Announcement", "Regarding", "of_erasure", "of_tier", "of_volumes"]

NOTE_LIMIT: Final = 1024
"""Bytes of a note (events.k8s.io/v1)."""


@dataclass(frozen=True, slots=True)
class Regarding:
    kind: str
    namespace: str
    name: str
    uid: str
    api_version: str = API_VERSION


@dataclass(frozen=True, slots=True)
class Announcement:
    """An event before it is posted. Two equal ones are one event with a series."""

    regarding: Regarding
    reason: EventReason
    note: str

    @property
    def type(self) -> str:
        return EVENT_REASONS[self.reason].type


_BY_CONDITION: Final[dict[tuple[ConditionType, Reason], EventReason]] = {
    (ConditionType.SCRUBBED, Reason.ERASE_INCOMPLETE): EventReason.ERASE_INCOMPLETE,
    (ConditionType.SCRUBBED, Reason.NODE_UNREACHABLE): EventReason.NODE_UNREACHABLE,
    (ConditionType.SCRUBBED, Reason.NOT_IN_LEDGER): EventReason.NOT_IN_LEDGER,
    (ConditionType.ENCRYPTED, Reason.NOT_ENCRYPTED): EventReason.NOT_ENCRYPTED,
    (ConditionType.ENCRYPTED, Reason.PLAINTEXT_FOUND): EventReason.NOT_ENCRYPTED,
    (ConditionType.RETENTION_ENFORCED, Reason.MAX_AGE_EXCEEDED): EventReason.MAX_AGE_EXCEEDED,
}


def tier_regarding(facts: TierFacts) -> Regarding:
    return Regarding("KVCacheTier", facts.meta.namespace, facts.meta.name, facts.meta.uid or "")


def volume_regarding(volume: VolumeFacts) -> Regarding:
    return Regarding("KVCacheVolume", volume.namespace, volume.name, volume.uid)


def of_tier(facts: TierFacts, after: KVCacheTierStatus) -> list[Announcement]:
    """From the stored status (`facts.status`) to the new one."""
    about = tier_regarding(facts)
    before = facts.status
    found = []
    if before is None and facts.spec is not None:
        spec = facts.spec
        owner = spec.governance.owner if spec.governance is not None else "nobody (governance.owner is not set)"
        text = f"{spec.ranks} x {spec.size_per_rank} under {spec.path}, for at most {spec.retention.max_age}; owner: {owner}"
        found.append(Announcement(about, EventReason.TIER_DECLARED, text))
    for condition in after.conditions:
        old = find_condition(before.conditions, condition.type) if before is not None else None
        if old is not None and (old.status, old.reason) == (condition.status, condition.reason):
            continue
        reason = _of_condition(condition, old)
        if reason is not None:
            found.append(Announcement(about, reason, condition.message))
    return found


def _of_condition(condition: Condition, old: Condition | None) -> EventReason | None:
    if condition.type == ConditionType.READY:
        if condition.reason == Reason.INVALID_SPEC:
            return EventReason.INVALID_SPEC
        if condition.reason == Reason.DELETING:
            return None  # DeletionWaits and DeletionDone say more
        if old is not None and old.status == condition.status:
            return None
        return {
            ConditionStatus.TRUE: EventReason.TIER_READY,
            ConditionStatus.FALSE: EventReason.TIER_NOT_READY,
        }.get(condition.status)
    return next(
        (
            event
            for (type_, reason), event in _BY_CONDITION.items()
            if (condition.type, condition.reason) == (type_, reason)
        ),
        None,
    )


def of_volumes(
    tier: TierFacts | None, places: Iterable[Place], seen: Mapping[str, VolumeState | None]
) -> list[Announcement]:
    """`seen` is the state of each volume, by uid, when the controller looked last; a new volume is not in it."""
    found: list[Announcement] = []
    for place in places:
        volume = place.volume
        if volume.uid in seen and seen[volume.uid] is volume.state:
            continue
        about = volume_regarding(volume)
        on_tier = tier_regarding(tier) if tier is not None else about
        where = f"{volume.name} on {volume.node_name}"
        if volume.problem:
            found.append(Announcement(about, EventReason.OBJECT_UNREADABLE, volume.problem))
            continue
        if volume.uid not in seen:
            text = f"{where}: {volume.size_bytes} bytes, {volume.backend}"
            found.append(Announcement(on_tier, EventReason.STORE_CREATED, text))
        found.extend(_of_state(volume, on_tier, about, where))
    return found


def _of_state(volume: VolumeFacts, on_tier: Regarding, about: Regarding, where: str) -> Sequence[Announcement]:
    match volume.state:
        case VolumeState.IN_USE:
            return [Announcement(about, EventReason.STORE_IN_USE, f"in use on {volume.node_name}")]
        case VolumeState.DYING | VolumeState.ERASING:
            return [
                Announcement(
                    about, EventReason.ERASURE_BEGUN, f"its consumer ended; being erased on {volume.node_name}"
                )
            ]
        case VolumeState.FAILED:
            return [Announcement(about, EventReason.STORE_FAILED, volume.reason or "failed")]
        case VolumeState.ABANDONED:
            text = f"{where}: {volume.reason or 'no reason recorded'}"
            both = [Announcement(about, EventReason.ABANDONED, text)]
            return both if on_tier == about else [Announcement(on_tier, EventReason.ABANDONED, text), *both]
        case _:
            return []


def of_erasure(erasure: ErasureFacts, after: KVCacheErasureStatus) -> list[Announcement]:
    """When a request ends, one way or the other."""
    if after.state is erasure.state:
        return []
    reason = {
        ErasureState.COMPLETE: EventReason.ERASURE_COMPLETE,
        ErasureState.FAILED: EventReason.ERASURE_FAILED,
    }.get(after.state)
    if reason is None:
        return []
    about = Regarding("KVCacheErasure", erasure.namespace, erasure.name, erasure.uid)
    condition = find_condition(after.conditions, ConditionType.COMPLETE)
    return [Announcement(about, reason, condition.message if condition is not None else "")]
