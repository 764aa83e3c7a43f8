"""One receipt: what was erased, when, how, and what proves it; signed, and chained to the receipt before it.

A receipt claims what was measured and names what it does not cover. How receipts form a chain is left to
`kvtier_node.receipts.chain`; who keeps them, to the ledger.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from kvtier_api.erasure import Trigger
from kvtier_api.errors import InvalidResource, VerificationFailed
from kvtier_api.volume import BackendName
from kvtier_node.identity import Signer, node_id_of, signature_holds
from kvtier_node.receipts.encoding import Hex256, Seconds, Time, canonical_json, hash_of

__all__ = [
    "Receipt",
    "ReceiptDraft",
    "Step",
    "Technique",
    "TierIdentity",
    "plaintext_of",
    "read_receipt",
    "sign_receipt",
]

RECEIPT_FORMAT: Final = "kvtier.dev/receipt/v1"
_MODEL: Final = ConfigDict(extra="forbid", frozen=True)
_Record = TypeVar("_Record", bound=BaseModel)


class Technique(StrEnum):
    """What made the bytes unrecoverable."""

    KEY_DESTROYED = "KeyDestroyed"  # the key was removed from a running kernel, which confirmed it
    KEY_LOST = "KeyLost"  # the kernel that held the key in memory no longer runs (its boot id is another)
    PROCESS_DEATH = "ProcessDeath"  # the keys were in the memory of a process that ended
    OVERWRITE = "Overwrite"  # no key of kvtier's own: the bytes were overwritten
    NOTHING = "Nothing"  # nothing was written, or nothing was erased (`Abandoned`; the steps say which)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Step:
    """One verification step. `ok` is None where it could not be measured; `detail` then says why."""

    name: str
    ok: bool | None
    detail: str = ""


def plaintext_of(steps: Iterable[Step]) -> str:
    """What a read-back found in the clear, whatever later steps made of it; "" where none found any."""
    return next((step.detail for step in steps if step.name == "read-back" and step.ok is False), "")


class TierIdentity(BaseModel):
    model_config = _MODEL

    uid: str
    namespace: str
    name: str


class ReceiptDraft(BaseModel):
    """A receipt before it has a place in the chain. `node_id` and `public_key` may be left to the signer.

    Receipts about the ledger itself have no tier, volume, place or backend.
    """

    model_config = _MODEL

    format: Literal["kvtier.dev/receipt/v1"] = "kvtier.dev/receipt/v1"
    node_id: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    node_name: str
    tier: TierIdentity | None = None
    volume_id: str | None = Field(default=None, pattern=r"^kvv-[0-9a-f]{20}$")
    place: str | None = None
    device_serial: str | None = None
    backend: BackendName | None = None
    technique: Technique
    cipher: str | None = None
    key_id: str | None = None
    trigger: Trigger
    size_bytes: int = Field(ge=0)
    consumer_died_at: Time | None = None
    begin: Time
    key_destroyed_at: Time | None = None
    end: Time
    deadline_s: Seconds | None = None
    deadline_met: bool | None = None
    duration_s: Seconds | None = Field(default=None, description="measured on the monotonic clock; None: not measured")
    steps: list[Step] = Field(default_factory=list)
    not_covered: list[str] = Field(default_factory=list)
    versions: dict[str, str] = Field(default_factory=dict)
    public_key: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class Receipt(ReceiptDraft):
    """A signed link of the chain. `prev` is the SHA-256 of the previous receipt's canonical bytes."""

    id: str = Field(pattern=r"^kvr-[0-9a-f]{20}$")
    seq: int = Field(ge=1)
    prev: Hex256
    node_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    def canonical(self) -> bytes:
        return canonical_json(self.model_dump(mode="json"))

    def hash(self) -> str:
        return hash_of(self.canonical())

    def signed_bytes(self) -> bytes:
        return canonical_json(self.model_dump(mode="json", exclude={"signature"}))

    def is_authentic(self) -> bool:
        """The signature holds under the receipt's own key, and the node id is that key's."""
        public_key = bytes.fromhex(self.public_key)
        return node_id_of(public_key) == self.node_id and signature_holds(
            public_key, bytes.fromhex(self.signature), self.signed_bytes()
        )


def sign_receipt(draft: ReceiptDraft, *, seq: int, prev: str, signer: Signer) -> Receipt:
    """Give `draft` its place in the chain and sign it. Raises InvalidResource if it names another node."""
    public_key = signer.public_key.hex()
    if draft.node_id not in ("", signer.node_id) or draft.public_key not in ("", public_key):
        raise InvalidResource("the draft names another node than the signer", obj=f"node_id={draft.node_id}")
    content: dict[str, Any] = draft.model_dump(mode="json") | {
        "id": f"kvr-{secrets.token_hex(10)}",
        "seq": seq,
        "prev": prev,
        "node_id": signer.node_id,
        "public_key": public_key,
    }
    return Receipt.model_validate(content | {"signature": signer.sign(canonical_json(content)).hex()})


def read_receipt(line: bytes) -> Receipt:
    """The receipt in `line` (canonical bytes, no newline). Raises VerificationFailed unless it is authentic."""
    receipt = parse_canonical(Receipt, line)
    if not receipt.is_authentic():
        raise VerificationFailed("the signature does not hold", obj=f"receipt {receipt.id}")
    return receipt


def parse_canonical(model: type[_Record], line: bytes) -> _Record:
    """`line` as `model`, if its bytes are the canonical ones of what it says. Raises VerificationFailed."""
    try:
        record = model.model_validate_json(line)
        same = canonical_json(record.model_dump(mode="json")) == line
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise VerificationFailed(f"not a record of this format: {where}: {first['msg']}") from error
    except ValueError as error:
        raise VerificationFailed(f"not a record of this format: {error}") from error
    if not same:
        raise VerificationFailed("the bytes are not in canonical form")
    return record
