"""KVCacheVolume: one volume of one tier on one node for one consumer, as its node agent sees it.

The spec is the durable record of the place, written before the first byte. The agent's ledger is the truth;
this object is its copy in the API.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvtier_api.clean_path import CleanPath
from kvtier_api.meta import (
    API_VERSION,
    Conditions,
    Count,
    DnsLabel,
    DnsSubdomain,
    MicroTime,
    Resource,
    SpecModel,
    StatusModel,
)
from kvtier_api.quantity import ByteSize
from kvtier_api.rules import Rule, TransitionRule, constant

__all__ = [
    "BackendName",
    "Consumer",
    "KVCacheVolume",
    "KVCacheVolumeSpec",
    "KVCacheVolumeStatus",
    "RankFile",
    "ReceiptRef",
    "TierReference",
    "VolumeState",
]

VolumeId = Annotated[str, Field(max_length=24, pattern=r"^kvv-[0-9a-f]{20}$")]
Identifier = Annotated[str, Field(min_length=1, max_length=253)]


class VolumeState(StrEnum):
    PLANNED = "Planned"
    """On record; nothing exists yet."""
    PROVISIONING = "Provisioning"
    READY = "Ready"
    IN_USE = "InUse"
    DYING = "Dying"
    """The consumer ended; the fence is closed, the erasure has not begun."""
    ERASING = "Erasing"
    ERASED = "Erased"
    """Final: unrecoverable, with a receipt."""
    FAILED = "Failed"
    """An arrow failed; it is retried, and the place still counts."""
    ABANDONED = "Abandoned"
    """Final: an administrator gave the place up, with a reason."""

    @property
    def is_final(self) -> bool:
        return self in (VolumeState.ERASED, VolumeState.ABANDONED)


class BackendName(StrEnum):
    """The backends a volume can have: what Auto became."""

    DM_CRYPT = "DmCrypt"
    FSCRYPT = "Fscrypt"
    HOST_ATTESTED = "HostAttested"
    SEAL_ONLY = "SealOnly"


class TierReference(SpecModel):
    """A tier of the same namespace; `uid` tells a tier from a later one of the same name."""

    name: DnsLabel
    uid: Identifier | None = None


class Consumer(SpecModel):
    """The pod, or on a host without Kubernetes the process, that the volume is made for."""

    rules = (
        Rule(
            "has(self.podUid) != has(self.pid)",
            lambda it: (it.pod_uid is None) != (it.pid is None),
            "a consumer is a pod or a process",
            "give podUid or pid, not both",
        ),
    )

    pod_uid: Identifier | None = None
    pod_name: DnsSubdomain | None = None
    pid: Annotated[int, Field(strict=True, ge=1)] | None = None
    uid: Count
    """Owner of the slot files."""
    gid: Count


class KVCacheVolumeSpec(SpecModel):
    rules: ClassVar[tuple[Rule | TransitionRule, ...]] = (constant("the record of a volume"),)

    tier_ref: TierReference
    node_name: DnsSubdomain
    path: CleanPath
    """The volume's place on the node: tier path and volume id."""
    device: CleanPath | None = None
    backend: BackendName
    cipher: Identifier | None = None
    """Left out where the volume layer has no cipher of kvtier's own."""
    size_per_rank: ByteSize
    ranks: Annotated[int, Field(strict=True, ge=1, le=1024)]
    consumer: Consumer


class RankFile(StatusModel):
    rank: Count
    path: Annotated[str, Field(max_length=4096)]
    size_bytes: Count


class ReceiptRef(StatusModel):
    """Where the receipt of the last erasure is in its node's chain."""

    id: Identifier
    hash: Identifier
    time: MicroTime


class KVCacheVolumeStatus(StatusModel):
    observed_generation: Count | None = None
    state: VolumeState = VolumeState.PLANNED
    state_since: MicroTime | None = None
    key_id: Identifier | None = None
    """A hash that names the key; not the key."""
    boot_id: Identifier | None = None
    mount_path: Annotated[str, Field(max_length=4096)] | None = None
    rank_files: list[RankFile] = Field(default_factory=list, max_length=1024)
    bytes_total: Count | None = None
    residual_bytes: Count | None = None
    last_receipt: ReceiptRef | None = None
    reason: Annotated[str, Field(max_length=1024)] | None = None
    """Why it is Failed or Abandoned."""
    conditions: Conditions = Field(default_factory=list)


class KVCacheVolume(Resource):
    """A volume of a tier on a node: the durable record of a place where blocks may be."""

    plural: ClassVar[str] = "kvcachevolumes"
    short_name: ClassVar[str] = "kvcv"
    printer_columns: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
        ("Tier", "string", ".spec.tierRef.name"),
        ("Node", "string", ".spec.nodeName"),
        ("State", "string", ".status.state"),
        ("Backend", "string", ".spec.backend"),
        ("Residual", "integer", ".status.residualBytes"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
    selectable_fields: ClassVar[tuple[str, ...]] = (".spec.nodeName", ".spec.tierRef.name", ".status.state")
    rules = (
        TransitionRule(
            "!has(oldSelf.status) || !has(oldSelf.status.state) || !(oldSelf.status.state in ['Erased', 'Abandoned']) "
            "|| (has(self.status) && has(self.status.state) && self.status.state == oldSelf.status.state)",
            lambda old, new: (
                old.status is None
                or not old.status.state.is_final
                or (new.status is not None and new.status.state == old.status.state)
            ),
            "the state is final",
            "record a new volume",
            "status.state",
        ),
    )

    api_version: Literal["kvtier.dev/v1alpha1"] = API_VERSION
    kind: Literal["KVCacheVolume"] = "KVCacheVolume"
    spec: KVCacheVolumeSpec
    status: KVCacheVolumeStatus | None = None
