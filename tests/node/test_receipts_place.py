"""A place record is this node's own or it is nothing."""

from __future__ import annotations

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_api.errors import InvalidResource, VerificationFailed
from kvtier_api.volume import BackendName
from kvtier_node.identity import NodeIdentity
from kvtier_node.receipts import PlaceRecord, canonical_json, read_place, sign_place

NODE = NodeIdentity(Ed25519PrivateKey.from_private_bytes(b"\x01" * 32))
STRANGER = NodeIdentity(Ed25519PrivateKey.from_private_bytes(b"\x02" * 32))
RECORD = PlaceRecord(
    volume_id="kvv-" + "0" * 20,
    place="/srv/kv/kvv-" + "0" * 20,
    tier_uid="5d1c",
    tier_namespace="default",
    tier_name="chat",
    node_id=NODE.node_id,
    boot_id="boot",
    backend=BackendName.FSCRYPT,
    size_bytes=1 << 30,
    ranks=2,
    bytes_per_rank=1 << 29,
    slot_prefix="slot",
    slot_size_bytes=1 << 20,
    uid=1000,
    gid=1000,
    created_at="2026-01-02T03:04:05.000000Z",
    nonce="ab" * 16,
    spec={"path": "/srv/kv", "maxAge": 3600.5, "many": 10**30, "ä": None},
)
SIGNED = sign_place(RECORD, NODE)


def test_what_the_node_signed_is_read_back() -> None:
    assert read_place(SIGNED, NODE.public_key) == RECORD


def test_anothers_record_is_not_ours() -> None:
    with pytest.raises(VerificationFailed, match="signed for node"):
        read_place(SIGNED, STRANGER.public_key)
    with pytest.raises(InvalidResource, match="another node"):
        sign_place(RECORD, STRANGER)


def test_a_forged_record_under_this_nodes_id_does_not_verify() -> None:
    content = RECORD.model_dump(mode="json")
    forged = canonical_json(content | {"signature": STRANGER.sign(canonical_json(content)).hex()}) + b"\n"
    with pytest.raises(VerificationFailed, match="signature does not hold"):
        read_place(forged, NODE.public_key)


@pytest.mark.parametrize("field", sorted(set(PlaceRecord.model_fields) - {"format", "node_id"}))
def test_no_field_can_be_changed(field: str) -> None:
    content = json.loads(SIGNED)
    old = content[field]
    if field == "backend":
        content[field] = "SealOnly"
    elif isinstance(old, int):
        content[field] = old + 1
    elif isinstance(old, dict):
        content[field] = {**old, "maxAge": 1.0}
    else:
        content[field] = old[:-1] + ("1" if old[-1] != "1" else "2") if old[-1] != "Z" else old.replace("05.", "06.")
    assert content[field] != old
    with pytest.raises(VerificationFailed, match="signature does not hold"):
        read_place(canonical_json(content) + b"\n", NODE.public_key)


@settings(max_examples=300)
@given(position=st.integers(0, len(SIGNED) - 1), value=st.integers(1, 255))
def test_no_byte_can_be_changed(position: int, value: int) -> None:
    changed = bytearray(SIGNED)
    changed[position] ^= value
    with pytest.raises(VerificationFailed):
        read_place(bytes(changed), NODE.public_key)


@settings(max_examples=100)
@given(end=st.integers(0, len(SIGNED) - 1))
def test_no_byte_can_be_missing(end: int) -> None:
    with pytest.raises(VerificationFailed):
        read_place(SIGNED[:end], NODE.public_key)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"{}\n", b"[]\n", b"null\n", b"\xff\n", b"[" * 40_000 + b"\n", b"x" * 70_000 + b"\n", SIGNED + b"\n"],
    ids=lambda content: repr(content[:8]),
)
def test_what_is_no_record_is_refused(content: bytes) -> None:
    with pytest.raises(VerificationFailed):
        read_place(content, NODE.public_key)


def test_a_record_that_could_not_be_read_back_is_not_signed() -> None:
    with pytest.raises(InvalidResource, match="over 65536"):
        sign_place(RECORD.model_copy(update={"spec": {"x": "y" * 70_000}}), NODE)
