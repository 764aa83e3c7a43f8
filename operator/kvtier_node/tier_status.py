"""The status of a tier on this host, from measured facts. Where it is written down is left to `status_files`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from kvtier_api.meta import Condition
from kvtier_api.tier import EncryptionBackend, KVCacheTierStatus, LastErasure, VolumeCounts
from kvtier_api.volume import VolumeState
from kvtier_node.conditions import TierFacts, findings, to_conditions
from kvtier_node.ledger import VolumeRow
from kvtier_node.receipts import Receipt

__all__ = ["residual_bytes", "status_of"]

_LEFT: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})


def residual_bytes(rows: Sequence[VolumeRow]) -> int:
    """Slot bytes of volumes whose consumer ended and whose erasure is not proven yet."""
    return sum(row.ranks * row.bytes_per_rank for row in rows if row.state in _LEFT)


def status_of(facts: TierFacts, before: Sequence[Condition], last: Receipt | None, nodes: int = 1) -> KVCacheTierStatus:
    """The tier's status from measured facts; `before` are its conditions so far, `last` its newest receipt."""
    rows = [volume.row for volume in facts.volumes]
    used = [row for row in rows if row.state is VolumeState.IN_USE]
    backends = {row.backend for row in rows} or {
        backend for backend in (facts.check.backend if facts.check else None,) if backend is not None
    }
    return KVCacheTierStatus(
        observed_generation=facts.tier.metadata.generation,
        nodes=nodes if rows else 0,
        volumes=_counts(rows, facts.abandoned),
        bytes_per_rank=int(facts.tier.spec.size_per_rank),
        bytes_total=sum(row.ranks * row.bytes_per_rank for row in rows),
        residual_bytes=residual_bytes(rows),
        oldest_block_time=min((datetime.fromisoformat(row.state_since) for row in used), default=None),
        last_erasure=_last_erasure(last),
        backend=EncryptionBackend(backends.pop().value) if len(backends) == 1 else None,
        conditions=to_conditions(findings(facts), before, facts),
    )


def _counts(rows: Sequence[VolumeRow], abandoned: int) -> VolumeCounts:
    states = [row.state for row in rows]
    return VolumeCounts(
        total=len(states),
        ready=states.count(VolumeState.READY),
        in_use=states.count(VolumeState.IN_USE),
        erasing=states.count(VolumeState.ERASING) + states.count(VolumeState.DYING),
        failed=states.count(VolumeState.FAILED),
        abandoned=abandoned,
    )


def _last_erasure(receipt: Receipt | None) -> LastErasure | None:
    if receipt is None:
        return None
    return LastErasure.model_validate(
        {
            "time": receipt.end,
            "trigger": receipt.trigger,
            "node_name": receipt.node_name,
            "volume_id": receipt.volume_id,
            "receipt_id": receipt.id,
        }
    )
