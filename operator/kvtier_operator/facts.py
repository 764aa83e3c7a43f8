"""What the controller knows of tiers, volumes, erasures and nodes: small immutable values, made from API objects.

The first thing that happens to an object is that it becomes one of these. An object that cannot be read is a fact too
(`problem`): a volume that nobody understands still counts as a place. What facts mean is left to `conditions`,
`releasing` and `requests`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from kvtier_api.documents import parse_object
from kvtier_api.erasure import ErasedVolume, ErasureState, KVCacheErasure, KVCacheErasureSpec, KVCacheErasureStatus
from kvtier_api.errors import InvalidResource
from kvtier_api.meta import ConditionStatus, ObjectMeta
from kvtier_api.tier import KVCacheTier, KVCacheTierSpec, KVCacheTierStatus
from kvtier_api.volume import BackendName, KVCacheVolume, ReceiptRef, VolumeState
from kvtier_operator.names import ABANDON, FINALIZER, REQUEST_LABEL, SYSTEM_UUID, VOLUME_LABEL

__all__ = [
    "AgentFacts",
    "Body",
    "ErasureFacts",
    "Key",
    "NodeFacts",
    "Seen",
    "TierFacts",
    "VolumeFacts",
    "agent_facts",
    "erasure_facts",
    "identity",
    "key_of",
    "node_facts",
    "tier_facts",
    "volume_facts",
]

Body = Mapping[str, Any]
"""An object as the API server gives it."""
Key = tuple[str, str]
"""(namespace, name)."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RESULTS: Final = TypeAdapter(tuple[ErasedVolume, ...])


@dataclass(frozen=True, slots=True)
class Seen:
    """One condition of a volume, as its node measured it. `status` None is Unknown."""

    status: bool | None
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TierFacts:
    """A tier. `spec` is None, and `problem` says why, where the spec does not hold."""

    meta: ObjectMeta
    spec: KVCacheTierSpec | None
    status: KVCacheTierStatus | None
    problem: str = ""

    @property
    def key(self) -> Key:
        return self.meta.namespace, self.meta.name

    @property
    def deleting(self) -> bool:
        return self.meta.deletion_timestamp is not None

    @property
    def held(self) -> bool:
        return FINALIZER in self.meta.finalizers


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """A volume. `state` is None where the object cannot be read: then nothing is claimed, and it counts as a place."""

    namespace: str
    name: str
    uid: str
    version: str
    tier_name: str
    tier_uid: str | None
    node_name: str
    created_at: datetime
    state: VolumeState | None
    state_since: datetime | None = None
    backend: BackendName | None = None
    boot_id: str | None = None
    system_uuid: str | None = None
    size_bytes: int = 0
    bytes_per_rank: int | None = None
    residual_bytes: int | None = None
    receipt: ReceiptRef | None = None
    reason: str = ""
    deleting: bool = False
    finalizers: tuple[str, ...] = ()
    abandon: str | None = None
    conditions: Mapping[str, Seen] = field(default_factory=dict)
    problem: str = ""

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def tier(self) -> Key:
        return self.namespace, self.tier_name

    @property
    def held(self) -> bool:
        return FINALIZER in self.finalizers

    @property
    def is_final(self) -> bool:
        return self.state is not None and self.state.is_final


