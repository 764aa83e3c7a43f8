"""A tier's status as a pure function of its places, its erasures and the status before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from kvtier_api.conditions import Finding, written_down
from kvtier_api.tier import EncryptionBackend, KVCacheTierStatus, LastErasure, VolumeCounts
from kvtier_api.volume import VolumeState
from kvtier_operator.conditions import ENDING, Tier
from kvtier_operator.facts import ErasureFacts, TierFacts
from kvtier_operator.places import Place

__all__ = ["initial_conditions_only", "tier_status"]

_NOT_ERASED: Final = frozenset(VolumeState) - {VolumeState.ERASED}


def tier_status(
    facts: TierFacts, tier: Tier, found: Iterable[Finding], erasures: Sequence[ErasureFacts]
) -> KVCacheTierStatus:
    """`facts.status` is the one before: what did not change in it stays as it was, times included."""
    before = facts.status or KVCacheTierStatus()
    kept = [place for place in tier.places if place.volume.state in _NOT_ERASED or place.volume.state is None]
    holding = [place for place in kept if place.counts]
    states = Counter(place.volume.state for place in kept if not place.keys_lost)
    ranks = [it.volume.bytes_per_rank for it in holding if it.volume.bytes_per_rank is not None]
    backends = {place.volume.backend for place in holding if place.volume.backend is not None}
    since = [
        place.volume.state_since
        for place in holding
        if place.volume.state is VolumeState.IN_USE and place.volume.state_since is not None
    ]
    return KVCacheTierStatus(
        observed_generation=facts.meta.generation,
        nodes=len({place.volume.node_name for place in kept}),
        volumes=VolumeCounts(
            total=len(kept),
            ready=states[VolumeState.READY],
            in_use=states[VolumeState.IN_USE],
            erasing=states[VolumeState.DYING] + states[VolumeState.ERASING],
            failed=states[VolumeState.FAILED],
            abandoned=states[VolumeState.ABANDONED],
        ),
        bytes_per_rank=max(ranks) if ranks else None,
        bytes_total=sum(place.volume.size_bytes for place in holding),
        residual_bytes=sum(_residual_bytes(place) for place in kept),
        oldest_block_time=min(since).replace(microsecond=0) if since else None,
        last_erasure=_last_erasure(erasures, before.last_erasure),
        backend=EncryptionBackend(backends.pop().value) if len(backends) == 1 else None,
        conditions=written_down(found, before.conditions, generation=facts.meta.generation, now=tier.now),
    )


def initial_conditions_only(facts: TierFacts, found: Iterable[Finding], now: datetime) -> KVCacheTierStatus:
    """For a spec that does not hold: what is known of running volumes stays, the findings say what is wrong."""
    before = facts.status or KVCacheTierStatus()
    conditions = written_down(found, before.conditions, generation=facts.meta.generation, now=now)
    return before.model_copy(update={"observed_generation": facts.meta.generation, "conditions": conditions})


def _residual_bytes(place: Place) -> int:
    """What the node measured; where it measured nothing, all of a volume whose consumer ended."""
    if place.keys_lost:
        return 0
    if place.volume.residual_bytes is not None:
        return place.volume.residual_bytes
    return place.volume.size_bytes if place.volume.state in ENDING else 0


def _last_erasure(erasures: Iterable[ErasureFacts], before: LastErasure | None) -> LastErasure | None:
    """The newest record. It never goes back: records are pruned."""
    last = before
    for erasure in erasures:
        if not erasure.is_record or not erasure.is_complete or erasure.end is None:
            continue
        if last is None or erasure.end > last.time:
            results = erasure.results()
            last = LastErasure(
                time=erasure.end,
                trigger=erasure.spec.trigger,
                node_name=results[-1].node_name if results else None,
                volume_id=erasure.volume_id,
                receipt_id=results[-1].receipt_id if results else None,
            )
    return last
