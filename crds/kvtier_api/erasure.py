"""KVCacheErasure: the request to erase, and the record that it was done.

Agents make them too, for crashes, restarts, retention and deletion.
The receipts themselves, with their signatures, are the node agent's; here are their ids and hashes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvtier_api.meta import (
    API_VERSION,
    Conditions,
    Count,
    DnsSubdomain,
    Flag,
    MicroTime,
    Resource,
    SpecModel,
    StatusModel,
)
from kvtier_api.quantity import Seconds
from kvtier_api.rules import Rule, TransitionRule, constant
from kvtier_api.volume import BackendName, Identifier, TierReference, VolumeId

__all__ = [
    "ErasedVolume",
    "ErasureScope",
    "ErasureState",
    "KVCacheErasure",
    "KVCacheErasureSpec",
    "KVCacheErasureStatus",
    "Trigger",
]


class Trigger(StrEnum):
    """Why an erasure happened."""

    EXIT = "Exit"
    CRASH = "Crash"
    RESTART = "Restart"
    POWER_LOSS = "PowerLoss"
    RETENTION = "Retention"
    REQUEST = "Request"
    DELETION = "Deletion"


class ErasureScope(StrEnum):
    ALL = "All"
    TENANT = "Tenant"
    OLDER_THAN = "OlderThan"


class ErasureState(StrEnum):
    PENDING = "Pending"
    ERASING = "Erasing"
    COMPLETE = "Complete"
    FAILED = "Failed"


class KVCacheErasureSpec(SpecModel):
    rules = (
        Rule(
            "(self.scope == 'Tenant') == has(self.tenant)",
            lambda it: (it.scope == ErasureScope.TENANT) == (it.tenant is not None),
            "tenant goes with scope Tenant, and only with it",
            "give both or neither",
            "tenant",
        ),
        Rule(
            "(self.scope == 'OlderThan') == has(self.olderThan)",
            lambda it: (it.scope == ErasureScope.OLDER_THAN) == (it.older_than is not None),
            "olderThan goes with scope OlderThan, and only with it",
            "give both or neither",
            "olderThan",
        ),
        constant("the request of an erasure"),
    )

    tier_ref: TierReference
    scope: ErasureScope = ErasureScope.ALL
    tenant: Identifier | None = None
    """The tenant's public name. Never its salt."""
    older_than: Seconds | None = None
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """For people: who asked, and why."""
    trigger: Trigger = Trigger.REQUEST


class ErasedVolume(StatusModel):
    """What one node did to one volume."""

    volume_id: VolumeId
    node_name: DnsSubdomain
    backend: BackendName | None = None
    technique: Identifier
    """Such as "destroy key, verify, discard", as the receipt says it."""
    begin: MicroTime
    end: MicroTime | None = None
    verified: Flag = False
    deadline_met: Flag | None = None
    """Whether it was done within scrub.deadline. Left out where the time of the consumer's end is not known."""
    bytes: Count | None = None
    not_covered: list[Annotated[str, Field(max_length=1024)]] | None = Field(default=None, max_length=16)
    """What the erasure does not reach."""
    receipt_id: Identifier | None = None
    receipt_hash: Identifier | None = None


class KVCacheErasureStatus(StatusModel):
    observed_generation: Count | None = None
    state: ErasureState = ErasureState.PENDING
    begin: MicroTime | None = None
    end: MicroTime | None = None
    volumes: list[ErasedVolume] = Field(default_factory=list, max_length=1024)
    residual_bytes: Count | None = None
    conditions: Conditions = Field(default_factory=list)


def _is_complete(erasure: KVCacheErasure) -> bool:
    return erasure.status is not None and erasure.status.state == ErasureState.COMPLETE


class KVCacheErasure(Resource):
    """A request to erase blocks of a tier, and the record that it was done."""

    plural: ClassVar[str] = "kvcacheerasures"
    short_name: ClassVar[str] = "kvce"
    printer_columns: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Ready", "string", '.status.conditions[?(@.type=="Complete")].status'),
        ("Reason", "string", '.status.conditions[?(@.type=="Complete")].reason'),
        ("Tier", "string", ".spec.tierRef.name"),
        ("Scope", "string", ".spec.scope"),
        ("Trigger", "string", ".spec.trigger"),
        ("State", "string", ".status.state"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
    selectable_fields: ClassVar[tuple[str, ...]] = (".spec.tierRef.name", ".spec.trigger", ".status.state")
    rules = (
        TransitionRule(
            "!has(oldSelf.status) || !has(oldSelf.status.state) || oldSelf.status.state != 'Complete' "
            "|| (has(self.status) && self.status == oldSelf.status)",
            lambda old, new: not _is_complete(old) or old.status == new.status,
            "a complete erasure is a record and cannot be changed",
            "request another one",
            "status",
        ),
    )

    api_version: Literal["kvtier.dev/v1alpha1"] = API_VERSION
    kind: Literal["KVCacheErasure"] = "KVCacheErasure"
    spec: KVCacheErasureSpec
    status: KVCacheErasureStatus | None = None