@dataclass(frozen=True, slots=True)
class ErasureFacts:
    """An erasure. `volume_id` is set for the record of one volume, and None for a request.

    `status` is kept of a request that is not complete, `results_json` (a list of ErasedVolume) of a record.
    """

    namespace: str
    name: str
    uid: str
    version: str
    created_at: datetime
    generation: int | None
    spec: KVCacheErasureSpec
    state: ErasureState
    end: datetime | None
    volume_id: str | None = None
    request_uid: str | None = None
    status: KVCacheErasureStatus | None = None
    results_json: bytes = b"[]"

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def tier(self) -> Key:
        return self.namespace, self.spec.tier_ref.name

    @property
    def is_record(self) -> bool:
        return self.volume_id is not None

    @property
    def is_complete(self) -> bool:
        return self.state is ErasureState.COMPLETE

    def results(self) -> tuple[ErasedVolume, ...]:
        return _RESULTS.validate_json(self.results_json)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A Node. `ready` is what its Ready condition says; boot id and system uuid are what its kubelet reports."""

    name: str
    version: str
    ready: bool | None
    boot_id: str
    system_uuid: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """A pod of the node agent. kubelet runs its readiness probe, so `ready` is measured on the node."""

    namespace: str
    name: str
    version: str
    node_name: str
    ready: bool

    @property
    def key(self) -> Key:
        return self.namespace, self.name


@lru_cache(maxsize=4096)
def _seen(status: ConditionStatus, reason: str, message: str) -> Seen:
    """One value for all volumes that say the same: most do."""
    return Seen({ConditionStatus.TRUE: True, ConditionStatus.FALSE: False}.get(status), reason, message)


def _shared(text: str | None) -> str | None:
    """One string for all objects that have it: each is decoded to strings of its own."""
    return None if text is None else sys.intern(text)


def key_of(body: Body) -> Key:
    metadata = body["metadata"]
    return str(metadata.get("namespace", "")), str(metadata["name"])


def identity(body: Body) -> tuple[Key, str, str]:
    """Key, uid and resource version."""
    metadata = body["metadata"]
    return key_of(body), str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))


def tier_facts(body: Body) -> TierFacts:
    """Raises InvalidResource only where not even the metadata can be read."""
    try:
        tier = parse_object(body, kind=KVCacheTier)
    except InvalidResource as error:
        return TierFacts(_meta(body), None, _status_alone(body), str(error))
    return TierFacts(tier.metadata.model_copy(update={"managed_fields": None}), tier.spec, tier.status)


def _meta(body: Body) -> ObjectMeta:
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    try:
        return ObjectMeta.model_validate(metadata)
    except ValidationError as error:
        raise InvalidResource(
            "metadata that cannot be read", obj="/".join(key_of(body)), remedy="update the controller"
        ) from error


def _status_alone(body: Body) -> KVCacheTierStatus | None:
    try:
        return KVCacheTierStatus.model_validate(body.get("status") or {}) if body.get("status") else None
    except ValidationError:  # written by another version; it is about to be written anew
        return None


def volume_facts(body: Body) -> VolumeFacts:
    """Never raises for what is in spec or status: an unreadable volume is a place all the same."""
    try:
        volume = parse_object(body, kind=KVCacheVolume)
    except InvalidResource as error:
        return _unreadable_volume(body, str(error))
    meta, spec, status = volume.metadata, volume.spec, volume.status
    ranks = [rank.size_bytes for rank in status.rank_files] if status is not None else []
    return VolumeFacts(
        namespace=sys.intern(meta.namespace),
        name=meta.name,
        uid=meta.uid or "",
        version=meta.resource_version or "0",
        tier_name=sys.intern(spec.tier_ref.name),
        tier_uid=_shared(spec.tier_ref.uid),
        node_name=sys.intern(spec.node_name),
        created_at=meta.creation_timestamp or _EPOCH,
        state=status.state if status is not None else VolumeState.PLANNED,
        state_since=status.state_since if status is not None else None,
        backend=spec.backend,
        boot_id=_shared(status.boot_id) if status is not None else None,
        system_uuid=_shared(meta.annotations.get(SYSTEM_UUID)),
        size_bytes=spec.size_per_rank * spec.ranks,
        bytes_per_rank=max(ranks) if ranks else None,
        residual_bytes=status.residual_bytes if status is not None else None,
        receipt=status.last_receipt if status is not None else None,
        reason=(status.reason or "") if status is not None else "",
        deleting=meta.deletion_timestamp is not None,
        finalizers=tuple(sys.intern(it) for it in meta.finalizers),
        abandon=meta.annotations.get(ABANDON),
        conditions={
            sys.intern(condition.type): _seen(condition.status, condition.reason, condition.message)
            for condition in (status.conditions if status is not None else ())
        },
    )


def _unreadable_volume(body: Body, problem: str) -> VolumeFacts:
    meta = _meta(body)
    spec = body.get("spec")
    spec = spec if isinstance(spec, Mapping) else {}
    reference = spec.get("tierRef")
    reference = reference if isinstance(reference, Mapping) else {}
    return VolumeFacts(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid or "",
        version=meta.resource_version or "0",
        tier_name=str(reference.get("name", "")),
        tier_uid=str(reference["uid"]) if "uid" in reference else None,
        node_name=str(spec.get("nodeName", "")),
        created_at=meta.creation_timestamp or _EPOCH,
        state=None,
        deleting=meta.deletion_timestamp is not None,
        finalizers=tuple(meta.finalizers),
        abandon=meta.annotations.get(ABANDON),
        problem=problem,
    )


def erasure_facts(body: Body) -> ErasureFacts:
    """Raises InvalidResource for an erasure that cannot be read: nothing is done for it then."""
    erasure = parse_object(body, kind=KVCacheErasure)
    meta, status = erasure.metadata, erasure.status
    volume_id = meta.labels.get(VOLUME_LABEL)
    complete = status is not None and status.state is ErasureState.COMPLETE
    results = status.volumes if status is not None and volume_id is not None else []
    return ErasureFacts(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid or "",
        version=meta.resource_version or "0",
        created_at=meta.creation_timestamp or _EPOCH,
        generation=meta.generation,
        spec=erasure.spec,
        state=status.state if status is not None else ErasureState.PENDING,
        end=status.end if status is not None else None,
        volume_id=volume_id,
        request_uid=meta.labels.get(REQUEST_LABEL),
        status=None if complete or volume_id is not None else status,
        results_json=_RESULTS.dump_json(tuple(results), by_alias=True, exclude_none=True) if results else b"[]",
    )


def node_facts(body: Body) -> NodeFacts:
    status: Body = body.get("status") or {}
    info: Body = status.get("nodeInfo") or {}
    metadata: Body = body["metadata"]
    created = metadata.get("creationTimestamp")
    return NodeFacts(
        name=str(metadata["name"]),
        version=str(metadata.get("resourceVersion", "0")),
        ready=_is_ready(status),
        boot_id=str(info.get("bootID", "")),
        system_uuid=str(info.get("systemUUID", "")),
        created_at=datetime.fromisoformat(str(created)) if created else _EPOCH,
    )


def agent_facts(body: Body) -> AgentFacts:
    namespace, name = key_of(body)
    gone = body["metadata"].get("deletionTimestamp") is not None
    return AgentFacts(
        namespace=namespace,
        name=name,
        version=str(body["metadata"].get("resourceVersion", "0")),
        node_name=str((body.get("spec") or {}).get("nodeName", "")),
        ready=not gone and _is_ready(body.get("status") or {}) is True,
    )


def _is_ready(status: Body) -> bool | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "Ready":
            return {"True": True, "False": False}.get(str(condition.get("status")))
    return None
