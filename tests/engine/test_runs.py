"""Adjacent slots of one job: moved together, failing one by one."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from engine_material import SLOT_BYTES, block
from kvtier_engine import Outcome, Presence, SlotStore
from kvtier_engine.runs import Run
from kvtier_engine.transfer import Transfer
from requirements import need_tool

Opener = Callable[..., SlotStore]
Move = Callable[[int, Sequence[memoryview]], None]
BLOCKS = 12


def _job(store: SlotStore, number: int, keys: Sequence[int], ranks: int = 1, size: int = SLOT_BYTES) -> Any:
    items = [(bytes([key]), [block((key, rank), size) for rank in range(ranks)]) for key in keys]
    store.submit_store(number, items, tenant=b"a")
    assert store.drain(60)
    (result,) = store.finished()
    return result


def _loaded(store: SlotStore, keys: Sequence[int], ranks: int = 1, size: int = SLOT_BYTES) -> list[int]:
    """The keys that one load job brings back as they were stored; any other is a miss."""
    rooms = {key: [bytearray(b"\xee" * size) for _ in range(ranks)] for key in keys}
    store.submit_load(99, [(bytes([key]), rooms[key]) for key in keys], tenant=b"a")
    assert store.drain(60)
    (result,) = store.finished()
    good = [key for key, outcome in zip(keys, result.outcomes, strict=True) if outcome is Outcome.LOADED]
    assert all(rooms[key] == [block((key, rank), size) for rank in range(ranks)] for key in good)
    return good


def _record(store: SlotStore, name: str) -> list[tuple[int, int]]:
    """Offset and size of each transfer from now on."""
    file = store._files[0]
    move: Move = getattr(file, name)
    seen: list[tuple[int, int]] = []

    def recorded(offset: int, views: Sequence[memoryview]) -> None:
        seen.append((offset, sum(map(len, views))))
        move(offset, views)

    setattr(file, name, recorded)
    return seen


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_a_job_of_adjacent_slots_is_one_write(open_store: Opener, sealed: bool, eviction: str) -> None:
    store = open_store(slots=64, slot_size_bytes=65536, seal_slots=sealed, eviction=eviction)
    writes, reads = _record(store, "write"), _record(store, "read")
    for number in range(3):  # the later ones evict the earlier
        assert _job(store, number, range(64 * number, 64 * number + 64), size=65536).success
        assert writes == [(0, 4 << 20)]
        writes.clear()
        assert _loaded(store, range(64 * number, 64 * number + 64), size=65536) == [
            *range(64 * number, 64 * number + 64)
        ]
        assert sorted(reads) == [(start << 20, 1 << 20) for start in range(4)]
        reads.clear()


def test_slots_that_are_not_adjacent_are_written_each_to_its_place(open_store: Opener) -> None:
    store = open_store(slots=BLOCKS)
    assert _job(store, 1, range(BLOCKS)).success
    assert store.evict([bytes([key]) for key in (1, 2, 5, 9, 10, 11)], tenant=b"a") == 6
    writes = _record(store, "write")
    assert _job(store, 2, range(20, 26)).success
    assert sorted(writes) == [(k * SLOT_BYTES, n * SLOT_BYTES) for k, n in ((1, 2), (5, 1), (9, 3))]
    assert _loaded(store, [*range(BLOCKS), *range(20, 26)]) == [0, 3, 4, 6, 7, 8, *range(20, 26)]


# What each slot is sealed with.


class _Recorder:
    """Seals as AESGCM does, and notes key, nonce and associated data."""

    def __init__(self, key: memoryview) -> None:
        self._key, self._cipher = bytes(key), AESGCM(key)
        self.decrypt_into = self._cipher.decrypt_into

    sealed: ClassVar[list[tuple[bytes, bytes, bytes]]] = []

    def encrypt_into(self, nonce: bytes, plain: memoryview, associated: bytes, room: memoryview) -> int:
        self.sealed.append((self._key, nonce, associated))
        return self._cipher.encrypt_into(nonce, plain, associated, room)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_no_store_seals_twice_with_one_nonce_or_for_one_generation_of_a_slot(
    open_store: Opener, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_engine.keys.AESGCM", _Recorder)
    monkeypatch.setattr(_Recorder, "sealed", [])
    store = open_store(2, slots=BLOCKS, eviction=eviction)
    number = 0
    for first in (0, 6, 6, 20, 0):  # evicting, replacing, and leaving alone what is there
        for tenant in (b"a", b"b"):
            for replace in (False, True):
                items = [(bytes([first + k]), [b"rank 0", block(k)]) for k in range(8)]
                store.submit_store(number, items, tenant=tenant, replace=replace)
                number += 1
                assert store.drain(60)
    assert all(result.success for result in store.finished())
    sealed = _Recorder.sealed
    assert len(sealed) >= 2 * 8 * 10
    assert len({(key, nonce) for key, nonce, _associated in sealed}) == len(sealed)
    # Key number, rank, slot, generation, counter: the first three and the generation tell every seal from every other.
    fields = [struct.unpack(">QIQQQ", associated[-36:]) for _key, _nonce, associated in sealed]
    assert len({(rank, slot, generation) for _number, rank, slot, generation, _counter in fields}) == len(sealed)


# Faults in the middle of a run.

_CONSUMER = """
import json, sys
from kvtier_engine import SlotStore, StoreConfig
path, size, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = SlotStore(StoreConfig(files=(path,), ranks=(0,), slot_size_bytes=size, tier_uid="t", volume_id="v",
    salt_policy="Required", max_age_s=3600, io_depth=1, quarantine_s=3600))
