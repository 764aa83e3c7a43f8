"""KVCacheTier: what a team declares. One slot file per rank, on an encrypted volume, with a limit in time.

The node agent makes volumes of it, the engine takes slot size, salts and maximum age from it, the controller
aggregates what agents measured into `status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kvtier_api.clean_path import CleanPath
from kvtier_api.erasure import Trigger
from kvtier_api.meta import (
    API_VERSION,
    Conditions,
    Count,
    DnsSubdomain,
    Flag,
    LabelMap,
    LabelSelector,
    MicroTime,
    Resource,
    SpecModel,
    StatusModel,
    Time,
)
from kvtier_api.quantity import ByteSize, Seconds, SlotSize
from kvtier_api.rules import Immutable, Rule, RuledField, TransitionRule

__all__ = [
    "Cipher",
    "DeletionPolicy",
    "Encryption",
    "EncryptionBackend",
    "Governance",
    "KVCacheTier",
    "KVCacheTierSpec",
    "KVCacheTierStatus",
    "LastErasure",
    "ModelIdentity",
    "Retention",
    "Salt",
    "SaltHash",
    "SaltPolicy",
    "Scrub",
    "ScrubVerify",
    "SecondaryStore",
    "SecondaryType",
    "SecretKeyRef",
    "VolumeCounts",
]

MAX_RANKS = 1024
MAX_BYTES_PER_RANK = 1024**5
"""1Pi: with 1024 ranks the total still fits an int64."""

Line = Annotated[str, Field(min_length=1, max_length=256)]


class EncryptionBackend(StrEnum):
    """How the volume is encrypted. Auto: the first of DmCrypt, Fscrypt, HostAttested that works; never SealOnly."""

    AUTO = "Auto"
    DM_CRYPT = "DmCrypt"
    FSCRYPT = "Fscrypt"
    HOST_ATTESTED = "HostAttested"
    SEAL_ONLY = "SealOnly"


class Cipher(StrEnum):
    AES_XTS_PLAIN64 = "aes-xts-plain64"


class Encryption(SpecModel):
    """How bytes become ciphertext before they reach the disk."""

    rules = (
        Rule(
            "self.backend != 'SealOnly' || self.sealSlots",
            lambda it: it.backend != EncryptionBackend.SEAL_ONLY or it.seal_slots,
            "sealSlots must be true with backend SealOnly, which has no other encryption",
            "set sealSlots: true or choose another backend",
            "sealSlots",
        ),
    )

    backend: Annotated[EncryptionBackend, Immutable("the encryption backend")] = EncryptionBackend.AUTO
    cipher: Cipher = Cipher.AES_XTS_PLAIN64
    """Cipher of the volume, with a 512-bit key."""
    seal_slots: Flag = True
    """Each slot is sealed with AES-256-GCM by kvtier's own engine store."""


class SaltPolicy(StrEnum):
    """Required: no block of a request without a trusted salt. PerTenant: as Required, and keys of each tenant's own.
    Shared: tenants share cached blocks."""

    REQUIRED = "Required"
    PER_TENANT = "PerTenant"
    SHARED = "Shared"


class SaltHash(StrEnum):
    """How block keys are hashed (vLLM's `prefix_caching_hash_algo`)."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"


class Salt(SpecModel):
    """Which requests' blocks may reach the tier, and who may share them."""

    policy: SaltPolicy = SaltPolicy.REQUIRED
    hash: SaltHash = SaltHash.SHA256


class Retention(SpecModel):
    """How long blocks live."""

    max_age: Seconds = Seconds("24h")
    """No block older than this can be read."""


class ScrubVerify(StrEnum):
    """Sample: a second reader reads a sample back after the key is gone. None: kernel state alone is verified."""

    SAMPLE = "Sample"
    NONE = "None"


class Scrub(SpecModel):
    """How erasing is done after the consumer ended."""

    rules = (
        Rule(
            "duration(self.deadline) <= duration('1h')",
            lambda it: it.deadline <= 3600,
            "the deadline is more than an hour",
            "write 1h or less",
            "deadline",
        ),
    )

    deadline: Seconds = Seconds("30s")
    """From the end of the consumer to bytes that nobody can recover, while the node runs."""
    discard: Flag = True
    """Discard or punch the blocks after the key is destroyed."""
    verify: ScrubVerify = ScrubVerify.SAMPLE


