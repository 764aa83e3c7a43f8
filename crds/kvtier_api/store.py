"""KVCacheStore: one KV store as discovery found it, declared by a tier or not, or left over on a node.

The spec says where it was found and is its identity; the status says what was found there, and is only ever observed.
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
    Resource,
    SpecModel,
    StatusModel,
    Time,
)
from kvtier_api.rules import Rule, RuledField, TransitionRule, constant
from kvtier_api.volume import Identifier, TierReference

__all__ = [
    "Confidence",
    "Declaration",
    "Finding",
    "KVCacheStore",
    "KVCacheStoreSpec",
    "KVCacheStoreStatus",
    "Severity",
    "VolumeKind",
    "Workload",
]

_NO_CREDENTIALS = RuledField(
    Rule(
        "!self.contains('@')",
        lambda it: "@" not in it,
        "the remote host holds credentials",
        "write host and port only",
    )
)
Text = Annotated[str, Field(max_length=1024)]


class Declaration(StrEnum):
    DECLARED = "Declared"
    UNDECLARED = "Undeclared"
    ORPHANED = "Orphaned"
    """Left over on a node; erased only on request."""


class Confidence(StrEnum):
    DEFINITE = "Definite"
    """Read from configuration or kernel state that decides it."""
    PROBABLE = "Probable"
    OPAQUE = "Opaque"
    """Something may be there that cannot be read."""


class Severity(StrEnum):
    INFO = "Info"
    WARNING = "Warning"
    CRITICAL = "Critical"


class VolumeKind(StrEnum):
    """What lies under the path."""

    HOST_PATH = "HostPath"
    EMPTY_DIR = "EmptyDir"
    MEMORY = "Memory"
    PERSISTENT_VOLUME = "PersistentVolume"
    CSI = "Csi"
    CONTAINER_LAYER = "ContainerLayer"
    HOST_FILE_SYSTEM = "HostFileSystem"
    REMOTE = "Remote"
    UNKNOWN = "Unknown"


class Workload(SpecModel):
    """Who uses the store."""

    kind: Identifier
    """Such as Deployment, Pod or Process."""
    name: Identifier
    container: Identifier | None = None
    pid: Count | None = None


class KVCacheStoreSpec(SpecModel):
    rules: ClassVar[tuple[Rule | TransitionRule, ...]] = (constant("the identity of a store"),)

    node_name: DnsSubdomain | None = None
    """Left out where it was read from a workload that runs on no node yet."""
    workload: Workload | None = None
    backend: Identifier
    """Such as vllm-disk, lmcache-local-disk, redis, s3."""
    connector: Identifier | None = None
    """The engine's class or option that opens it."""
    path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """As the engine was told; not checked, because it is another's."""
    remote_host: Annotated[str, Field(min_length=1, max_length=512), _NO_CREDENTIALS] | None = None


class Finding(StatusModel):
    """One thing that a reader should act on, or know."""

    code: Annotated[str, Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")]
    severity: Severity
    message: Text
    remedy: Text | None = None


class KVCacheStoreStatus(StatusModel):
    observed_generation: Count | None = None
    declaration: Declaration = Declaration.UNDECLARED
    tier_ref: TierReference | None = None
    """The tier that declares it."""
    confidence: Confidence = Confidence.OPAQUE
    read_from: Text | None = None
    """Where it was read: an argument, a ConfigMap, a file, a process."""
    volume_kind: VolumeKind = VolumeKind.UNKNOWN
    size_bytes_per_rank: Count | None = None
    """With the engine's defaults applied."""
    ranks: Count | None = None
    encryption: Text | None = None
    """As measured. Left out: not known."""
    encrypted: Flag | None = None
    salt_honoured: Flag | None = None
    max_age_seconds: Count | None = None
    """Left out: no limit is known."""
    first_seen: Time | None = None
    last_seen: Time | None = None
    findings: list[Finding] = Field(default_factory=list, max_length=64)
    conditions: Conditions = Field(default_factory=list)


class KVCacheStore(Resource):
    """A KV-cache store that discovery found."""

    plural: ClassVar[str] = "kvcachestores"
    short_name: ClassVar[str] = "kvcs"
    printer_columns: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Ready", "string", '.status.conditions[?(@.type=="Mapped")].status'),
        ("Reason", "string", '.status.conditions[?(@.type=="Mapped")].reason'),
        ("Declaration", "string", ".status.declaration"),
        ("Tier", "string", ".status.tierRef.name"),
        ("Node", "string", ".spec.nodeName"),
        ("Backend", "string", ".spec.backend"),
        ("Confidence", "string", ".status.confidence"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
    selectable_fields: ClassVar[tuple[str, ...]] = (".spec.nodeName", ".spec.backend", ".status.declaration")

    api_version: Literal["kvtier.dev/v1alpha1"] = API_VERSION
    kind: Literal["KVCacheStore"] = "KVCacheStore"
    spec: KVCacheStoreSpec
    status: KVCacheStoreStatus | None = None