store.submit_store(1, [(bytes([k]), [bytes([k + 1]) * size]) for k in range(blocks)], tenant=b"a")
store.drain(60)
stored = store.finished()[0]
rooms = [bytearray(b"\\xee" * size) for _ in range(blocks)]
store.submit_load(2, [(bytes([k]), [rooms[k]]) for k in range(blocks)], tenant=b"a")
store.drain(60)
loaded = store.finished()[0]
stats = store.stats()
print(json.dumps({
    "stored": [outcome.value for outcome in stored.outcomes], "loaded": [outcome.value for outcome in loaded.outcomes],
    "right": [room == bytes([k + 1]) * size for k, room in enumerate(rooms)],
    "untouched": [room == b"\\xee" * size or room == bytes(size) for room in rooms],
    "errors": stats.errors, "quarantined": stats.quarantined, "ready": stats.ready, "free": stats.free}))
"""


def _consume(path: str, *prefix: str, **options: Any) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-c", _CONSUMER, path, str(SLOT_BYTES), str(BLOCKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, **options)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for outcome, right, untouched in zip(result["loaded"], result["right"], result["untouched"], strict=True):
        assert right if outcome == "loaded" else untouched
    assert result["ready"] + result["free"] + result["quarantined"] == 16
    return result


def _injected(path: str, call: str, fault: str, tmp_path: Path) -> tuple[dict[str, Any], int]:
    """The consumer's report with calls on its file made to fail, and how many failed."""
    need_tool("strace")
    trace, calls = tmp_path / "trace", f"{call},{call}2"
    strace = ["strace", "-f", "-qq", "-o", str(trace), "-e", f"trace={calls}", "-P", path]
    result = _consume(path, *strace, "-e", f"inject={calls}:{fault}")
    return result, len(re.findall(r"\(INJECTED\)", trace.read_text()))


def _where(outcomes: list[str], value: str) -> list[int]:
    return [k for k, outcome in enumerate(outcomes) if outcome == value]


