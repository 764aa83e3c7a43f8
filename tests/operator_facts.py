"""Facts for tests of the controller's pure functions: a tier, volumes of it, their nodes, at one instant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kvtier_api.volume import BackendName, ReceiptRef, VolumeState
from kvtier_operator.facts import ErasureFacts, NodeFacts, Seen, TierFacts, VolumeFacts, erasure_facts, tier_facts
from kvtier_operator.places import Surroundings
from kvtier_operator.planning import Snapshot

__all__ = [
    "GOOD",
    "NOW",
    "a_node",
    "a_record",
    "a_request",
    "a_snapshot",
    "a_tier",
    "a_volume",
    "around",
    "receipt",
    "said",
]

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
EARLIER = NOW - timedelta(hours=1)
GiB = 1024**3


def said(**conditions: tuple[bool | None, str]) -> dict[str, Seen]:
    return {type_: Seen(status, reason, f"{type_} as measured") for type_, (status, reason) in conditions.items()}


GOOD: Mapping[str, Seen] = said(
    Provisioned=(True, "Provisioned"),
    Encrypted=(True, "KernelKeyMeasured"),
    SaltEnforced=(True, "SaltRequired"),
    RetentionEnforced=(True, "SlotsSampledSealed"),
    Scrubbed=(True, "NothingLeft"),
    HostHardened=(True, "HostHardened"),
)


def a_tier(*, deleting: bool = False, held: bool = True, status: Any = None, **spec: Any) -> TierFacts:
    body: dict[str, Any] = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {
            "name": "t",
            "namespace": "n",
            "uid": "tier-uid",
            "generation": 1,
            "resourceVersion": "10",
            "finalizers": ["kvtier.dev/erase"] if held else [],
        },
        "spec": {"sizePerRank": "1Gi", "ranks": 2, "path": "/var/lib/kvtier", **spec},
    }
    if deleting:
        body["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    found = tier_facts(body)
    return replace(found, status=status) if status is not None else found


def a_volume(number: int = 1, state: VolumeState | None = VolumeState.IN_USE, **changes: Any) -> VolumeFacts:
    name = f"kvv-{number:020x}"
    found = VolumeFacts(
        namespace="n",
        name=name,
        uid=f"uid-{number}",
        version="1",
        tier_name="t",
        tier_uid="tier-uid",
        node_name="node-a",
        created_at=EARLIER,
        state=state,
        state_since=EARLIER,
        backend=BackendName.FSCRYPT,
        boot_id="boot-1",
        size_bytes=2 * GiB,
        finalizers=("kvtier.dev/erase",),
        conditions=GOOD,
    )
    return replace(found, **changes)


def receipt(at: datetime = NOW) -> ReceiptRef:
    return ReceiptRef(id="r", hash="h", time=at)


def a_node(name: str = "node-a", **changes: Any) -> NodeFacts:
    found = NodeFacts(name, "1", True, "boot-1", "machine-1", EARLIER - timedelta(days=1))
    return replace(found, **changes)


def around(*nodes: NodeFacts, agents: Mapping[str, bool] | None = None) -> Surroundings:
    return Surroundings({node.name: node for node in nodes or (a_node(),)}, agents)


def a_request(*, at: datetime = NOW - timedelta(minutes=1), scope: str = "All", **spec: Any) -> ErasureFacts:
    return erasure_facts(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheErasure",
            "metadata": {
                "name": "e",
                "namespace": "n",
                "uid": "request-uid",
                "generation": 1,
                "resourceVersion": "1",
                "creationTimestamp": at.isoformat(),
            },
            "spec": {"tierRef": {"name": "t"}, "scope": scope, "reason": "asked", **spec},
        }
    )


def a_record(
    volume: VolumeFacts, *, request: str | None = None, end: datetime = NOW, name: str = "", verified: bool = True
) -> ErasureFacts:
    """As an agent makes it."""
    labels = {"kvtier.dev/volume": volume.name} | ({"kvtier.dev/request": request} if request else {})
    return erasure_facts(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheErasure",
            "metadata": {
                "name": name or f"record-{volume.name}",
                "namespace": "n",
                "uid": f"uid-of-{name or volume.name}",
                "resourceVersion": "1",
                "labels": labels,
                "creationTimestamp": end.isoformat(),
            },
            "spec": {"tierRef": {"name": "t"}, "reason": "done", "trigger": "Crash"},
            "status": {
                "state": "Complete",
                "end": end.isoformat(),
                "volumes": [
                    {
                        "volumeId": volume.name,
                        "nodeName": volume.node_name,
                        "technique": "KeyDestroyed",
                        "begin": end.isoformat(),
                        "end": end.isoformat(),
                        "verified": verified,
                        "receiptId": f"receipt-{volume.name}",
                    }
                ],
            },
        }
    )


def a_snapshot(tier: TierFacts | None, volumes: Sequence[VolumeFacts] = (), **changes: Any) -> Snapshot:
    seen = {volume.uid: volume.state for volume in volumes}
    found = Snapshot(key=("n", "t"), now=NOW, tier=tier, volumes=volumes, around=around(), seen=seen)
    return replace(found, **changes)
