"""From what is known of one tier to what is to be done for it: one pure function, `plan`. Doing it is `reconciling`'s.

The same facts give the same plan, and once the plan is done the next one is empty: that is what "level-based" means here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Final

from kvtier_api.clean_path import is_below
from kvtier_api.conditions import Finding
from kvtier_api.erasure import ErasureState, KVCacheErasureStatus
from kvtier_api.errors import InvalidResource
from kvtier_api.meta import ConditionType, find_condition
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTierStatus
from kvtier_api.volume import VolumeState
from kvtier_operator.announcing import (
    Announcement,
    of_erasure,
    of_tier,
    of_volumes,
    tier_regarding,
    volume_regarding,
)
from kvtier_operator.conditions import Tier, findings, overdue_in_s
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import ErasureFacts, Key, TierFacts, VolumeFacts
from kvtier_operator.history import DEFAULT_LIMIT, erasures_to_forget, volumes_to_forget
from kvtier_operator.names import ABANDON, KEYS_LOST_SUFFIX
from kvtier_operator.path_claims import PathClaim
from kvtier_operator.places import Place, Surroundings, places
from kvtier_operator.releasing import Hold, VolumeStep, holds, volume_steps
from kvtier_operator.requests import request_status
from kvtier_operator.tier_status import initial_conditions_only, tier_status

__all__ = ["Plan", "Snapshot", "own_places", "plan"]

_TYPES: Final = tuple(type_ for type_ in ConditionType if type_ is not ConditionType.COMPLETE)
_SOONEST_S: Final = 0.5


@dataclass(frozen=True)
class Snapshot:
    """All that is known of one tier at `now`. `tier` is None where no such object is (any more).

    `path_taken_by` is an earlier tier whose path lies above or below the tier's; `ending_s` has for how long each volume, by
    uid, is known to come to its end; `seen`, its state as it was announced last; `said`, refusals that were announced already;
    `unrecordable`, names of records that the API server refuses.
    """

    key: Key
    now: datetime
    tier: TierFacts | None
    volumes: Sequence[VolumeFacts] = ()
    erasures: Sequence[ErasureFacts] = ()
    around: Surroundings = field(default_factory=lambda: Surroundings({}))
    path_taken_by: PathClaim | None = None
    ending_s: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, VolumeState | None] = field(default_factory=dict)
    said: Collection[Announcement] = ()
    unrecordable: Collection[str] = ()
    history_limit: int = DEFAULT_LIMIT


@dataclass(frozen=True)
class Plan:
    """What to do, in the order of the fields. Empty at rest, apart from `again_in_s`."""

    hold_tier: bool = False
    volume_steps: Sequence[tuple[Place, VolumeStep]] = ()
    requests: Sequence[tuple[ErasureFacts, KVCacheErasureStatus]] = ()
    tier_status: KVCacheTierStatus | None = None
    announcements: Sequence[Announcement] = ()
    forget_erasures: Sequence[ErasureFacts] = ()
    forget_volumes: Sequence[Place] = ()
    release_tier: bool = False
    again_in_s: float | None = None

    def parts(self) -> list[str]:
        """Names of what is to be done. None: at rest."""
        return [it.name for it in fields(self) if it.name != "again_in_s" and getattr(self, it.name)]


def own_places(tier: TierFacts | None, volumes: Sequence[VolumeFacts], around: Surroundings) -> list[Place]:
    """Places of this tier, not of an earlier one of the same name."""
    uid = tier.meta.uid if tier is not None else None
    return places((it for it in volumes if uid is None or it.tier_uid in (None, uid)), around)


def plan(snapshot: Snapshot) -> Plan:
    facts = snapshot.tier
    own = own_places(facts, snapshot.volumes, snapshot.around)
    everyones = places(snapshot.volumes, snapshot.around)
    deleting = facts is not None and facts.deleting
    requests = _requests(snapshot, own)
    steps = _steps(snapshot, everyones, tier_deleting=facts is None or deleting)
    announcements = [*of_volumes(facts, everyones, snapshot.seen)]
    announcements += [it for request, status in requests for it in of_erasure(request, status)]
    announcements += [*_of_steps(facts, steps), *_refusals(snapshot, everyones)]
    forget_erasures = erasures_to_forget(snapshot.erasures, snapshot.history_limit)
    forget_volumes = volumes_to_forget(everyones, snapshot.history_limit)
    if facts is None:
        return Plan(
            volume_steps=steps,
            requests=requests,
            announcements=announcements,
            forget_erasures=forget_erasures,
            forget_volumes=forget_volumes,
        )
    status, again_in_s = _status(facts, snapshot, own)
    if status != facts.status:
        announcements = [*of_tier(facts, status), *announcements]
    waiting = holds(own)
    leaving = deleting and facts.held
    if leaving:
        announcements += _of_deletion(facts, status, waiting)
    return Plan(
        hold_tier=not deleting and not facts.held,
        volume_steps=steps,
        requests=requests,
        tier_status=status if status != facts.status else None,
        announcements=announcements,
        forget_erasures=forget_erasures,
        forget_volumes=forget_volumes,
        release_tier=leaving and not waiting and not any(s is VolumeStep.RECORD_KEYS_LOST for _, s in steps),
        again_in_s=again_in_s,
    )


def _status(facts: TierFacts, snapshot: Snapshot, own: Sequence[Place]) -> tuple[KVCacheTierStatus, float | None]:
    if facts.spec is None:
        before = facts.status.conditions if facts.status is not None else []
        others = [
            Finding(type_, None, Reason.INVALID_SPEC, "the spec does not hold, see Ready")
            for type_ in _TYPES
            if type_ is not ConditionType.READY and find_condition(before, type_) is None
        ]
        ready = Finding(ConditionType.READY, False, Reason.INVALID_SPEC, facts.problem)
        return initial_conditions_only(facts, [ready, *others], snapshot.now), None
    problem = "" if facts.deleting else _path_problem(facts.spec.path, snapshot)
    tier = Tier(facts.spec, snapshot.now, own, snapshot.ending_s, deleting=facts.deleting, problem=problem)
    wait = overdue_in_s(tier)
    status = tier_status(facts, tier, findings(tier), snapshot.erasures)
    return status, None if wait is None else max(wait, _SOONEST_S)


def _path_problem(path: str, snapshot: Snapshot) -> str:
    """As the node agent says it of two tiers on one node; empty where nobody was there first."""
    first = snapshot.path_taken_by
    if first is None:
        return ""
    lies = "below" if is_below(path, first.path) else "above"
    problem = InvalidResource(
        f"lies {lies} {first.path}, the path of tier {'/'.join(first.key)}, which was declared first",
        obj=f"spec.path={path}",
        remedy="give one of them a directory that is neither below nor above the other's: a path cannot be changed, so delete"
        " the tier and declare it with another one; or let their nodeSelectors want different values of one label",
    )
    return str(problem)


def _requests(snapshot: Snapshot, own: Sequence[Place]) -> list[tuple[ErasureFacts, KVCacheErasureStatus]]:
    """Open requests whose status changed."""
    records = [erasure for erasure in snapshot.erasures if erasure.is_record]
    found = []
    for request in snapshot.erasures:
        if request.is_record or request.state in (ErasureState.COMPLETE, ErasureState.FAILED):
            continue
        status = request_status(request, own, records, tier_exists=snapshot.tier is not None, now=snapshot.now)
        if status != request.status:
            found.append((request, status))
    return found


def _steps(snapshot: Snapshot, everyones: Sequence[Place], *, tier_deleting: bool) -> list[tuple[Place, VolumeStep]]:
    # A record without its status says nothing yet: whoever made it was stopped, or did not hear that it was made.
    recorded = {*(erasure.name for erasure in snapshot.erasures if erasure.is_complete), *snapshot.unrecordable}
    return [
        (place, step)
        for place in everyones
        for step in volume_steps(place, tier_deleting=tier_deleting)
        if step is not VolumeStep.RECORD_KEYS_LOST or place.volume.name + KEYS_LOST_SUFFIX not in recorded
    ]


def _refusals(snapshot: Snapshot, everyones: Sequence[Place]) -> list[Announcement]:
    text = f"annotation {ABANDON} is empty: write the reason as its value"
    found = [
        Announcement(volume_regarding(place.volume), EventReason.ABANDON_REFUSED, text)
        for place in everyones
        if place.counts and place.volume.abandon is not None and not place.volume.abandon.strip()
    ]
    return [it for it in found if it not in snapshot.said]


def _of_steps(facts: TierFacts | None, steps: Sequence[tuple[Place, VolumeStep]]) -> list[Announcement]:
    found = []
    for place, step in steps:
        if step is VolumeStep.RECORD_KEYS_LOST:
            about = tier_regarding(facts) if facts is not None else volume_regarding(place.volume)
            found.append(Announcement(about, EventReason.KEYS_LOST, f"{place.volume.name}: {place.keys_lost}"))
    return found


def _of_deletion(facts: TierFacts, status: KVCacheTierStatus, waiting: Sequence[Hold]) -> list[Announcement]:
    """Said when the reason to wait changes: the status then changes with it."""
    about = tier_regarding(facts)
    if not waiting:
        erased = status.last_erasure.time.isoformat(timespec="seconds") if status.last_erasure is not None else "never"
        return [Announcement(about, EventReason.DELETION_DONE, f"no place is left to erase; last erasure: {erased}")]
    if status == facts.status:
        return []
    shown = "; ".join(f"{hold.place.volume.name}: {hold.why}" for hold in waiting[:5])
    more = f"; and {len(waiting) - 5} more" if len(waiting) > 5 else ""
    return [Announcement(about, EventReason.DELETION_WAITS, f"waits for {len(waiting)} volume(s): {shown}{more}")]
