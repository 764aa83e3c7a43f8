"""Slots that are not what was sealed: a miss, counted, never wrong data and never an exception."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from engine_material import SLOT_BYTES, block
from kvtier_engine import Outcome, SlotStore

Opener = Callable[..., SlotStore]


def _fill(store: SlotStore, tenant: bytes = b"a", ranks: int = 1) -> None:
    for k in range(8):
        assert store.put(bytes([k]), [block((tenant, k, rank)) for rank in range(ranks)], tenant=tenant).ok


def _slots(store: SlotStore, rank: int = 0) -> list[bytes]:
    with open(store.config.files[rank], "rb") as file:
        data = file.read()
    return [data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES)]


def _overwrite(store: SlotStore, slot: int, data: bytes, rank: int = 0) -> None:
    with open(store.config.files[rank], "r+b") as file:
        os.pwrite(file.fileno(), data, slot * SLOT_BYTES)


def _slot_of(store: SlotStore, key: bytes, tenant: bytes = b"a") -> int:
    keys = store._keys
    return store._book.index.find(keys.block_digest(keys.tenant_space(tenant), key))


def _must_be_bad(store: SlotStore, key: bytes, ranks: int = 1) -> None:
    before = store.stats().outcomes["load.bad-tag"]
    rooms = [bytearray(b"\xee" * SLOT_BYTES) for _ in range(ranks)]
    assert store.get(key, rooms, tenant=b"a") is Outcome.BAD_TAG
    assert store.stats().outcomes["load.bad-tag"] == before + 1
    assert bytes(SLOT_BYTES) in rooms, "the rank that failed must be zeros"
    assert store.get(key, rooms, tenant=b"a") is Outcome.MISS  # forgotten
    assert store.put(key, [block("again")] * ranks, tenant=b"a") is Outcome.STORED  # and it can be stored again


def test_a_flipped_bit_on_disk_is_a_miss_and_leaves_the_others(open_store: Opener) -> None:
    store = open_store()
    _fill(store)
    slot = _slot_of(store, b"\x03")
    data = bytearray(_slots(store)[slot])
    data[4321] ^= 1
    _overwrite(store, slot, bytes(data))
    _must_be_bad(store, b"\x03")
    room = bytearray(SLOT_BYTES)
    assert store.get(b"\x04", [room], tenant=b"a").ok
    assert room == block((b"a", 4, 0))


def test_swapped_slots_are_misses(open_store: Opener) -> None:
    store = open_store()
    _fill(store)
    one, two = _slot_of(store, b"\x01"), _slot_of(store, b"\x02")
    data = _slots(store)
    _overwrite(store, one, data[two])
    _overwrite(store, two, data[one])
    _must_be_bad(store, b"\x01")
    _must_be_bad(store, b"\x02")


def test_an_old_block_replayed_into_its_own_slot_is_a_miss(open_store: Opener) -> None:
    store = open_store(slots=8)
    _fill(store)
    slot = _slot_of(store, b"\x05")
    old = _slots(store)[slot]
    store.evict([b"\x05"], tenant=b"a")
    assert store.put(b"\x05", [block("new")], tenant=b"a").ok
    assert _slot_of(store, b"\x05") == slot
    _overwrite(store, slot, old)
    _must_be_bad(store, b"\x05")


def test_another_ranks_slot_is_a_miss(open_store: Opener) -> None:
    store = open_store(2)
    _fill(store, ranks=2)
    slot = _slot_of(store, b"\x06")
    _overwrite(store, slot, _slots(store, 1)[slot], rank=0)
    _must_be_bad(store, b"\x06", ranks=2)


def test_another_tenants_slot_is_a_miss(open_store: Opener) -> None:
    store = open_store(slots=32)
    _fill(store, b"a")
    _fill(store, b"b")
    data = _slots(store)
    _overwrite(store, _slot_of(store, b"\x01"), data[_slot_of(store, b"\x01", b"b")])
    _must_be_bad(store, b"\x01")


def test_one_bad_slot_within_a_run_fails_alone(open_store: Opener) -> None:
    store = open_store()
    store.submit_store(1, [(bytes([k]), [block(k)]) for k in range(8)], tenant=b"a")
    store.drain(60)
    store.finished()
    _overwrite(store, _slot_of(store, b"\x03"), bytes(SLOT_BYTES))
    rooms = [bytearray(b"\xee" * SLOT_BYTES) for _ in range(8)]
    store.submit_load(2, [(bytes([k]), [rooms[k]]) for k in range(8)], tenant=b"a")
    store.drain(60)
    outcomes = store.finished()[0].outcomes
    assert [k for k in range(8) if outcomes[k] is Outcome.BAD_TAG] == [3]
    assert [bytes(room) for room in rooms] == [block(k) if k != 3 else bytes(SLOT_BYTES) for k in range(8)]


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_file_full_of_noise_is_nothing_but_misses(open_store: Opener, eviction: str) -> None:
    store = open_store(eviction=eviction)
    _fill(store)
    for slot in range(16):
        _overwrite(store, slot, os.urandom(SLOT_BYTES))
    for k in range(8):
        assert store.get(bytes([k]), [bytearray(SLOT_BYTES)], tenant=b"a") is Outcome.BAD_TAG
    assert store.stats().ready == 0
    assert store.stats().free == 16
