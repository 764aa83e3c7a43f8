"""One slot's seal: what it binds, and what a wrong one gives."""

from __future__ import annotations

import os

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_engine.sealing import SlotSeal, TierBinding, open_slot, seal_slots

SIZE = 4096
KEY = AESGCM(os.urandom(32))
BINDING = TierBinding(tier_uid="tier-1", volume_id="kvv-1")
SEAL = SlotSeal(key_number=7, slot=3, generation=2, counter=99)


def _sealed(plain: bytes) -> tuple[bytearray, bytes]:
    room = bytearray(SIZE + 16)
    (tag,) = seal_slots(KEY, BINDING, [SEAL], rank=1, plains=[memoryview(plain)], rooms=[memoryview(room)])
    return room, tag


def _open(
    room: bytearray, tag: bytes, *, seal: SlotSeal = SEAL, rank: int = 1, binding: TierBinding = BINDING
) -> bytes | None:
    out = bytearray(b"\xee" * SIZE)
    good = open_slot(KEY, binding, seal, rank=rank, tag=tag, room=memoryview(room), plain=memoryview(out))
    if not good:
        assert bytes(out) == bytes(SIZE), "unverified bytes reached the caller"
    return bytes(out) if good else None


def test_what_was_sealed_opens_and_the_slot_is_ciphertext_of_the_same_size() -> None:
    plain = b"prompt " * 600
    plain = plain[:SIZE]
    room, tag = _sealed(plain)
    assert b"prompt" not in room
    assert len(tag) == 16
    assert _open(room, tag) == plain


def test_slots_sealed_side_by_side_keep_their_tags_though_each_overwrites_the_one_before() -> None:
    seals = [SEAL._replace(slot=k, counter=k) for k in range(5)]
    plains = [memoryview(os.urandom(SIZE)) for _ in seals]
    run = bytearray(5 * SIZE + 16)
    rooms = [memoryview(run)[k * SIZE : (k + 1) * SIZE + 16] for k in range(5)]
    tags = seal_slots(KEY, BINDING, seals, rank=1, plains=plains, rooms=rooms)
    assert len(set(tags)) == 5
    for k in reversed(range(5)):
        assert _open(bytearray(run[k * SIZE : (k + 1) * SIZE]) + bytes(16), tags[k], seal=seals[k]) == plains[k]


@pytest.mark.parametrize("field", SlotSeal._fields)
def test_each_field_of_the_seal_is_authenticated(field: str) -> None:
    room, tag = _sealed(os.urandom(SIZE))
    assert _open(room, tag, seal=SEAL._replace(**{field: getattr(SEAL, field) + 1})) is None


def test_the_fields_are_in_the_associated_data_and_not_only_in_the_nonce() -> None:
    kinds = {BINDING.associated_data(SEAL._replace(**{name: 12345}), 1) for name in SlotSeal._fields}
    kinds |= {BINDING.associated_data(SEAL, 1), BINDING.associated_data(SEAL, 2)}
    assert len(kinds) == len(SlotSeal._fields) + 2


def test_rank_tier_and_volume_are_authenticated() -> None:
    room, tag = _sealed(os.urandom(SIZE))
    assert _open(bytearray(room), tag, rank=0) is None
    assert _open(bytearray(room), tag, binding=TierBinding(tier_uid="tier-2", volume_id="kvv-1")) is None
    assert _open(bytearray(room), tag, binding=TierBinding(tier_uid="tier-1", volume_id="kvv-2")) is None
    assert TierBinding(tier_uid="a", volume_id="bc").prefix != TierBinding(tier_uid="ab", volume_id="c").prefix
    assert _open(room, tag) is not None


@settings(max_examples=60)
@given(st.integers(0, SIZE * 8 - 1))
def test_any_flipped_bit_is_a_failed_tag_and_gives_zeros(bit: int) -> None:
    room, tag = _sealed(b"x" * SIZE)
    room[bit // 8] ^= 1 << bit % 8
    assert _open(room, tag) is None
