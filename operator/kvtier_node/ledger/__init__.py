"""The ledger: every place that this node made, each arrow of its life before its effect, and the chain of receipts.

Open it with `Ledger.open`; on LedgerDamaged or LedgerMissing, recovery calls `Ledger.create_fresh` and adopts what it
finds on the node. It records; what to do next is left to the life cycle.
"""

from __future__ import annotations

from kvtier_node.ledger.book import Ledger, Observer
from kvtier_node.ledger.rows import (
    ABANDON,
    ARROWS,
    TERMINAL,
    ArrowRefused,
    EraseRequest,
    Event,
    Head,
    LedgerDamaged,
    LedgerMissing,
    Transition,
    VolumeRow,
)

__all__ = [
    "ABANDON",
    "ARROWS",
    "TERMINAL",
    "ArrowRefused",
    "EraseRequest",
    "Event",
    "Head",
    "Ledger",
    "LedgerDamaged",
    "LedgerMissing",
    "Observer",
    "Transition",
    "VolumeRow",
]
