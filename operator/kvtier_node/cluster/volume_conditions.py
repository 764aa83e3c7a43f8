"""The conditions of one volume, from what this node measured: the same names and rules as a tier's (`kvtier_node.conditions`).

The controller adds up those of all nodes. A status is written when a condition's status or reason changes, not when a figure
in its message does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from kvtier_api.meta import Condition, ObjectMeta
from kvtier_api.tier import KVCacheTier, KVCacheTierSpec
from kvtier_api.volume import VolumeState
from kvtier_node.conditions import TierFacts, VolumeFacts, findings, to_conditions
from kvtier_node.hardening import HostFacts
from kvtier_node.ledger import VolumeRow
from kvtier_node.measuring import VolumeMeasurement
from kvtier_node.receipts import Receipt, plaintext_of

__all__ = ["Seen", "differ", "volume_conditions"]


@dataclass(frozen=True)
class Seen:
    """What the agent knows of a volume beside its row."""

    measured: VolumeMeasurement | None = None
    host: HostFacts | None = None
    failure: str = ""


def volume_conditions(
    row: VolumeRow, receipt: Receipt | None, seen: Seen, before: Sequence[Condition], now: datetime
) -> list[Condition]:
    """An unchanged status keeps its transition time from `before`."""
    tier = KVCacheTier(
        metadata=ObjectMeta(name=row.tier_name, namespace=row.tier_namespace, generation=1),
        spec=KVCacheTierSpec.model_validate(row.spec),
    )
    late = receipt is not None and receipt.deadline_met is False
    facts = TierFacts(
        tier=tier,
        now=now,
        volumes=[] if row.is_terminal else [VolumeFacts(row, seen.measured, seen.failure)],
        abandoned=int(row.state is VolumeState.ABANDONED),
        host=seen.host,
        missed=f"receipt {receipt.id}" if receipt is not None and late else "",
        plaintext=f"receipt {receipt.id}" if receipt is not None and plaintext_of(receipt.steps) else "",
    )
    return to_conditions(findings(facts), before, facts)


def differ(one: Sequence[Condition], other: Sequence[Condition]) -> bool:
    """Whether any condition says something else; figures in messages do not count."""
    return [(it.type, it.status, it.reason) for it in one] != [(it.type, it.status, it.reason) for it in other]
