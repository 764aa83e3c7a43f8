"""The place record: `place.json`, the first thing written in a volume's directory, signed by the node.

It says that kvtier made the place, for which tier and with which shape, so that a lost ledger can be rebuilt from what
is on the node. One that is forged or altered never verifies, and what lies beside it is then foreign data.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier_api.errors import InvalidResource, VerificationFailed
from kvtier_api.volume import BackendName
from kvtier_node.identity import Signer, node_id_of, signature_holds
from kvtier_node.receipts.encoding import Time, canonical_json
from kvtier_node.receipts.receipt import parse_canonical

__all__ = ["PLACE_NAME", "PlaceRecord", "read_place", "sign_place"]

PLACE_NAME: Final = "place.json"
_LIMIT_BYTES: Final = 64 * 1024
_REMEDY: Final = "this node did not make this place: it is treated as foreign data"


class PlaceRecord(BaseModel):
    """What a place is. Sizes in bytes; `uid` and `gid` are the consumer's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["kvtier.dev/place/v1"] = "kvtier.dev/place/v1"
    volume_id: str = Field(pattern=r"^kvv-[0-9a-f]{20}$")
    place: str = Field(description="absolute path of the directory that holds this record: a copy elsewhere shows")
    tier_uid: str
    tier_namespace: str
    tier_name: str
    node_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    boot_id: str
    backend: BackendName
    size_bytes: int = Field(ge=0)
    ranks: int = Field(ge=1)
    bytes_per_rank: int = Field(ge=0)
    slot_prefix: str
    slot_size_bytes: int = Field(ge=1)
    uid: int = Field(ge=0)
    gid: int = Field(ge=0)
    created_at: Time
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    spec: dict[str, Any]


class _SignedPlace(PlaceRecord):
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")


def sign_place(record: PlaceRecord, identity: Signer) -> bytes:
    """The bytes of `place.json`. Raises InvalidResource if the record names another node or is over 64 KiB."""
    if record.node_id != identity.node_id:
        raise InvalidResource("the record names another node than the signer", obj=f"node_id={record.node_id}")
    content = record.model_dump(mode="json")
    line = canonical_json(content | {"signature": identity.sign(canonical_json(content)).hex()}) + b"\n"
    if len(line) > _LIMIT_BYTES:
        raise InvalidResource(f"the place record has {len(line)} bytes, over {_LIMIT_BYTES}", obj=record.volume_id)
    return line


def read_place(content: bytes, public_key: bytes) -> PlaceRecord:
    """The record in `content`, if the node with the raw `public_key` signed exactly these bytes.

    Raises VerificationFailed. The caller compares `place` with where it found the file.
    """
    if len(content) > _LIMIT_BYTES or not content.endswith(b"\n"):
        raise VerificationFailed("the place record is truncated or too long", obj=PLACE_NAME, remedy=_REMEDY)
    try:
        signed = parse_canonical(_SignedPlace, content[:-1])
    except VerificationFailed as error:
        raise VerificationFailed(error.cause, obj=PLACE_NAME, remedy=_REMEDY) from error
    fields = signed.model_dump(mode="json", exclude={"signature"})
    if signed.node_id != node_id_of(public_key):
        raise VerificationFailed(f"signed for node {signed.node_id}", obj=PLACE_NAME, remedy=_REMEDY)
    if not signature_holds(public_key, bytes.fromhex(signed.signature), canonical_json(fields)):
        raise VerificationFailed("the signature does not hold", obj=PLACE_NAME, remedy=_REMEDY)
    return PlaceRecord.model_validate(fields)
