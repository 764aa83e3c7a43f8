"""Many threads at once: no wrong byte, no lost slot, no lost job. Bounded by counts, not by time."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from engine_material import SLOT_BYTES, block
from kvtier_api.errors import EngineError
from kvtier_engine import Outcome, SlotStore

Opener = Callable[..., SlotStore]
THREADS = 6


def _together(*acts: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run(act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("eviction", ["lru", "arc"])
@pytest.mark.parametrize("sealed", [True, False])
def test_readers_writers_evictors_and_erasers_see_whole_blocks_or_misses(
    open_store: Opener, eviction: str, sealed: bool
) -> None:
    store = open_store(2, slots=12, eviction=eviction, seal_slots=sealed, io_depth=4, run_bytes=4 * SLOT_BYTES)

    def work(number: int) -> None:
        chance = random.Random(number)
        for step in range(300):
            tenant, key = chance.choice([b"a", b"b"]), bytes([chance.randrange(20)])
            match chance.randrange(12):
                case 0:
                    store.evict([key], tenant=tenant)
                case 1 if step % 10 == 0:
                    store.erase(tenant)
                case 2:
                    store.pin([key], tenant=tenant)
                    store.unpin([key], tenant=tenant)
                case 3 | 4 | 5 | 6:
                    data = [block((tenant, key, rank)) for rank in range(2)]
                    store.put(key, data, tenant=tenant, replace=bool(step % 2))
                case _:
                    rooms = [bytearray(SLOT_BYTES), bytearray(SLOT_BYTES)]
                    outcome = store.get(key, rooms, tenant=tenant)
                    assert outcome in {Outcome.LOADED, Outcome.MISS, Outcome.EXPIRED}
                    if outcome is Outcome.LOADED:
                        assert [bytes(room) for room in rooms] == [block((tenant, key, rank)) for rank in range(2)]

    _together(*[lambda number=number: work(number) for number in range(THREADS)])  # type: ignore[misc]
    stats = store.stats()
    assert stats.errors == {}
    assert stats.ready + stats.free == 12
    index = store._book.index
    assert not any(index._readers)
    assert sum(index._table.find(index._table.digest(slot)) == slot for slot in range(12)) == stats.ready
    assert not store._book._pending


def test_jobs_of_many_threads_are_each_reported_once(open_store: Opener) -> None:
    store = open_store(slots=64, io_depth=4)
    seen: list[int] = []

    def submit(number: int) -> None:
        for step in range(60):
            key = bytes([number, step % 30])
            if step % 3:
                store.submit_store(number * 1000 + step, [(key, [block(key)])], tenant=b"a")
            else:
                store.submit_load(number * 1000 + step, [(key, [bytearray(SLOT_BYTES)])], tenant=b"a")
            seen.extend(result.job_id for result in store.finished())

    _together(*[lambda number=number: submit(number) for number in range(4)])  # type: ignore[misc]
    assert store.drain(120)
    seen.extend(result.job_id for result in store.finished())
    assert sorted(seen) == sorted(number * 1000 + step for number in range(4) for step in range(60))


@pytest.mark.parametrize("turn", range(6))
def test_closing_under_load_ends_every_job_and_writes_to_no_foreign_descriptor(
    open_store: Opener, tmp_path: Path, turn: int
) -> None:
    store = open_store(slots=16, io_depth=3)
    path = tmp_path / "bystander"
    path.touch()
    submitted: list[int] = []
    opened: list[int] = []

    def load() -> None:
        with suppress(EngineError):
            for step in range(5000):
                store.submit_store(step, [(bytes([step % 64]), [block(step)])], tenant=b"a")
                submitted.append(step)

    def sync() -> None:
        with suppress(EngineError):
            for step in range(5000):
                store.put(bytes([step % 64]), [block(step)], tenant=b"b", replace=True)

    def close() -> None:
        while len(submitted) < 20 * (turn + 1):
            time.sleep(0)
        store.close()
        # New descriptors take the numbers of the closed slot files at once.
        opened.extend(os.open(path, os.O_RDWR) for _ in range(4))

    try:
        _together(load, sync, close)
        assert store.drain(60)
        # A submission that lost the race may have raised after its job was opened, never the other way round.
        assert set(submitted) <= {result.job_id for result in store.finished()}
        assert path.stat().st_size == 0
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_close_keeps_the_files_open_until_a_write_that_has_begun_is_done(open_store: Opener) -> None:
    store = open_store()
    file, begun, go_on = store._files[0], threading.Event(), threading.Event()
    write, descriptors = file.write, []

    def slow(offset: int, views: Sequence[memoryview]) -> None:
        begun.set()
        assert go_on.wait(60)
        descriptors.append(file._fd)
        write(offset, views)

    file.write = slow  # type: ignore[method-assign]
    closed = threading.Event()

    def put() -> None:
        assert not store.put(b"k", [block(1)], tenant=b"a").ok  # its key is gone by then

    def close() -> None:
        assert begun.wait(60)
        store.close()
        closed.set()

    def let_go() -> None:
        assert begun.wait(60)
        while store._keys.keys:  # until the store is being closed
            time.sleep(0.01)
        time.sleep(0.3)  # in which it would close the file, if it did not wait
        go_on.set()

    _together(put, close, let_go)
    assert closed.is_set()
    assert descriptors[0] >= 0
