"""The ledger's rows and receipts as API objects. Pure: the same row gives the same object.

The spec of a KVCacheVolume is written once, so it holds only what is known from the volume's first record on.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from kvtier_api.conditions import Finding, written_down
from kvtier_api.erasure import (
    ErasedVolume,
    ErasureState,
    KVCacheErasure,
    KVCacheErasureSpec,
    KVCacheErasureStatus,
)
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.meta import API_VERSION, Condition, ConditionType, ObjectMeta, OwnerReference
from kvtier_api.reasons import Reason
from kvtier_api.volume import (
    BackendName,
    Consumer,
    KVCacheVolume,
    KVCacheVolumeSpec,
    KVCacheVolumeStatus,
    RankFile,
    ReceiptRef,
    TierReference,
    VolumeState,
)
from kvtier_node.ledger import VolumeRow
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.receipts import Receipt
from kvtier_node.slots import slot_names
from kvtier_node.tier_status import residual_bytes

__all__ = [
    "ABANDON",
    "NODE_LABEL",
    "REQUEST_LABEL",
    "SYSTEM_UUID",
    "VOLUME_LABEL",
    "erasure_object",
    "node_label",
    "volume_object",
    "volume_status",
]

NODE_LABEL: Final = "kvtier.dev/node"
VOLUME_LABEL: Final = "kvtier.dev/volume"
"""On a KVCacheErasure that is the record of one volume's erasure: which one."""
REQUEST_LABEL: Final = "kvtier.dev/request"
"""On such a record: the uid of the KVCacheErasure that asked for it."""
SYSTEM_UUID: Final = "kvtier.dev/system-uuid"
"""Annotation of a volume: the machine that holds its keys, as the Node object says it."""
ABANDON: Final = "kvtier.dev/abandon"
"""Annotation of a volume, by an administrator: the reason why its place is given up."""
_USABLE: Final = frozenset({VolumeState.READY, VolumeState.IN_USE})
_LABEL: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_REASON_LIMIT: Final = 1024


def node_label(node_name: str) -> str:
    """The node's name as a label's value; a longer one by its hash."""
    if _LABEL.fullmatch(node_name):
        return node_name
    return f"sha256-{hashlib.sha256(node_name.encode()).hexdigest()[:32]}"


def volume_object(row: VolumeRow, pod: PodIdentity, *, system_uuid: str | None, owned: bool = True) -> dict[str, Any]:
    """The object without its status, for a server-side apply.

    `owned`: its tier is there. An object whose owner is gone would be collected as garbage, with the record of the place.
    """
    owner = OwnerReference(api_version=API_VERSION, kind="KVCacheTier", name=row.tier_name, uid=row.tier_uid)
    volume = KVCacheVolume(
        metadata=ObjectMeta(
            name=row.volume_id,
            namespace=row.tier_namespace,
            labels={NODE_LABEL: node_label(row.node)},
            annotations={SYSTEM_UUID: system_uuid} if system_uuid else {},
            owner_references=[owner] if owned else [],
        ),
        spec=KVCacheVolumeSpec.model_validate(
            {
                "tier_ref": TierReference(name=row.tier_name, uid=row.tier_uid),
                "node_name": row.node,
                "path": row.place,
                "device": row.spec.get("device"),
                "backend": row.backend,
                "cipher": _cipher(row),
                "size_per_rank": str(row.bytes_per_rank),
                "ranks": row.ranks,
                "consumer": Consumer(
                    pod_uid=pod.uid, pod_name=pod.name, uid=int(row.facts["uid"]), gid=int(row.facts["gid"])
                ),
            }
        ),
    )
    return volume.to_manifest()


def _cipher(row: VolumeRow) -> str | None:
    if row.backend is BackendName.DM_CRYPT:
        return row.cipher
    return "fscrypt-v2-aes-256-xts" if row.backend is BackendName.FSCRYPT else None


def volume_status(
    row: VolumeRow, receipt: Receipt | None, conditions: Sequence[Condition], failure: str = ""
) -> KVCacheVolumeStatus:
    """`failure`: why its erasure did not succeed yet."""
    usable = row.state in _USABLE
    mount = f"{row.place}/{MOUNT_NAME}"
    names = slot_names(str(row.spec.get("slotPrefix", "slot")), row.ranks)
    why = row.reason if row.state in (VolumeState.FAILED, VolumeState.ABANDONED) else failure
    return KVCacheVolumeStatus(
        observed_generation=1,
        state=row.state,
        state_since=datetime.fromisoformat(row.state_since),
        key_id=row.key_id,
        boot_id=row.boot_id,
        mount_path=mount if usable else None,
        rank_files=[
            RankFile(rank=rank, path=f"{mount}/{SLOTS_DIRECTORY}/{name}", size_bytes=row.bytes_per_rank)
            for rank, name in enumerate(names)
        ]
        if usable
        else [],
        bytes_total=0 if row.state is VolumeState.ERASED else row.ranks * row.bytes_per_rank,
        residual_bytes=residual_bytes([row]),
        last_receipt=_reference(receipt) if receipt is not None else None,
        reason=why[:_REASON_LIMIT] or None,
        conditions=list(conditions),
    )


def _reference(receipt: Receipt) -> ReceiptRef:
    return ReceiptRef.model_validate({"id": receipt.id, "hash": receipt.hash(), "time": receipt.end})


def erasure_object(row: VolumeRow, pod: PodIdentity, receipt: Receipt) -> tuple[dict[str, Any], KVCacheErasureStatus]:
    """The record of one erasure: the object without its status, and its status. Named after the receipt."""
    labels = {VOLUME_LABEL: row.volume_id, NODE_LABEL: node_label(row.node)}
    request = row.facts.get("request")
    if request:
        labels[REQUEST_LABEL] = str(request)
    erasure = KVCacheErasure(
        metadata=ObjectMeta(name=receipt.id, namespace=row.tier_namespace, labels=labels),
        spec=KVCacheErasureSpec(
            tier_ref=TierReference(name=row.tier_name, uid=row.tier_uid),
            reason=f"{receipt.trigger.value}: the volume of pod {pod.namespace}/{pod.name} on node {row.node}",
            trigger=receipt.trigger,
        ),
    )
    result = ErasedVolume.model_validate(
        {
            "volume_id": row.volume_id,
            "node_name": row.node,
            "backend": row.backend,
            "technique": receipt.technique.value,
            "begin": receipt.begin,
            "end": receipt.end,
            "verified": _verified(receipt),
            "deadline_met": receipt.deadline_met,
            "bytes": row.ranks * row.bytes_per_rank,
            "not_covered": [text[:_REASON_LIMIT] for text in receipt.not_covered[:16]] or None,
            "receipt_id": receipt.id,
            "receipt_hash": receipt.hash(),
        }
    )
    found = Finding(ConditionType.COMPLETE, True, Reason.COMPLETE, f"receipt {receipt.id}")
    status = KVCacheErasureStatus(
        observed_generation=1,
        state=ErasureState.COMPLETE,
        begin=result.begin,
        end=result.end,
        volumes=[result],
        residual_bytes=0,
        conditions=written_down([found], (), generation=1, now=result.end or result.begin),
    )
    return erasure.to_manifest(), status


def _verified(receipt: Receipt) -> bool:
    """Every step that failed was measured good in the end, and at least one was measured."""
    kinds: dict[str, list[bool | None]] = {}
    for step in receipt.steps:
        kinds.setdefault(step.name.removesuffix("-after-overwrite"), []).append(step.ok)
    if any(False in results and results[-1] is not True for results in kinds.values()):
        return False
    return any(results[-1] is True for results in kinds.values())
