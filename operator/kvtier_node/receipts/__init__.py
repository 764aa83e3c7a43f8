"""Receipts and place records: what the node signs, how it is written down, and how it is verified offline.

The ledger keeps receipts and gives each its place in the chain; this package knows no database.
"""

from __future__ import annotations

from kvtier_api.erasure import Trigger
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.receipts.chain import ChainHead, Verification, export_chain, sign_head, verify_chain, verify_export
from kvtier_node.receipts.encoding import ZERO_HASH, canonical_json, hash_of, seconds, utc_now
from kvtier_node.receipts.place import PLACE_NAME, PlaceRecord, read_place, sign_place
from kvtier_node.receipts.receipt import (
    Receipt,
    ReceiptDraft,
    Step,
    Technique,
    TierIdentity,
    plaintext_of,
    read_receipt,
    sign_receipt,
)

__all__ = [
    "PLACE_NAME",
    "ZERO_HASH",
    "BackendName",
    "ChainHead",
    "PlaceRecord",
    "Receipt",
    "ReceiptDraft",
    "Step",
    "Technique",
    "TierIdentity",
    "Trigger",
    "Verification",
    "VolumeState",
    "canonical_json",
    "export_chain",
    "hash_of",
    "plaintext_of",
    "read_place",
    "read_receipt",
    "seconds",
    "sign_head",
    "sign_place",
    "sign_receipt",
    "utc_now",
    "verify_chain",
    "verify_export",
]
