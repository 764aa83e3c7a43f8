"""The store as an engine uses it: jobs, blocks, tenants, ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from engine_material import SLOT_BYTES, block
from kvtier_api.errors import EngineError
from kvtier_engine import Outcome, Presence, SlotStore
from kvtier_engine.staging import aligned_memory

Opener = Callable[..., SlotStore]


def _load(store: SlotStore, key: bytes, tenant: bytes | None = b"a", ranks: int = 1) -> list[bytes] | None:
    rooms = [bytearray(b"\xee" * SLOT_BYTES) for _ in range(ranks)]
    return [bytes(room) for room in rooms] if store.get(key, rooms, tenant=tenant).ok else None


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_batch_comes_back_as_it_was_stored(open_store: Opener, sealed: bool, eviction: str, ranks: int) -> None:
    store = open_store(ranks, slots=24, seal_slots=sealed, eviction=eviction, run_bytes=4 * SLOT_BYTES)
    blocks = {bytes([k]): [block((k, rank)) for rank in range(ranks)] for k in range(20)}
    store.submit_store(7, list(blocks.items()), tenant=b"a")
    assert store.wait([7], 60)
    (stored,) = store.finished()
    assert stored.job_id == 7
    assert stored.success
    assert stored.outcomes == (Outcome.STORED,) * 20
    assert stored.transferred_bytes == 20 * ranks * SLOT_BYTES
    rooms = {key: [bytearray(SLOT_BYTES) for _ in range(ranks)] for key in [*blocks, b"absent"]}
    store.submit_load(8, list(rooms.items()), tenant=b"a")
    assert store.drain(60)
    (loaded,) = store.finished()
    assert loaded.outcomes == (Outcome.LOADED,) * 20 + (Outcome.MISS,)
    assert not loaded.success
    assert all([bytes(room) for room in rooms[key]] == data for key, data in blocks.items())
    assert store.stats().ranks[0].direct


def test_no_plaintext_stands_on_disk_when_sealed_and_it_does_when_not(open_store: Opener) -> None:
    for sealed, found in ((True, False), (False, True)):
        store = open_store(seal_slots=sealed)
        for k in range(16):
            assert store.put(bytes([k]), [block("canary")], tenant=b"a").ok
        with open(store.config.files[0], "rb") as file:
            assert (b"canary" in file.read()) is found


def test_a_sealed_slot_fills_its_slot_with_ciphertext_also_when_the_block_is_shorter(open_store: Opener) -> None:
    store = open_store()
    assert store.put(b"k", [b"short"], tenant=b"a").ok
    with open(store.config.files[0], "rb") as file:
        slot = file.read(SLOT_BYTES)
    assert max(slot.count(bytes([value])) for value in range(256)) < 100  # no run of zeros where the padding was
    room = bytearray(b"\xee" * 9)
    assert store.get(b"k", [room], tenant=b"a").ok
    assert room == b"short" + bytes(4)


def test_an_unsealed_slot_is_padded_with_zeros_and_not_with_what_the_staging_buffer_held(open_store: Opener) -> None:
    store = open_store(seal_slots=False, io_depth=1)
    for k in range(6):
        unaligned = memoryview(bytearray(SLOT_BYTES + 1))[1:]
        unaligned[:] = block("canary")
        assert store.put(bytes([k]), [unaligned], tenant=b"a").ok
        assert store.put(bytes([k + 100]), [b"short"], tenant=b"b").ok
    with open(store.config.files[0], "rb") as file:
        data = file.read()
    slots = [data[start : start + SLOT_BYTES] for start in range(0, len(data), SLOT_BYTES)]
    assert slots.count(b"short" + bytes(SLOT_BYTES - 5)) == 6


@pytest.mark.parametrize("aligned", [True, False])
def test_memory_of_any_alignment_is_stored_and_loaded_unsealed_with_direct_io(
    open_store: Opener, aligned: bool
) -> None:
    store = open_store(seal_slots=False)
    memory = memoryview(aligned_memory(2 * SLOT_BYTES + 4096))[0 if aligned else 1 :]
    memory[:SLOT_BYTES] = block(5)
    assert store.put(b"k", [memory[:SLOT_BYTES]], tenant=b"a").ok
    room = memory[SLOT_BYTES + (0 if aligned else 3) :][:SLOT_BYTES]
    assert store.get(b"k", [room], tenant=b"a").ok
    assert bytes(room) == block(5)


def test_each_job_is_reported_once_and_a_number_is_free_again_after_that(open_store: Opener) -> None:
    store = open_store(slots=64)
    for number in range(40):
        store.submit_store(number, [(bytes([number]), [block(number)])], tenant=b"a")
    seen: list[int] = []
    while len(seen) < 40:
        store.wait([number for number in range(40) if number not in seen], 0.01)
        seen += [result.job_id for result in store.finished()]
    assert sorted(seen) == list(range(40))
    assert store.finished() == []
    store.submit_store(3, [(b"again", [block(1)])], tenant=b"a")
    store.drain(60)
    with pytest.raises(EngineError, match="in use"):
        store.submit_load(3, [], tenant=b"a")
    assert [result.job_id for result in store.finished()] == [3]


def test_an_empty_job_and_a_refused_job_are_reported_too(open_store: Opener) -> None:
    store = open_store()
    store.submit_store(1, [], tenant=b"a")
    store.submit_store(2, [(b"k", [block(1)])], tenant=None)
    store.submit_load(3, [(b"k", [bytearray(SLOT_BYTES)])], tenant=b"")
    assert {result.job_id: result.outcomes for result in store.finished()} == {
        1: (),
        2: (Outcome.REFUSED,),
        3: (Outcome.REFUSED,),
    }


def test_a_callback_hears_of_each_finished_job_and_one_that_raises_stops_nothing(open_store: Opener) -> None:
    heard = threading.Semaphore(0)

    def hear() -> None:
        heard.release()
        raise ValueError("a caller's mistake")

    store = open_store(on_finished=hear)
    for number in range(3):
        store.submit_store(number, [(bytes([number]), [block(number)])], tenant=b"a")
    for _ in range(3):
        assert heard.acquire(timeout=60)
    assert store.drain(60)
    assert len(store.finished()) == 3


def test_a_block_that_is_there_is_not_written_again_unless_replaced(open_store: Opener) -> None:
    store = open_store()
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.STORED
    assert store.put(b"k", [block(2)], tenant=b"a") is Outcome.PRESENT
    assert _load(store, b"k") == [block(1)]
    assert store.put(b"k", [block(2)], tenant=b"a", replace=True) is Outcome.STORED
    assert _load(store, b"k") == [block(2)]
    assert store.stats().ready == 1
    assert store.stats().free == 15


def test_the_same_block_twice_in_a_batch_is_written_once(open_store: Opener) -> None:
    store = open_store()
    store.submit_store(1, [(b"k", [block(1)]), (b"k", [block(1)])], tenant=b"a")
    store.drain(60)
    assert store.finished()[0].outcomes == (Outcome.STORED, Outcome.PENDING)
    rooms = [bytearray(SLOT_BYTES), bytearray(SLOT_BYTES)]
    store.submit_load(2, [(b"k", [rooms[0]]), (b"k", [rooms[1]])], tenant=b"a")
    store.drain(60)
    assert store.finished()[0].success
    assert rooms == [block(1), block(1)]


def test_a_batch_larger_than_the_store_keeps_what_fits_and_says_so(open_store: Opener) -> None:
    store = open_store(slots=4)
    store.submit_store(1, [(bytes([k]), [block(k)]) for k in range(6)], tenant=b"a")
    store.drain(60)
    outcomes = store.finished()[0].outcomes
    assert outcomes.count(Outcome.STORED) == 4
    assert outcomes.count(Outcome.NO_SPACE) == 2
    assert store.put(b"later", [block(9)], tenant=b"a") is Outcome.STORED  # and nothing is stuck


# Tenants.


def test_required_stores_nothing_without_a_tenant_and_counts_it(open_store: Opener) -> None:
    store = open_store(salt_policy="Required")
    for tenant in (None, b""):
        assert store.put(b"k", [block("unsalted")], tenant=tenant) is Outcome.REFUSED
        assert store.get(b"k", [bytearray(SLOT_BYTES)], tenant=tenant) is Outcome.REFUSED
        assert store.lookup([b"k"], tenant=tenant) == [Presence.MISS]
        assert store.evict([b"k"], tenant=tenant) == 0
    with open(store.config.files[0], "rb") as file:
        assert file.read() == bytes(16 * SLOT_BYTES)
    assert store.stats().outcomes == {"store.refused": 2, "load.refused": 2}
    assert store.stats().keys == 0


def test_another_tenant_misses_whatever_the_policy_but_shared(open_store: Opener) -> None:
    for policy, other in (("Required", None), ("PerTenant", None), ("Shared", [block(1)])):
        store = open_store(salt_policy=policy)
        assert store.put(b"k", [block(1)], tenant=b"a").ok
        assert _load(store, b"k", b"a") == [block(1)]
        assert _load(store, b"k", b"b") == other
        assert store.contains(b"k", tenant=b"b") is (other is not None)


def test_per_tenant_gives_requests_without_a_tenant_a_space_of_their_own(open_store: Opener) -> None:
    store = open_store(salt_policy="PerTenant")
    assert store.put(b"k", [block(1)]).ok
    assert _load(store, b"k", None) == [block(1)]
    assert _load(store, b"k", b"a") is None


def test_erasing_a_tenant_destroys_its_keys_and_no_others(open_store: Opener) -> None:
    store = open_store()
    for tenant in (b"a", b"b"):
        for k in range(4):
            assert store.put(bytes([k]), [block((tenant, k))], tenant=tenant).ok
    assert store.stats().keys == 2
    assert store.erase(b"a") == 4
    assert store.stats().keys == 1
    assert [_load(store, bytes([k]), b"a") for k in range(4)] == [None] * 4
    assert [_load(store, bytes([k]), b"b") for k in range(4)] == [[block((b"b", k))] for k in range(4)]
    assert store.put(b"\0", [block("new")], tenant=b"a") is Outcome.STORED
    assert _load(store, b"\0", b"a") == [block("new")]


def test_erasing_everything_leaves_an_empty_store_that_works(open_store: Opener) -> None:
    store = open_store(salt_policy="Shared")
    store.put(b"k", [block(1)])
    with pytest.raises(EngineError, match="erase_all"):
        store.erase(b"a")
    assert store.erase_all() == 1
    assert store.stats().keys == 0
    assert store.stats().free == 16
    assert store.put(b"k", [block(2)]).ok


def test_the_index_keeps_neither_block_hashes_nor_tenants(open_store: Opener) -> None:
    store = open_store()
    key, tenant = os.urandom(32), os.urandom(24)
    store.put(key, [block(1)], tenant=tenant)
    assert store.contains(key, tenant=tenant)
    index = store._book.index
    kept = bytes(index._table._digests) + repr(store._keys._current.keys()).encode()
    assert key[:8] not in kept
    assert tenant[:8] not in kept


# Pins, eviction, ranks.


def test_a_pinned_block_outlives_any_number_of_stores_until_unpinned(open_store: Opener) -> None:
    store = open_store(slots=4)
    store.put(b"pinned", [block("p")], tenant=b"a")
    assert store.pin([b"pinned", b"absent"], tenant=b"a") == [True, False]
    for k in range(12):
        assert store.put(bytes([k]), [block(k)], tenant=b"a").ok
    assert _load(store, b"pinned") == [block("p")]
    store.unpin([b"pinned"], tenant=b"a")
    for k in range(12, 24):
        store.put(bytes([k]), [block(k)], tenant=b"a")
    assert _load(store, b"pinned") is None


def test_erasure_ignores_pins(open_store: Opener) -> None:
    store = open_store()
    store.put(b"k", [block(1)], tenant=b"a")
    store.pin([b"k"], tenant=b"a")
    assert store.erase(b"a") == 1
    assert _load(store, b"k") is None
    assert store.stats().free == 16


def test_evict_forgets_and_frees(open_store: Opener) -> None:
    store = open_store()
    store.put(b"k", [block(1)], tenant=b"a")
    assert store.evict([b"k", b"absent"], tenant=b"a") == 1
    assert _load(store, b"k") is None
    assert store.stats().free == 16


def test_a_slot_is_valid_only_if_every_rank_wrote_it(open_store: Opener) -> None:
    store = open_store(3)
    os.truncate(store.config.files[2], 100)
    store.submit_store(1, [(b"k", [block(rank) for rank in range(3)])], tenant=b"a")
    store.drain(60)
    (result,) = store.finished()
    assert result.outcomes == (Outcome.IO_ERROR,)
    assert "rank_2" in result.error
    assert not store.contains(b"k", tenant=b"a")
    assert store.stats().ready == 0
    assert store.stats().free == 16


def test_with_external_confirmation_a_block_is_found_only_once_confirmed(open_store: Opener) -> None:
    store = open_store(confirm="external")
    for number, key in ((1, b"kept"), (2, b"dropped")):
        store.submit_store(number, [(key, [block(key)])], tenant=b"a")
        store.drain(60)
        (result,) = store.finished()
        assert result.outcomes == (Outcome.WRITTEN,)
        assert result.success
        assert store.lookup([key], tenant=b"a") == [Presence.PENDING]
    assert store.confirm(1) == 1
    assert store.abandon(2) == 1
    assert store.confirm(1) == store.confirm(2) == store.confirm(99) == 0
    assert _load(store, b"kept") == [block(b"kept")]
    assert store.lookup([b"dropped"], tenant=b"a") == [Presence.MISS]
    with pytest.raises(EngineError, match="confirm"):
        store.put(b"k", [block(1)], tenant=b"a")


def test_what_was_erased_before_its_confirmation_stays_erased(open_store: Opener) -> None:
    store = open_store(confirm="external")
    store.submit_store(1, [(b"k", [block(1)])], tenant=b"a")
    store.drain(60)
    store.erase(b"a")
    assert store.confirm(1) == 0
    assert store.lookup([b"k"], tenant=b"a") == [Presence.MISS]
    assert store.stats().free == 16


# Wrong use.


@pytest.mark.parametrize(
    ("key", "buffers", "match"),
    [
        ("text", [bytearray(8)], "key"),
        (b"k", [], "0 buffers"),
        (b"k", [bytearray(8), bytearray(8)], "2 buffers"),
        (b"k", [bytearray(0)], "0 bytes"),
        (b"k", [bytearray(SLOT_BYTES + 1)], "8193 bytes"),
        (b"k", [memoryview(bytearray(16))[::2]], "contiguous"),
    ],
)
def test_unsuitable_items_are_refused_before_anything_happens(
    open_store: Opener, key: bytes, buffers: list[bytearray], match: str
) -> None:
    store = open_store()
    with pytest.raises(EngineError, match=match):
        store.submit_store(1, [(b"good", [block(1)]), (key, buffers)], tenant=b"a")
    with pytest.raises(EngineError, match=match):
        store.get(key, buffers, tenant=b"a")
    assert store.finished() == []
    assert store.stats().free == 16


def test_memory_that_cannot_be_written_is_refused_for_loads(open_store: Opener) -> None:
    with pytest.raises(EngineError, match="not writable"):
        open_store().get(b"k", [bytes(SLOT_BYTES)], tenant=b"a")


def test_a_tenant_that_is_not_bytes_is_refused_and_leaves_no_job_open(open_store: Opener) -> None:
    store = open_store()
    with pytest.raises(EngineError, match="tenant"):
        store.submit_store(1, [(b"k", [block(1)])], tenant="acme")  # type: ignore[arg-type]
    assert store.stats().open_jobs == 0


def test_a_closed_store_refuses_and_its_finished_jobs_can_still_be_taken(open_store: Opener) -> None:
    store = open_store(slots=64)
    for number in range(32):
        store.submit_store(number, [(bytes([number]), [block(number)])], tenant=b"a")
    store.close()
    store.close()
    assert sorted(result.job_id for result in store.finished()) == list(range(32))
    with pytest.raises(EngineError, match="closed"):
        store.put(b"k", [block(1)], tenant=b"a")
    with pytest.raises(EngineError, match="closed"):
        store.submit_load(1, [], tenant=b"a")
    assert store.stats().keys == 0


def test_a_new_store_over_the_same_files_reads_nothing_old(open_store: Opener) -> None:
    first = open_store()
    first.put(b"k", [block(1)], tenant=b"a")
    first.close()
    second = open_store(files=first.config.files)
    assert _load(second, b"k") is None
    assert second.stats().ready == 0
