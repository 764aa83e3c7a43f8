"""The bodies that the controller sends: what of an object it sets, with uid and resource version as preconditions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from kvtier_api.conditions import Finding, written_down
from kvtier_api.erasure import (
    ErasedVolume,
    ErasureState,
    KVCacheErasure,
    KVCacheErasureSpec,
    KVCacheErasureStatus,
    Trigger,
)
from kvtier_api.meta import API_VERSION, ConditionType, ObjectMeta, StatusModel
from kvtier_api.reasons import Reason
from kvtier_api.volume import TierReference, VolumeState
from kvtier_operator.facts import ErasureFacts, TierFacts, VolumeFacts
from kvtier_operator.names import FINALIZER, KEYS_LOST_SUFFIX, VOLUME_LABEL

__all__ = [
    "abandoned",
    "erasure_status",
    "held",
    "keys_lost_record",
    "keys_lost_status",
    "released",
    "tier_status",
]

_KEY_LOST: Final = "KeyLost"
"""As the node's receipts say it (kvtier_node.receipts.receipt.Technique)."""


def tier_status(facts: TierFacts, status: StatusModel) -> dict[str, Any]:
    return _status(
        "KVCacheTier", facts.meta.namespace, facts.meta.name, facts.meta.uid, facts.meta.resource_version, status
    )


def erasure_status(facts: ErasureFacts, status: StatusModel) -> dict[str, Any]:
    return _status("KVCacheErasure", facts.namespace, facts.name, facts.uid, facts.version, status)


def _status(  # noqa: PLR0917
    kind: str, namespace: str, name: str, uid: str | None, version: str | None, status: StatusModel
) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": version},
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def abandoned(volume: VolumeFacts, why_unheard: str, now: datetime) -> dict[str, Any]:
    """State Abandoned, and nothing else of the volume's status: what its node measured stays on record."""
    return {
        "apiVersion": API_VERSION,
        "kind": "KVCacheVolume",
        "metadata": {
            "name": volume.name,
            "namespace": volume.namespace,
            "uid": volume.uid,
            "resourceVersion": volume.version,
        },
        "status": {
            "state": VolumeState.ABANDONED.value,
            "stateSince": max(now, volume.state_since or now).isoformat().replace("+00:00", "Z"),
            "reason": f"{(volume.abandon or '').strip()[:800]} (by annotation; no receipt: {why_unheard[:160]})",
        },
    }


def held(finalizers: list[str], version: str | None) -> dict[str, Any]:
    """A merge patch that adds the finalizer. The list is replaced as a whole, so the version guards it."""
    return _finalizers([*finalizers, FINALIZER], version)


def released(finalizers: list[str], version: str | None) -> dict[str, Any]:
    return _finalizers([it for it in finalizers if it != FINALIZER], version)


def _finalizers(finalizers: list[str], version: str | None) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version, "finalizers": finalizers}}


def keys_lost_record(volume: VolumeFacts, proof: str) -> dict[str, Any]:
    """The record that a volume's keys went with its node's memory. Its name is the volume's, so it is made once."""
    record = KVCacheErasure(
        metadata=ObjectMeta(
            name=volume.name + KEYS_LOST_SUFFIX, namespace=volume.namespace, labels={VOLUME_LABEL: volume.name}
        ),
        spec=KVCacheErasureSpec(
            tier_ref=TierReference(name=volume.tier_name, uid=volume.tier_uid),
            reason=proof[:1024],
            trigger=Trigger.POWER_LOSS,
        ),
    )
    manifest = record.to_manifest()
    manifest.pop("status", None)
    return manifest


def keys_lost_status(record: Mapping[str, Any], volume: VolumeFacts, proof: str, now: datetime) -> dict[str, Any]:
    """Not verified: no reader looked at the disk. What is claimed is that no kernel holds the keys any more."""
    done = Finding(ConditionType.COMPLETE, True, Reason.COMPLETE, proof)
    status = KVCacheErasureStatus(
        state=ErasureState.COMPLETE,
        begin=now,
        end=now,
        volumes=[
            ErasedVolume(
                volume_id=volume.name,
                node_name=volume.node_name,
                backend=volume.backend,
                technique=_KEY_LOST,
                begin=now,
                end=now,
                verified=False,
                bytes=volume.size_bytes,
                not_covered=[
                    "the ciphertext on the node's disk, which no key opens; the node's receipt is still to come"
                ],
            )
        ],
        residual_bytes=0,
        conditions=written_down([done], [], generation=None, now=now),
    )
    meta = record["metadata"]
    return _status("KVCacheErasure", meta["namespace"], meta["name"], meta["uid"], meta["resourceVersion"], status)