def test_a_failed_write_within_a_run_fails_the_blocks_that_it_hit_and_no_others(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    # The first call is the whole run; then slot by slot, of which every third fails.
    result, failed = _injected(slot_files()[0], "pwritev", "error=EIO:when=1+3", tmp_path)
    assert failed == 5
    assert _where(result["stored"], "io-error") == [2, 5, 8, 11]
    assert _where(result["loaded"], "loaded") == [0, 1, 3, 4, 6, 7, 9, 10]
    assert result["errors"] == {"EIO": 1}
    assert result["quarantined"] == 4


def test_a_run_that_fails_once_and_then_not_again_is_stored(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result, _failed = _injected(slot_files()[0], "pwritev", "error=ENOSPC:when=1", tmp_path)
    assert _where(result["loaded"], "loaded") == list(range(BLOCKS))
    assert result["errors"] == {"ENOSPC": 1}
    assert result["quarantined"] == 0


def test_a_disk_that_fails_every_write_is_not_tried_once_for_each_block(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result, failed = _injected(slot_files()[0], "pwritev", "error=EIO:when=1+", tmp_path)
    assert failed == 5
    assert result["stored"] == ["io-error"] * BLOCKS
    assert result["loaded"] == ["miss"] * BLOCKS


def test_a_failed_read_within_a_run_is_a_miss_of_the_blocks_that_it_hit(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    # Calls are counted by thread: the opener's first is the probe for O_DIRECT, the I/O thread's first the whole run.
    result, failed = _injected(slot_files()[0], "preadv", "error=EIO:when=1+3", tmp_path)
    assert failed == 1 + 5
    assert _where(result["loaded"], "io-error") == [2, 5, 8, 11]
    assert _where(result["loaded"], "loaded") == [0, 1, 3, 4, 6, 7, 9, 10]
    assert result["ready"] == 8
    assert result["quarantined"] == 4


def test_a_run_that_is_cut_short_keeps_what_was_written(slot_files: Callable[..., tuple[str, ...]]) -> None:
    limit = 5 * SLOT_BYTES + SLOT_BYTES // 2

    def limit_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = _consume(slot_files()[0], preexec_fn=limit_size)
    assert _where(result["stored"], "stored") == _where(result["loaded"], "loaded") == list(range(5))
    assert result["errors"] == {"EFBIG": 1}


@pytest.mark.parametrize("confirm", ["local", "external"])
def test_a_block_that_one_rank_could_not_write_is_lost_alone(open_store: Opener, confirm: str) -> None:
    store = open_store(3, confirm=confirm, io_depth=1)  # rank by rank: the sick one is neither the first nor the last
    write = store._files[1].write

    def sick(offset: int, views: Sequence[memoryview]) -> None:
        if offset <= 4 * SLOT_BYTES < offset + sum(map(len, views)):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        write(offset, views)

    store._files[1].write = sick  # type: ignore[method-assign]
    result = _job(store, 1, range(BLOCKS), ranks=3)
    assert [k for k, outcome in enumerate(result.outcomes) if not outcome.ok] == [4]
    assert "rank_1" in result.error
    others = [key for key in range(BLOCKS) if key != 4]
    assert result.transferred_bytes == len(others) * 3 * SLOT_BYTES
    if confirm == "external":
        assert store.lookup([b"\0", b"\4"], tenant=b"a") == [Presence.PENDING, Presence.MISS]
        assert store.confirm(1) == len(others)
    assert _loaded(store, range(BLOCKS), ranks=3) == others
    assert store.stats().free == 16 - len(others)
    store._files[1].write = write  # type: ignore[method-assign]
    assert _job(store, 2, [4], ranks=3).outcomes == ((Outcome.STORED,) if confirm == "local" else (Outcome.WRITTEN,))


def test_what_was_in_a_buffer_before_reaches_nobody_when_a_read_fails(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(seal_slots=False, io_depth=1)
    assert _job(store, 1, range(2)).success
    read = store._files[0].read

    def sick(offset: int, views: Sequence[memoryview]) -> None:
        if not offset:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        read(offset, views)

    monkeypatch.setattr(store._files[0], "read", sick)
    seen: list[int] = []

    class Watched(Transfer):
        def _copy(self, run: Run, position: int, *others: Any) -> None:
            super()._copy(run, position, *others)
            seen.extend(view[0] for view in run.views[position])

    store._transfer.__class__ = Watched
    rooms = [memoryview(bytearray(b"\xee" * (SLOT_BYTES + 1)))[1:] for _ in range(2)]  # unaligned: through a buffer
    store.submit_load(2, [(bytes([k]), [rooms[k]]) for k in range(2)], tenant=b"a")
    assert store.drain(60)
    assert store.finished()[0].outcomes == (Outcome.IO_ERROR, Outcome.LOADED)
    assert seen == [0xEE, block((1, 0))[0]]
    assert rooms[0] == bytes(SLOT_BYTES)


# Threads.


def test_loads_that_hold_every_buffer_and_a_store_that_needs_one_all_get_done(open_store: Opener) -> None:
    store = open_store(io_depth=1)  # two buffers; one thread seals or opens at a time
    assert _job(store, 1, range(2)).success
    read, go_on, reading = store._files[0].read, threading.Event(), threading.Semaphore(0)

    def slow(offset: int, views: Sequence[memoryview]) -> None:
        reading.release()
        assert go_on.wait(60)
        read(offset, views)

    store._files[0].read = slow  # type: ignore[method-assign]
    outcomes: list[Outcome] = []

    def get(key: bytes) -> None:
        outcomes.append(store.get(key, [bytearray(SLOT_BYTES)], tenant=b"a"))

    getters = [threading.Thread(target=get, args=(bytes([k]),), daemon=True) for k in range(2)]
    for getter in getters:
        getter.start()
    assert reading.acquire(timeout=60)
    assert reading.acquire(timeout=60)
    store.submit_store(2, [(b"new", [block("new")])], tenant=b"a")
    while store._threads._stores:  # until its thread has it, and finds no buffer
        threading.Event().wait(0.01)
    threading.Event().wait(0.05)
    go_on.set()
    assert store.drain(60), "the store waits in its turn for a buffer whose holder waits for that turn"
    for getter in getters:
        getter.join(60)
    assert outcomes == [Outcome.LOADED] * 2
    assert store.finished()[0].success
