"""The conditions of a tier in a cluster: how what its nodes measured adds up. One pure function for each.

A node agent writes conditions of the same names on each of its volumes. Here: False if one of them is False; else Unknown if
one is not measured, or its node is not heard; True only if all of them are. A False of a node that fell silent stays: nothing
refuted it. Nothing is inferred from the spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from kvtier_api.conditions import Finding, ready_of
from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTierSpec, SaltPolicy
from kvtier_api.volume import VolumeState
from kvtier_operator.facts import Seen
from kvtier_operator.places import Place

__all__ = ["ENDING", "USABLE", "Tier", "findings", "overdue_in_s"]

ENDING: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})
USABLE: Final = frozenset({VolumeState.READY, VolumeState.IN_USE})
_COMING: Final = frozenset({VolumeState.PLANNED, VolumeState.PROVISIONING})
_SHOWN: Final = 5
_AFTER_THE_NODE_S: Final = 5.0
"""The node's own judgement of its deadline comes first. This is for a node that is heard and does not judge."""


@dataclass(frozen=True)
class Tier:
    """All that conditions are computed from. `places` are those of the tier's own volumes, final ones included.

    `ending_s`: for how long this controller has seen a volume, by its uid, come to its end; by its monotonic clock, because a
    node's time and its own cannot be compared, and either may jump.
    """

    spec: KVCacheTierSpec
    now: datetime
    places: Sequence[Place] = ()
    ending_s: Mapping[str, float] = field(default_factory=dict)
    deleting: bool = False
    problem: str = ""

    def in_state(self, states: Iterable[VolumeState]) -> list[Place]:
        """Places that count, in one of the states."""
        wanted = frozenset(states)
        return [place for place in self.places if place.counts and place.volume.state in wanted]

    @property
    def counting(self) -> list[Place]:
        return [place for place in self.places if place.counts]


def provisioned(tier: Tier) -> Finding:
    """Volumes exist, each with its own marker on its own device, as their nodes measured."""
    unreadable = [place for place in tier.counting if place.volume.problem]
    if unreadable:
        return Finding(
            ConditionType.PROVISIONED, None, Reason.MEASUREMENT_FAILED, _each((p, p.volume.problem) for p in unreadable)
        )
    failed = tier.in_state({VolumeState.FAILED})
    if failed:
        text = _each((p, p.volume.reason or "failed") for p in failed)
        return Finding(ConditionType.PROVISIONED, False, Reason.PROVISIONING_FAILED, text)
    usable = tier.in_state(USABLE)
    coming = tier.in_state(_COMING)
    if not usable and coming:
        silent = _silent(ConditionType.PROVISIONED, coming)
        text = f"{len(coming)} volume(s) are being made"
        return silent or Finding(ConditionType.PROVISIONED, None, Reason.PROVISIONING, text)
    return _sum(ConditionType.PROVISIONED, usable, "no volume; one is made when a pod asks for it")


def encrypted(tier: Tier) -> Finding:
    return _sum(ConditionType.ENCRYPTED, tier.in_state(USABLE), "no volume is in use")


def salt_enforced(tier: Tier) -> Finding:
    if tier.spec.salt.policy is SaltPolicy.SHARED:
        text = "salt.policy is Shared: tenants share cached blocks"
        return Finding(ConditionType.SALT_ENFORCED, False, Reason.SALT_SHARED, text)
    return _sum(ConditionType.SALT_ENFORCED, tier.in_state({VolumeState.IN_USE}), "no volume is in use")


def retention_enforced(tier: Tier) -> Finding:
    return _sum(ConditionType.RETENTION_ENFORCED, tier.in_state({VolumeState.IN_USE}), "no volume is in use")


def scrubbed(tier: Tier) -> Finding:  # noqa: PLR0911  (one return for each answer, the worst first)
    """Whether something may be left, now, of a consumer that ended.

    A place that was given up is not taken back. One that was erased late is erased: that it was late is on its record
    (`deadlineMet`), in the node's metric and in an event, not in a condition that nobody could turn any more.
    """

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.SCRUBBED, status, reason, message)

    refuted = [(p, seen) for p in tier.counting if (seen := _seen(p, ConditionType.SCRUBBED)) and seen.status is False]
    if refuted:
        return found(
            False, _reason(refuted[0][1], Reason.ERASE_INCOMPLETE), _each((p, seen.message) for p, seen in refuted)
        )
    late = [p for p in tier.in_state(ENDING) if _overdue_in_s(tier, p) <= 0 and not p.unheard]
    if late:
        text = _each((p, f"{p.volume.state} for longer than {tier.spec.scrub.deadline}") for p in late)
        return found(False, Reason.DEADLINE_MISSED, text)
    abandoned = [p for p in tier.places if p.volume.state is VolumeState.ABANDONED]
    if abandoned:
        text = _each((p, p.volume.reason or "given up") for p in abandoned)
        return found(
            False, Reason.ABANDONED, f"{len(abandoned)} place(s) were given up, nothing is claimed of them: {text}"
        )
    silent = _silent(ConditionType.SCRUBBED, tier.counting)
    if silent is not None:
        return silent
    unreadable = [p for p in tier.counting if p.volume.problem]
    if unreadable:
        return found(None, Reason.MEASUREMENT_FAILED, _each((p, p.volume.problem) for p in unreadable))
    ending = tier.in_state(ENDING)
    if ending:
        return found(
            None, Reason.ERASING, f"{len(ending)} volume(s) are being erased, within {tier.spec.scrub.deadline}"
        )
    lost = [p for p in tier.places if p.keys_lost]
    if lost:
        return found(True, Reason.NOTHING_LEFT, f"by boot id: {_each((p, p.keys_lost) for p in lost)}")
    return found(True, Reason.NOTHING_LEFT, "no volume of an ended consumer is on record as not erased")


