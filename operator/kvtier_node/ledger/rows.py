"""What the ledger holds, as values: volumes, their arrows, requests to erase, events.

The life of a volume is the table ARROWS. `Erased` and `Abandoned` have no way out, and are reached with a receipt only
(`Ledger.finish`); every other state leads to `Erasing`, so that recovery can finish what it finds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from kvtier_api.errors import LedgerError
from kvtier_api.volume import BackendName, VolumeState

__all__ = [
    "ABANDON",
    "ARROWS",
    "TERMINAL",
    "ArrowRefused",
    "EraseRequest",
    "Event",
    "Head",
    "LedgerDamaged",
    "LedgerMissing",
    "Transition",
    "VolumeRow",
]

S = VolumeState
ABANDON: Final = "Abandon"
"""Scope of a request to end one volume without an erasure, on an administrator's word."""
TERMINAL: Final = frozenset({S.ERASED, S.ABANDONED})
ARROWS: Final[dict[VolumeState, frozenset[VolumeState]]] = {
    S.PLANNED: frozenset({S.PROVISIONING, S.FAILED, S.ERASING, S.ABANDONED}),
    S.PROVISIONING: frozenset({S.READY, S.FAILED, S.ERASING, S.ABANDONED}),
    S.READY: frozenset({S.IN_USE, S.DYING, S.FAILED, S.ERASING, S.ABANDONED}),
    S.IN_USE: frozenset({S.DYING, S.FAILED, S.ERASING, S.ABANDONED}),
    S.DYING: frozenset({S.ERASING, S.FAILED, S.ABANDONED}),
    # Erasing -> Erasing is an attempt begun again, by recovery or after an error; each is on record.
    S.ERASING: frozenset({S.ERASING, S.ERASED, S.FAILED, S.ABANDONED}),
    S.FAILED: frozenset({S.ERASING, S.ABANDONED}),
    S.ERASED: frozenset(),
    S.ABANDONED: frozenset(),
}


class LedgerDamaged(LedgerError):
    """The file is there and is not a sound ledger, or has lost commits. Recovery may rebuild (`create_fresh`)."""


class LedgerMissing(LedgerError):
    """There is no ledger file where one must be. Recovery may rebuild (`create_fresh`)."""


class ArrowRefused(LedgerError):
    """The volume's state has no such arrow. Nothing was changed."""


@dataclass(frozen=True)
class VolumeRow:
    """One volume. `place` is the absolute path of its directory; times are UTC, set by the ledger.

    `sequence` is the number of its first arrow: of two volumes, the one that was recorded first has the smaller, whatever
    the clock said. The ledger gives it with each row that it reads; it is no column of the volume's own.
    """

    volume_id: str
    tier_uid: str
    tier_namespace: str
    tier_name: str
    node: str
    boot_id: str
    backend: BackendName
    cipher: str
    place: str
    size_bytes: int
    ranks: int
    bytes_per_rank: int
    device: str | None = None
    key_id: str | None = None
    consumer: dict[str, Any] | None = None
    state: VolumeState = VolumeState.PLANNED
    reason: str = ""
    spec: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    created_at: str = ""
    updated_at: str = ""
    state_since: str = ""
    sequence: int = 0

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL

    @property
    def tier_key(self) -> str:
        """`<namespace>/<name>`, as `manifests.key_of` says of a tier."""
        return f"{self.tier_namespace}/{self.tier_name}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Transition:
    """An arrow on record. `before` is None for a volume's first record; `adopted`: found by a rebuild, not planned."""

    seq: int
    volume_id: str
    before: VolumeState | None
    after: VolumeState
    reason: str
    at: str
    adopted: bool = False


@dataclass(frozen=True)
class Head:
    """The end of the receipts' chain: the number of the last one and its hash (64 zeros for none)."""

    count: int
    hash: str


@dataclass(frozen=True)
class EraseRequest:
    """A wish of `kvtier erase`, or of a manifest that was removed (`trigger` Deletion).

    `scope` is All, Tenant or OlderThan, with `argument` (a tenant's hash, or seconds); or ABANDON with a volume's id.
    `after` is the number of the ledger's last arrow when it was made: a volume with a greater `sequence` was made after it.
    None: it was recorded by a version that noted none.
    """

    id: str
    tier: str
    scope: str
    argument: str | None
    reason: str
    state: str
    created_at: str
    done_at: str | None
    result: str | None
    trigger: str = "Request"
    after: int | None = None


@dataclass(frozen=True)
class Event:
    seq: int
    at: str
    kind: str
    reason: str
    object: str
    message: str
