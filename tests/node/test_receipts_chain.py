"""A chain of receipts verifies offline, and nothing can be taken from it, put in, changed or reordered unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvtier_api.errors import InvalidResource, VerificationFailed
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger
from kvtier_node.receipts import (
    Receipt,
    ReceiptDraft,
    canonical_json,
    export_chain,
    read_receipt,
    seconds,
    sign_receipt,
    verify_chain,
    verify_export,
)
from ledger_samples import draft, live

VECTORS = Path(__file__).parent.parent / "vectors" / "receipts"
EXPECTED: dict[str, Any] = json.loads((VECTORS / "expected.json").read_text())
KEY = bytes.fromhex(EXPECTED["public_key"])
SOUND = (VECTORS / "sound.jsonl").read_bytes()
NODE = NodeIdentity(Ed25519PrivateKey.from_private_bytes(b"\x01" * 32))


def test_a_sound_chain_verifies_with_and_without_a_pinned_key() -> None:
    pinned = verify_export(SOUND, public_key=KEY, expect_head=EXPECTED["head"])
    assert (pinned.ok, pinned.count, pinned.head, pinned.key_pinned) == (True, 4, EXPECTED["head"], True)
    first_use = verify_export(SOUND)
    assert (first_use.ok, first_use.key_pinned) == (True, False)
    assert first_use.node_id == NODE.node_id
    assert verify_chain(SOUND.decode().splitlines()).ok, "lines without newlines, as text"
    assert verify_chain(SOUND.splitlines(keepends=True)[:4], require_head=False).ok, "the node's mirror has no head"


@pytest.mark.parametrize("name", EXPECTED["problems"])
def test_each_fault_is_found_and_named(name: str) -> None:
    content = (VECTORS / f"{name}.jsonl").read_bytes()
    found = verify_export(content, public_key=KEY)
    assert not found.ok
    assert any(EXPECTED["problems"][name] in problem for problem in found.problems), found.problems


def test_every_vector_has_an_expectation() -> None:
    assert {path.stem for path in VECTORS.glob("*.jsonl")} == {"sound", *EXPECTED["problems"]}


def test_without_a_pinned_key_only_a_whole_foreign_chain_passes() -> None:
    passing = {name for name in EXPECTED["problems"] if verify_export((VECTORS / f"{name}.jsonl").read_bytes()).ok}
    assert passing == {"anothers-chain"}


def test_an_older_export_passes_unless_the_known_head_is_asked_for(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        live(ledger, identity)
        older = list(export_chain(ledger, identity))
        live(ledger, identity)
        head = ledger.head().hash
        newer = list(export_chain(ledger, identity))
    assert verify_chain(newer, public_key=identity.public_key, expect_head=head).ok
    assert verify_chain(older, public_key=identity.public_key).ok
    assert "not the expected" in verify_chain(older, public_key=identity.public_key, expect_head=head).problems[-1]


def test_an_empty_chain_has_a_head_and_verifies(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        found = verify_chain(export_chain(ledger, identity), public_key=identity.public_key)
    assert (found.ok, found.count, found.head) == (True, 0, "0" * 64)
    assert not verify_chain([]).ok
    assert not verify_export(b"").ok
    assert not verify_export(b"\n").ok


@settings(max_examples=400)
@given(position=st.integers(0, len(SOUND) - 1), value=st.integers(1, 255))
def test_any_changed_byte_is_found(position: int, value: int) -> None:
    changed = bytearray(SOUND)
    changed[position] ^= value
    assert not verify_export(bytes(changed), public_key=KEY).ok
    assert not verify_export(bytes(changed)).ok


@settings(max_examples=300)
@given(position=st.integers(0, len(SOUND) - 1), length=st.integers(1, 4000))
def test_any_removed_piece_is_found(position: int, length: int) -> None:
    assert not verify_export(SOUND[:position] + SOUND[position + length :], public_key=KEY).ok


@settings(max_examples=200)
@given(position=st.integers(0, len(SOUND)), piece=st.binary(min_size=1, max_size=8))
def test_any_inserted_piece_is_found(position: int, piece: bytes) -> None:
    assert not verify_export(SOUND[:position] + piece + SOUND[position:], public_key=KEY).ok


@settings(max_examples=150)
@given(order=st.lists(st.integers(0, 4), max_size=7))
def test_any_other_selection_or_order_of_lines_is_found(order: list[int]) -> None:
    lines = SOUND.splitlines(keepends=True)
    found = verify_chain([lines[number] for number in order], public_key=KEY)
    assert found.ok == (order == [0, 1, 2, 3, 4])


def test_every_single_bit_of_one_receipt_counts() -> None:
    line = SOUND.splitlines()[1]
    for position in range(len(line)):
        changed = bytearray(line)
        changed[position] ^= 1 << (position % 8)
        with pytest.raises(VerificationFailed):
            read_receipt(bytes(changed))


@given(value=st.floats(allow_nan=False, allow_infinity=False, min_value=0, max_value=1e9))
def test_a_duration_has_one_written_form(value: float) -> None:
    content = {**draft(None).model_dump(), "duration_s": value}
    receipt = sign_receipt(ReceiptDraft.model_validate(content), seq=1, prev="0" * 64, signer=NODE)
    written = json.loads(receipt.canonical())["duration_s"]
    assert written == str(seconds(written)) == f"{seconds(value):f}"
    assert read_receipt(receipt.canonical()) == receipt


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999999999999999999", "soon", "", None])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    if value is not None:
        with pytest.raises(ValidationError):
            ReceiptDraft.model_validate({**draft(None).model_dump(), "duration_s": value})
    with pytest.raises(ValueError, match="duration"):
        seconds(value)


def test_a_receipt_holds_no_floating_point_number() -> None:
    def walk(value: Any) -> None:
        assert not isinstance(value, float)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
            walk(item)

    for line in SOUND.splitlines():
        walk(json.loads(line))


@pytest.mark.parametrize("field", ["id", "seq", "prev", "signature", "nonsense"])
def test_a_draft_cannot_choose_its_place_in_the_chain(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        ReceiptDraft.model_validate({**draft(None).model_dump(), field: "1"})


def test_a_draft_of_another_node_is_not_signed() -> None:
    content = draft(None).model_dump()
    for field, value in (("node_id", "ab" * 16), ("public_key", "ab" * 32)):
        with pytest.raises(InvalidResource, match="another node"):
            sign_receipt(ReceiptDraft.model_validate({**content, field: value}), seq=1, prev="0" * 64, signer=NODE)


def test_a_time_without_microseconds_or_zone_is_refused() -> None:
    for value in ("2026-01-02T03:04:05Z", "2026-01-02T03:04:05.000000", "2026-01-02 03:04:05.000000Z", "now"):
        with pytest.raises(ValidationError, match="begin"):
            ReceiptDraft.model_validate({**draft(None).model_dump(), "begin": value})


def test_a_receipt_and_canonical_json_are_stable() -> None:
    assert canonical_json({"b": [1, None, True], "a": "ä\n"}) == '{"a":"ä\\n","b":[1,null,true]}'.encode()
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json(float("nan"))
    receipt = Receipt.model_validate_json(SOUND.splitlines()[0])
    assert receipt.canonical() == SOUND.splitlines()[0]
    assert receipt.is_authentic()
