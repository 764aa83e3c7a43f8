"""Max-age: no block older than the maximum age can be read, called or not, raced or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from engine_material import SLOT_BYTES, HandClock, block
from kvtier_engine import Outcome, Presence, SlotStore
from kvtier_engine.clock import boot_clock

AGE = 800.0  # epochs of 100 s, margin 2 s
Opener = Callable[..., SlotStore]


def _get(store: SlotStore, key: bytes = b"k") -> Outcome:
    return store.get(key, [bytearray(SLOT_BYTES)], tenant=b"a")


@pytest.mark.parametrize("sealed", [True, False])
def test_a_block_is_readable_while_young_and_never_at_its_maximum_age(
    open_store: Opener, clock: HandClock, sealed: bool
) -> None:
    store = open_store(max_age_s=AGE, clock=clock, seal_slots=sealed)
    for offset in (0, 1, 50, 99, 99.9):
        clock.now += 1000 - clock.now % 100 + offset
        assert store.put(b"k", [block(1)], tenant=b"a", replace=True).ok
        born = clock.now
        clock.now = born + AGE * 6 / 8
        assert _get(store) is Outcome.LOADED
        clock.now = born + AGE
        assert store.lookup([b"k"], tenant=b"a") == [Presence.MISS]
        assert not _get(store).ok


def test_a_key_that_came_of_age_is_zeroed_by_the_timer_without_any_call(open_store: Opener) -> None:
    store = open_store(max_age_s=4.0)  # young for long enough, however slow the disk is
    assert store.put(b"k", [block(1)], tenant=b"a").ok
    ring = store._keys
    cell = next(iter(ring._by_number.values())).cell
    deadline = time.monotonic() + 60
    while ring._by_number and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not ring._by_number
    assert bytes(ring._memory.view(cell)) == bytes(32)
    while store._book.index.ready and time.monotonic() < deadline:
        time.sleep(0.02)
    assert store.stats().ready == 0
    assert store.stats().keys_dropped == 1


class _LateFile:
    """A slot file whose reads take so long that the block comes of age, or something else happens, meanwhile."""

    def __init__(self, store: SlotStore, meanwhile: Callable[[], object]) -> None:
        self._file = store._files[0]
        self._meanwhile = meanwhile
        store._files[0] = self  # type: ignore[call-overload]

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._file.read(offset, views)
        self._meanwhile()

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_block_that_comes_of_age_while_it_is_read_is_not_given_out(
    open_store: Opener, clock: HandClock, sealed: bool
) -> None:
    store = open_store(max_age_s=AGE, clock=clock, seal_slots=sealed)
    store.put(b"k", [block(1)], tenant=b"a")

    def age() -> None:
        clock.now += AGE

    _LateFile(store, age)
    room = bytearray(b"\xee" * SLOT_BYTES)
    assert store.get(b"k", [room], tenant=b"a") is Outcome.EXPIRED
    assert bytes(room) == bytes(SLOT_BYTES)
    assert store.stats().ready == 0


@pytest.mark.parametrize("sealed", [True, False])
def test_a_tenant_erased_while_its_block_is_read_gets_nothing(open_store: Opener, sealed: bool) -> None:
    store = open_store(seal_slots=sealed)
    store.put(b"k", [block(1)], tenant=b"a")
    _LateFile(store, lambda: store.erase(b"a"))
    room = bytearray(b"\xee" * SLOT_BYTES)
    assert store.get(b"k", [room], tenant=b"a") is Outcome.EXPIRED
    assert bytes(room) == bytes(SLOT_BYTES)
    assert store.stats().free == 16


def test_a_slot_being_read_is_not_reused_before_the_read_is_done(open_store: Opener) -> None:
    """Evicted, erased or replaced under the reader: the writer must take another slot."""
    store = open_store(slots=2)
    store.put(b"k", [block("old")], tenant=b"a")
    writes: list[Outcome] = []

    def meanwhile() -> None:
        store.evict([b"k"], tenant=b"a")
        writes.extend(store.put(name, [block(name)], tenant=b"a") for name in (b"1", b"2", b"3"))

    _LateFile(store, meanwhile)
    room = bytearray(SLOT_BYTES)
    assert store.get(b"k", [room], tenant=b"a") is Outcome.LOADED
    assert bytes(room) == block("old")
    assert all(outcome.ok for outcome in writes)
    assert store.stats().ready + store.stats().free == 2


def test_a_store_that_waited_until_its_key_went_is_not_committed(open_store: Opener) -> None:
    store = open_store()
    file = store._files[0]
    write = file.write

    def late(offset: int, views: Sequence[memoryview]) -> None:
        write(offset, views)
        store.erase(b"a")

    file.write = late  # type: ignore[method-assign]
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.EXPIRED
    assert store.lookup([b"k"], tenant=b"a") == [Presence.MISS]
    assert store.stats().free == 16


def test_a_block_under_an_old_key_is_stored_anew_with_a_new_one(open_store: Opener, clock: HandClock) -> None:
    store = open_store(max_age_s=AGE, clock=clock)
    store.put(b"k", [block(1)], tenant=b"a")
    clock.now += AGE
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.STORED
    assert _get(store) is Outcome.LOADED


def test_expire_older_than_takes_the_old_and_leaves_the_young(open_store: Opener, clock: HandClock) -> None:
    store = open_store(max_age_s=AGE, clock=clock)
    store.put(b"old", [block(1)], tenant=b"a")
    clock.now += 300
    store.put(b"young", [block(2)], tenant=b"a")
    assert store.expire() == 0
    assert store.expire(older_than_s=250) == 1
    assert _get(store, b"old") is Outcome.MISS
    assert _get(store, b"young") is Outcome.LOADED


def test_statistics_bound_the_age_of_the_oldest_block(open_store: Opener, clock: HandClock) -> None:
    store = open_store(max_age_s=AGE, clock=clock)
    assert store.stats().oldest_block_age_s is None
    store.put(b"k", [block(1)], tenant=b"a")
    clock.now += 250
    age = store.stats().oldest_block_age_s
    assert age is not None
    assert 250 <= age <= 350


def test_the_clock_counts_time_since_boot_which_nobody_can_set() -> None:
    assert abs(boot_clock() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60
    with pytest.raises(OSError, match=r"Invalid|not permitted|not supported"):
        time.clock_settime(time.CLOCK_BOOTTIME, 0.0)
