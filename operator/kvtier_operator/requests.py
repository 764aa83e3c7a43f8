"""Requests to erase: what each volume in scope did, added up into the request's status.

An agent records each erasure as a KVCacheErasure of its own (label `kvtier.dev/volume`; `kvtier.dev/request` where a request
was the cause). The controller alone writes the status of a request. A result that was taken over once stays, whatever
becomes of the volume object or the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final

from kvtier_api.conditions import Finding, written_down
from kvtier_api.erasure import ErasedVolume, ErasureScope, ErasureState, KVCacheErasureStatus
from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState
from kvtier_operator.conditions import ENDING
from kvtier_operator.facts import ErasureFacts, Seen
from kvtier_operator.places import Place

__all__ = ["FROM_VOLUME", "request_status"]

FROM_VOLUME: Final = "AsReceipt"
"""Technique where only the volume's own status is known: the receipt that it names says how."""
_MAX_RESULTS: Final = 1024


def request_status(
    request: ErasureFacts,
    places: Sequence[Place],
    records: Iterable[ErasureFacts],
    *,
    tier_exists: bool,
    now: datetime,
) -> KVCacheErasureStatus:
    """The status that the request has now. `places` are the tier's, `records` the agents'."""
    before = request.status or KVCacheErasureStatus()
    scope = [place for place in places if place.volume.created_at <= request.created_at]
    results = {result.volume_id: result for result in before.volumes}
    results |= _recorded(request, scope, records)
    results |= {
        place.volume.name: _from_volume(place)
        for place in scope
        if place.volume.name not in results and _ended_since(place, request)
    }
    left = [
        place
        for place in scope
        if place.volume.name not in results and place.counts and not _ended_before(place, request)
    ]
    given_up = [place for place in scope if place.volume.state is VolumeState.ABANDONED]
    state, finding = _judge(request, left, given_up, results, tier_exists=tier_exists)
    shown = [results[name] for name in sorted(results)][:_MAX_RESULTS]
    begun = [result.begin for result in shown]
    ends = [result.end for result in shown if result.end is not None]
    return KVCacheErasureStatus(
        observed_generation=request.generation,
        state=state,
        begin=before.begin or (min(begun) if begun else (now if state is not ErasureState.PENDING else None)),
        end=max([now, *begun, *ends]) if state is ErasureState.COMPLETE else None,
        volumes=shown,
        residual_bytes=sum(place.volume.size_bytes for place in left),
        conditions=written_down([finding], before.conditions, generation=request.generation, now=now),
    )


def _judge(  # noqa: PLR0911  (one return for each answer)
    request: ErasureFacts,
    left: Sequence[Place],
    given_up: Sequence[Place],
    results: Mapping[str, ErasedVolume],
    *,
    tier_exists: bool,
) -> tuple[ErasureState, Finding]:
    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.COMPLETE, status, reason, message)

    if not tier_exists and not results and not left:
        text = f"no tier {request.spec.tier_ref.name} in namespace {request.namespace}"
        return ErasureState.FAILED, found(False, Reason.ERASE_FAILED, text)
    unproven = [name for name, result in results.items() if not result.verified and result.technique != FROM_VOLUME]
    counts = f"{len(results)} of {len(results) + len(left)} volume(s) done"
    if given_up:
        names = ", ".join(place.volume.name for place in given_up[:5])
        return ErasureState.FAILED, found(False, Reason.ABANDONED, f"{counts}; given up: {names}")
    if not left:
        text = f"{counts}; not verified: {', '.join(sorted(unproven)[:5])}" if unproven else counts
        return ErasureState.COMPLETE, found(True, Reason.COMPLETE, text)
    silent = [place for place in left if place.unheard]
    if silent:
        text = f"{counts}; {silent[0].volume.name}: {silent[0].unheard}"
        return _begun(results, left), found(None, silent[0].silence, text)
    refusals = [(place, seen) for place in left if (seen := _refusal(place)) is not None]
    if refusals:
        place, seen = refusals[0]
        return _begun(results, left), found(
            False, Reason.ERASE_FAILED, f"{counts}; {place.volume.name}: {seen.message}"
        )
    state = _begun(results, left)
    if state is ErasureState.ERASING:
        return state, found(None, Reason.ERASING, counts)
    if request.spec.scope is ErasureScope.ALL:
        return state, found(None, Reason.PENDING, counts)
    text = f"{counts}; scope {request.spec.scope.value} is for the engine that holds the keys, and none has reported"
    return state, found(None, Reason.PENDING, text)


def _begun(results: Mapping[str, ErasedVolume], left: Iterable[Place]) -> ErasureState:
    begun = bool(results) or any(place.volume.state in ENDING for place in left)
    return ErasureState.ERASING if begun else ErasureState.PENDING


def _refusal(place: Place) -> Seen | None:
    seen = place.volume.conditions.get(ConditionType.SCRUBBED.value)
    return seen if seen is not None and seen.status is False else None


def _recorded(
    request: ErasureFacts, scope: Iterable[Place], records: Iterable[ErasureFacts]
) -> dict[str, ErasedVolume]:
    """Results of complete records that answer the request, or that ended a volume of its scope after it."""
    names = {place.volume.name for place in scope}
    found: dict[str, ErasedVolume] = {}
    for record in records:
        if not record.is_complete or record.tier != request.tier:
            continue
        for result in record.results():
            answers = record.request_uid == request.uid
            ends = (
                record.request_uid is None
                and result.volume_id in names
                and result.end is not None
                and result.end >= request.created_at
            )
            if answers or ends:
                found[result.volume_id] = result
    return found


def _ended_since(place: Place, request: ErasureFacts) -> bool:
    receipt = place.volume.receipt
    return place.volume.state is VolumeState.ERASED and receipt is not None and receipt.time >= request.created_at


def _ended_before(place: Place, request: ErasureFacts) -> bool:
    return place.volume.is_final and not _ended_since(place, request)


def _from_volume(place: Place) -> ErasedVolume:
    volume = place.volume
    if volume.receipt is None:
        raise ValueError(f"{volume.name} has no receipt")
    return ErasedVolume(
        volume_id=volume.name,
        node_name=volume.node_name,
        backend=volume.backend,
        technique=FROM_VOLUME,
        begin=volume.state_since or volume.receipt.time,
        end=volume.receipt.time,
        bytes=volume.size_bytes,
        receipt_id=volume.receipt.id,
        receipt_hash=volume.receipt.hash,
    )