class ModelIdentity(SpecModel):
    """The model whose KV blocks are in the tier."""

    name: Line
    revision: Line | None = None
    weights_digest: Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")] | None = None


class Governance(SpecModel):
    """Whose data it is and why it is kept: the row of the data map."""

    owner: Line
    """The team or person who answers for the store."""
    purpose: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    data_categories: list[Line] | None = Field(default=None, max_length=64)
    data_subjects: list[Line] | None = Field(default=None, max_length=64)
    legal_basis: Line | None = None
    contact: Line | None = None


class SecretKeyRef(SpecModel):
    """A key of a Secret in the tier's namespace."""

    name: DnsSubdomain
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]


class SecondaryType(StrEnum):
    REDIS = "Redis"
    S3 = "S3"


class SecondaryStore(SpecModel):
    """A remote store behind the tier."""

    rules = (
        Rule(
            "self.type == 'Redis' ? self.endpoint.matches('^rediss?://[^/]') : self.endpoint.matches('^https?://[^/]')",
            lambda it: (
                it.endpoint.partition("://")[0]
                in (("redis", "rediss") if it.type == SecondaryType.REDIS else ("http", "https"))
                and it.endpoint.partition("://")[2][:1] not in ("", "/")
            ),
            "the endpoint is not a URL of this type",
            "write redis:// or rediss:// for Redis, http:// or https:// for S3, and a host",
            "endpoint",
        ),
    )

    type: SecondaryType
    endpoint: Annotated[
        str,
        Field(min_length=1, max_length=512, pattern=r"^[!-~]+$"),
        RuledField(
            Rule(
                "!self.matches('[@?#]')",
                lambda it: not set(it) & set("@?#"),
                "the endpoint holds credentials, a query or a fragment",
                "put credentials in a Secret and name it in credentialsSecretRef",
            )
        ),
    ]
    """URL without credentials."""
    credentials_secret_ref: SecretKeyRef | None = None
    sealed: Flag = True
    """Blocks are sealed before they leave the node."""
    max_age: Seconds | None = None
    """At most retention.maxAge, which holds where this is left out."""


class DeletionPolicy(StrEnum):
    """Erase: deleting the tier erases every volume of it, those in use included, before the object goes."""

    ERASE = "Erase"


class KVCacheTierSpec(SpecModel):
    rules = (
        Rule(
            "quantity(string(self.sizePerRank)).compareTo(quantity('1Pi')) <= 0",
            lambda it: it.size_per_rank <= MAX_BYTES_PER_RANK,
            "sizePerRank is more than 1Pi",
            "write 1Pi or less",
            "sizePerRank",
        ),
        Rule(
            "quantity(string(self.slotSize)).compareTo(quantity(string(self.sizePerRank))) <= 0",
            lambda it: it.slot_size <= it.size_per_rank,
            "slotSize is more than sizePerRank, so not one slot fits",
            "raise sizePerRank or lower slotSize",
            "slotSize",
        ),
        Rule(
            "self.salt.policy != 'PerTenant' || self.encryption.sealSlots",
            lambda it: it.salt.policy != SaltPolicy.PER_TENANT or it.encryption.seal_slots,
            "salt.policy PerTenant needs sealed slots: a tenant is erased by dropping its slot keys",
            "set encryption.sealSlots: true or choose another salt.policy",
            "encryption.sealSlots",
        ),
        Rule(
            "!has(self.device) || self.encryption.backend in ['Auto', 'DmCrypt']",
            lambda it: (
                it.device is None or it.encryption.backend in (EncryptionBackend.AUTO, EncryptionBackend.DM_CRYPT)
            ),
            "device needs encryption.backend DmCrypt or Auto",
            "leave device out or change encryption.backend",
            "device",
        ),
        Rule(
            "!has(self.secondary) || self.secondary.all(s, !has(s.maxAge) || "
            "duration(s.maxAge) <= duration(self.retention.maxAge))",
            lambda it: all(
                second.max_age is None or second.max_age <= it.retention.max_age for second in it.secondary or ()
            ),
            "a secondary store keeps blocks longer than retention.maxAge",
            "lower its maxAge or leave it out",
            "secondary",
        ),
        TransitionRule(
            "has(self.device) == has(oldSelf.device) && (!has(self.device) || self.device == oldSelf.device)",
            lambda old, new: old.device == new.device,
            "the device cannot be changed",
            "create another object instead",
            "device",
        ),
    )

    size_per_rank: ByteSize
    """Bytes of the slot file of one rank."""
    ranks: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
    """Slot files per volume, one for each rank of the engine."""
    path: Annotated[CleanPath, Immutable("the path")]
    """Directory on the node, under a root that the administrator allows. Volumes are made below it."""
    device: CleanPath | None = None
    """A block device or logical volume to use in place of a preallocated image. What is on it is lost."""
    slot_size: SlotSize = SlotSize("1Mi")
    slot_prefix: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")] = "slot"
    """Slot files are called PREFIX.rank_N."""
    encryption: Encryption = Field(default_factory=Encryption)
    salt: Salt = Field(default_factory=Salt)
    retention: Retention = Field(default_factory=Retention)
    scrub: Scrub = Field(default_factory=Scrub)
    node_selector: LabelMap | None = None
    """Nodes that may hold volumes of the tier. Left out: every node."""
    workload_selector: LabelSelector | None = None
    """Pods of the namespace that may use the tier. Left out: every pod of the namespace."""
    model: ModelIdentity | None = None
    governance: Governance | None = None
    secondary: list[SecondaryStore] | None = Field(default=None, max_length=8)
    deletion_policy: DeletionPolicy = DeletionPolicy.ERASE

    @property
    def total_bytes(self) -> int:
        """Bytes of the slot files of one volume."""
        return self.size_per_rank * self.ranks

    @property
    def slots_per_rank(self) -> int:
        return self.size_per_rank // self.slot_size

    def selects_node(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in (self.node_selector or {}).items())

    def selects_workload(self, labels: Mapping[str, str]) -> bool:
        return self.workload_selector is None or self.workload_selector.selects(labels)