def host_hardened(tier: Tier) -> Finding:
    return _sum(ConditionType.HOST_HARDENED, tier.counting, "no volume, so no node to look at")


def mapped(tier: Tier) -> Finding:
    return _sum(ConditionType.MAPPED, tier.counting, "no volume; stores elsewhere are for discovery to find")


_PARTS: Final[tuple[Callable[[Tier], Finding], ...]] = (
    provisioned,
    encrypted,
    salt_enforced,
    retention_enforced,
    scrubbed,
    host_hardened,
    mapped,
)


def ready(tier: Tier, parts: Sequence[Finding]) -> Finding:
    if tier.problem:
        return Finding(ConditionType.READY, False, Reason.INVALID_SPEC, tier.problem)
    if tier.deleting:
        left = len(tier.counting)
        text = f"being deleted; {left} of {len(tier.places)} volume(s) are not erased yet"
        return Finding(ConditionType.READY, False, Reason.DELETING, text)
    return ready_of(parts, policy=tier.spec.salt.policy, usable=bool(tier.in_state(USABLE)))


def findings(tier: Tier) -> list[Finding]:
    """All of them, Ready first."""
    parts = [part(tier) for part in _PARTS]
    return [ready(tier, parts), *parts]


def overdue_in_s(tier: Tier) -> float | None:
    """Seconds until the next volume has been coming to its end for too long; None if none can."""
    waits = [wait for place in tier.in_state(ENDING) if not place.unheard and (wait := _overdue_in_s(tier, place)) > 0]
    return min(waits, default=None)


def _overdue_in_s(tier: Tier, place: Place) -> float:
    limit_s = float(tier.spec.scrub.deadline) + _AFTER_THE_NODE_S
    return limit_s - tier.ending_s.get(place.volume.uid, 0.0)


def _sum(type_: ConditionType, places: Sequence[Place], none: str) -> Finding:
    """What the nodes of `places` measured, as one finding."""
    if not places:
        return Finding(type_, None, Reason.NO_VOLUMES, none)
    seen = [(place, _seen(place, type_)) for place in places]
    false = [(place, it) for place, it in seen if it is not None and it.status is False]
    if false:
        return Finding(
            type_, False, _reason(false[0][1], Reason.GUARANTEE_NOT_MET), _each((p, s.message) for p, s in false)
        )
    silent = _silent(type_, places)
    if silent is not None:
        return silent
    unclear = [(place, it) for place, it in seen if it is None or it.status is None]
    if unclear:
        first = next((it for _, it in unclear if it is not None), None)
        text = _each((place, it.message if it is not None else "not measured yet") for place, it in unclear)
        return Finding(type_, None, _reason(first, Reason.NOT_YET_MEASURED), text)
    reasons = {it.reason for _, it in seen if it is not None}
    reason = _reason(seen[0][1], Reason.MEASURED) if len(reasons) == 1 else Reason.MEASURED
    text = _each((place, it.message) for place, it in seen if it is not None)
    return Finding(type_, True, reason, f"{len(places)} of {len(places)} volume(s): {text}")


def _silent(type_: ConditionType, places: Iterable[Place]) -> Finding | None:
    silent = [place for place in places if place.unheard]
    if not silent:
        return None
    away = any(place.silence is Reason.NODE_UNREACHABLE for place in silent)
    text = _each((place, place.unheard) for place in silent)
    return Finding(type_, None, Reason.NODE_UNREACHABLE if away else silent[0].silence, text)


def _seen(place: Place, type_: ConditionType) -> Seen | None:
    return place.volume.conditions.get(type_.value)


def _reason(seen: Seen | None, otherwise: Reason) -> Reason:
    """A reason that this version does not know (a newer agent's) becomes the general one."""
    try:
        return Reason(seen.reason) if seen is not None else otherwise
    except ValueError:
        return otherwise


def _each(reasons: Iterable[tuple[Place, str]]) -> str:
    parts = [f"{place.volume.name} on {place.volume.node_name}: {reason}" for place, reason in reasons]
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(part[:400] for part in parts[:_SHOWN]) + more
