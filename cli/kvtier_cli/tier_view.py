"""A tier as `kvtier status` shows it: counts from the ledger, conditions from whoever measures.

The ledger is true whoever lives. A condition is an observation of `kvtier node`: without a living one, or before it wrote its
first, what is in the status file was true at its time, and nobody says that it still is. Printing is left to `status`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from kvtier_api.meta import Condition, ConditionStatus
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import VolumeState
from kvtier_node.conditions import TierFacts, VolumeFacts
from kvtier_node.consumers import consumer_of
from kvtier_node.ledger import VolumeRow
from kvtier_node.node_lock import LOCK_NAME
from kvtier_node.receipts import Receipt
from kvtier_node.status_files import StatusFiles
from kvtier_node.tier_status import status_of

__all__ = ["consumer_lives", "tiers_as_seen"]


def tiers_as_seen(
    state_dir: str,
    rows: Iterable[VolumeRow],
    receipts: Iterable[Receipt],
    tiers: Mapping[str, KVCacheTier],
    running: int | None,
) -> dict[str, KVCacheTier]:
    """`tiers`, of manifests and of status files, as they are now. `running`: the process id of the living `kvtier node`."""
    rows_of: dict[str, list[VolumeRow]] = {}
    for row in rows:
        rows_of.setdefault(row.tier_key, []).append(row)
    last = {f"{item.tier.namespace}/{item.tier.name}": item for item in receipts if item.tier is not None}
    seen = {}
    for key, tier in tiers.items():
        conditions = tier.status.conditions if tier.status is not None else []
        written = _changed_at(StatusFiles(state_dir).path_of(key))
        if running is None:
            conditions = _as_of(conditions, written, "no 'kvtier node' runs")
        elif written is not None and written < (_changed_at(f"{state_dir}/{LOCK_NAME}") or written):
            conditions = _as_of(conditions, written, "the 'kvtier node' that runs has not written its status yet")
        seen[key] = _with_status(tier, rows_of.get(key, ()), last.get(key), conditions)
    return seen


def consumer_lives(row: VolumeRow) -> bool | None:
    """Whether the consumer on record lives; None where there is none."""
    consumer = consumer_of(row.consumer)
    return None if consumer is None else consumer.alive()


def _with_status(
    tier: KVCacheTier, rows: Sequence[VolumeRow], last: Receipt | None, conditions: list[Condition]
) -> KVCacheTier:
    living = [VolumeFacts(row) for row in rows if not row.is_terminal]
    abandoned = sum(row.state is VolumeState.ABANDONED for row in rows)
    found = status_of(TierFacts(tier, datetime.now(UTC), living, abandoned), (), last)
    measured = tier.status.backend if tier.status is not None else None
    status = found.model_copy(update={"conditions": conditions, "backend": found.backend or measured})
    return tier.model_copy(update={"status": status})


def _as_of(conditions: Sequence[Condition], written: datetime | None, why: str) -> list[Condition]:
    """The same conditions as what they are by now: observations of the past."""
    if written is None:
        return []
    at = written.replace(microsecond=0)
    return [
        Condition(
            type=old.type,
            status=ConditionStatus.UNKNOWN,
            observed_generation=old.observed_generation,
            last_transition_time=max(at, old.last_transition_time),
            reason=Reason.NODE_UNREACHABLE.value,
            message=f"{why}; as of {at.isoformat().replace('+00:00', 'Z')}: "
            f"{old.status.value} ({old.reason}): {old.message}"[:32768],
        )
        for old in conditions
    ]


def _changed_at(path: str) -> datetime | None:
    try:
        return datetime.fromtimestamp(os.stat(path, follow_symlinks=False).st_mtime, UTC)
    except FileNotFoundError:
        return None