class VolumeCounts(StatusModel):
    """Volumes of the tier by state; a place that is gone from the selector, or whose node is gone, still counts."""

    total: Count = 0
    ready: Count = 0
    in_use: Count = 0
    erasing: Count = 0
    failed: Count = 0
    abandoned: Count = 0


class LastErasure(StatusModel):
    time: MicroTime
    trigger: Trigger
    node_name: Line | None = None
    volume_id: Line | None = None
    receipt_id: Line | None = None


class KVCacheTierStatus(StatusModel):
    observed_generation: Count | None = None
    nodes: Count | None = None
    """Nodes that hold a volume of the tier."""
    volumes: VolumeCounts | None = None
    bytes_per_rank: Count | None = None
    bytes_total: Count | None = None
    """Bytes of all slot files of all volumes that are not erased."""
    residual_bytes: Count | None = None
    """Bytes whose consumer ended and whose erasure is not proven yet."""
    oldest_block_time: Time | None = None
    """A bound: no readable block is older than this."""
    last_erasure: LastErasure | None = None
    backend: EncryptionBackend | None = None
    """What Auto became. Left out where nodes differ."""
    conditions: Conditions = Field(default_factory=list)


class KVCacheTier(Resource):
    """A KV-cache tier: declared, encrypted, salted, limited in time, scrubbed and on the map."""

    plural: ClassVar[str] = "kvcachetiers"
    short_name: ClassVar[str] = "kvct"
    printer_columns: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("Ready", "string", '.status.conditions[?(@.type=="Ready")].status'),
        ("Reason", "string", '.status.conditions[?(@.type=="Ready")].reason'),
        ("Size", "string", ".spec.sizePerRank"),
        ("Ranks", "integer", ".spec.ranks"),
        ("Volumes", "integer", ".status.volumes.total"),
        ("Residual", "integer", ".status.residualBytes"),
        ("MaxAge", "string", ".spec.retention.maxAge"),
        ("Owner", "string", ".spec.governance.owner"),
        ("Age", "date", ".metadata.creationTimestamp"),
    )
    selectable_fields: ClassVar[tuple[str, ...]] = (".spec.encryption.backend", ".spec.salt.policy")
    rules = (
        Rule(
            "size(self.metadata.name) <= 63 && !self.metadata.name.contains('.')",
            lambda it: len(it.metadata.name) <= 63 and "." not in it.metadata.name,
            "the tier's name is no label: it is used as one on pods",
            "use at most 63 of a-z, 0-9 and '-'",
            "metadata.name",
        ),
    )

    api_version: Literal["kvtier.dev/v1alpha1"] = API_VERSION
    kind: Literal["KVCacheTier"] = "KVCacheTier"
    spec: KVCacheTierSpec
    status: KVCacheTierStatus | None = None
