"""Reasons of the controller's events: closed, each with its type and its explanation (docs/events.md has the same)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

__all__ = ["EVENT_REASONS", "EventReason", "Explained"]


class EventReason(StrEnum):
    TIER_DECLARED = "TierDeclared"
    INVALID_SPEC = "InvalidSpec"
    TIER_READY = "TierReady"
    TIER_NOT_READY = "TierNotReady"
    STORE_CREATED = "StoreCreated"
    STORE_IN_USE = "StoreInUse"
    ERASURE_BEGUN = "ErasureBegun"
    STORE_FAILED = "StoreFailed"
    ERASE_INCOMPLETE = "EraseIncomplete"
    NOT_ENCRYPTED = "NotEncrypted"
    MAX_AGE_EXCEEDED = "MaxAgeExceeded"
    NODE_UNREACHABLE = "NodeUnreachable"
    NOT_IN_LEDGER = "NotInLedger"
    KEYS_LOST = "KeysLost"
    ABANDONED = "Abandoned"
    ABANDON_REFUSED = "AbandonRefused"
    DELETION_WAITS = "DeletionWaits"
    DELETION_DONE = "DeletionDone"
    ERASURE_COMPLETE = "ErasureComplete"
    ERASURE_FAILED = "ErasureFailed"
    OBJECT_UNREADABLE = "ObjectUnreadable"


@dataclass(frozen=True)
class Explained:
    type: Literal["Normal", "Warning"]
    on: str
    """Kinds that it is posted on."""
    text: str


_TIER: Final = "KVCacheTier"
_VOLUME: Final = "KVCacheVolume"
_ERASURE: Final = "KVCacheErasure"

EVENT_REASONS: Final[dict[EventReason, Explained]] = {
    EventReason.TIER_DECLARED: Explained(
        "Normal", _TIER, "The controller saw the tier for the first time; the note names size, path and owner."
    ),
    EventReason.INVALID_SPEC: Explained(
        "Warning", _TIER, "The spec does not hold; the note names field and remedy. Running volumes stay as they were."
    ),
    EventReason.TIER_READY: Explained("Normal", _TIER, "Every condition that the tier needs became True."),
    EventReason.TIER_NOT_READY: Explained("Warning", _TIER, "Ready became False; the note says why."),
    EventReason.STORE_CREATED: Explained(
        "Normal", _TIER, "A store of KV-cache blocks came into being: a volume was recorded on a node."
    ),
    EventReason.STORE_IN_USE: Explained("Normal", _VOLUME, "A consumer was given the volume."),
    EventReason.ERASURE_BEGUN: Explained("Normal", _VOLUME, "The consumer ended; the erasure began."),
    EventReason.STORE_FAILED: Explained(
        "Warning", _VOLUME, "A step of the volume's life failed; the node agent tries again."
    ),
    EventReason.ERASE_INCOMPLETE: Explained(
        "Warning", _TIER, "A key or bytes may still be reachable; the note says where."
    ),
    EventReason.NOT_ENCRYPTED: Explained(
        "Warning", _TIER, "A node measured that a volume is not encrypted, or found plaintext in it."
    ),
    EventReason.MAX_AGE_EXCEEDED: Explained(
        "Warning", _TIER, "A block older than retention.maxAge may still be readable."
    ),
    EventReason.NODE_UNREACHABLE: Explained(
        "Warning", _TIER, "A node that holds a volume does not report. The volume still counts."
    ),
    EventReason.NOT_IN_LEDGER: Explained(
        "Warning",
        _TIER,
        "A node answers, and its ledger does not have a volume that it made. The volume still counts; the note has the remedy.",
    ),
    EventReason.KEYS_LOST: Explained(
        "Normal", _TIER, "A node runs under another boot id: the keys of the named volume went with its memory."
    ),
    EventReason.ABANDONED: Explained(
        "Warning",
        f"{_TIER}, {_VOLUME}",
        "An administrator gave a place up; the note gives the reason. Nothing is claimed of it.",
    ),
    EventReason.ABANDON_REFUSED: Explained(
        "Warning", _VOLUME, "The annotation kvtier.dev/abandon has no reason as its value, so it is not followed."
    ),
    EventReason.DELETION_WAITS: Explained(
        "Warning", _TIER, "The tier is being deleted and waits for the named volumes to be erased."
    ),
    EventReason.DELETION_DONE: Explained("Normal", _TIER, "No volume of the tier is left to erase; the object goes."),
    EventReason.ERASURE_COMPLETE: Explained("Normal", _ERASURE, "Every volume in the request's scope is erased."),
    EventReason.ERASURE_FAILED: Explained("Warning", _ERASURE, "The request cannot be fulfilled; the note says why."),
    EventReason.OBJECT_UNREADABLE: Explained(
        "Warning", _VOLUME, "The object cannot be read by this version. It counts as a place all the same."
    ),
}
