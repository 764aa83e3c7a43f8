"""The key ring: nonces, epochs, dropping."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_material import HandClock
from kvtier_api.errors import EngineError
from kvtier_engine.keys import KeyRing
from kvtier_engine.sealing import SlotSeal, TierBinding, seal_slots

AGE = 800.0  # epochs of 100 s


class _NonceRecorder:
    """Stands where AESGCM stands, and notes what it is asked to encrypt with."""

    def __init__(self) -> None:
        self.nonces: list[bytes] = []

    def encrypt_into(self, nonce: bytes, data: Any, associated: bytes, buffer: Any) -> int:
        self.nonces.append(bytes(nonce))
        return len(data) + 16


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 150)), max_size=40), st.integers(1, 4))
def test_no_nonce_is_used_twice_with_a_key(batches: list[tuple[int, int, int]], ranks: int) -> None:
    clock = HandClock()
    ring = KeyRing(max_age_s=AGE, clock=clock, seals_per_key=12)
    binding = TierBinding(tier_uid="t", volume_id="v")
    seen: set[tuple[int, bytes]] = set()
    total = 0
    room, plain = memoryview(bytearray(64)), memoryview(bytes(16))
    try:
        for tenant, blocks, pause in batches:
            clock.now += pause
            number = ring.current(ring.tenant_space(bytes([tenant])), blocks * ranks)
            first = ring.reserve_counters(blocks)
            recorder = _NonceRecorder()
            seals = [SlotSeal(number, slot=3, generation=1, counter=first + k) for k in range(blocks)]
            for rank in range(ranks):
                seal_slots(
                    recorder,  # type: ignore[arg-type]
                    binding,
                    seals,
                    rank=rank,
                    plains=[plain] * blocks,
                    rooms=[room] * blocks,
                )
            assert all(len(nonce) == 12 for nonce in recorder.nonces)
            seen.update((number, nonce) for nonce in recorder.nonces)
            total += len(recorder.nonces)
    finally:
        ring.close()
    assert len(seen) == total


def test_counters_reserved_by_many_threads_at_once_are_all_different() -> None:
    ring = KeyRing(max_age_s=AGE, clock=HandClock())
    taken: list[range] = []

    def reserve() -> None:
        for count in range(1, 200):
            first = ring.reserve_counters(count)
            taken.append(range(first, first + count))

    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring.close()
    numbers = [number for span in taken for number in span]
    assert len(numbers) == len(set(numbers)) == 4 * sum(range(1, 200))


def test_counters_end_before_they_would_repeat() -> None:
    ring = KeyRing(max_age_s=AGE, clock=HandClock())
    ring._next_counter = (1 << 64) - 2
    assert ring.reserve_counters(2) == (1 << 64) - 2
    with pytest.raises(EngineError, match="nonces"):
        ring.reserve_counters(1)
    ring.close()


def test_a_key_is_replaced_after_so_many_seals() -> None:
    ring = KeyRing(max_age_s=AGE, clock=HandClock(), seals_per_key=10)
    space = ring.tenant_space(b"a")
    first = ring.current(space, 6)
    assert ring.current(space, 4) == first
    assert ring.current(space, 1) != first
    ring.close()


def test_each_tenant_and_each_epoch_has_a_key_of_its_own(clock: HandClock) -> None:
    ring = KeyRing(max_age_s=AGE, clock=clock)
    a, b = ring.tenant_space(b"a"), ring.tenant_space(b"b")
    assert a != b != ring.tenant_space(None) != ring.tenant_space(b"")
    numbers = [ring.current(a, 1), ring.current(b, 1)]
    assert ring.current(a, 1) == numbers[0]
    clock.now += 100
    numbers.append(ring.current(a, 1))
    assert len(set(numbers)) == 3
    raw = [bytes(ring._memory.view(ring._by_number[number].cell)) for number in numbers]
    assert len(set(raw)) == 3
    ring.close()


def test_a_block_of_a_batch_has_the_name_that_it_has_alone() -> None:
    ring = KeyRing(max_age_s=AGE, clock=HandClock())
    spaces = [ring.tenant_space(tenant) for tenant in (b"a", b"b")]
    keys = [bytes([k]) * k for k in range(40)]
    names = [ring.block_digests(space, keys) for space in spaces]
    assert names == [[ring.block_digest(space, key) for key in keys] for space in spaces]
    assert len({*names[0], *names[1]}) == 80
    ring.close()


def test_two_rings_share_neither_keys_nor_names() -> None:
    one, two = (KeyRing(max_age_s=AGE, clock=HandClock()) for _ in range(2))
    assert one.tenant_space(b"a") != two.tenant_space(b"a")
    space = bytes(16)
    assert one.block_digest(space, b"hash") != two.block_digest(space, b"hash")
    one.close()
    two.close()


@settings(max_examples=60)
@given(st.lists(st.floats(0, 250), min_size=1, max_size=30))
def test_no_key_is_readable_once_a_block_under_it_may_have_come_of_age(pauses: list[float]) -> None:
    clock = HandClock()
    ring = KeyRing(max_age_s=AGE, clock=clock)
    space = ring.tenant_space(b"a")
    born: dict[int, float] = {}
    for pause in pauses:
        clock.now += pause
        born.setdefault(ring.current(space, 1), clock.now)
        for number, when in born.items():
            age = clock.now - when
            assert not (age >= AGE and ring.readable(number))
            assert age >= AGE * 6 / 8 or ring.readable(number)  # and not much too early
    ring.close()


def test_dropping_zeroes_the_key_where_it_stood_and_tells_its_number(clock: HandClock) -> None:
    ring = KeyRing(max_age_s=AGE, clock=clock)
    a, b = ring.tenant_space(b"a"), ring.tenant_space(b"b")
    gone, kept = ring.current(a, 1), ring.current(b, 1)
    view = ring._memory.view(ring._by_number[gone].cell)
    assert bytes(view) != bytes(32)
    assert ring.drop_space(a) == [gone]
    assert bytes(view) == bytes(32)
    with ring.cipher(gone) as aead:
        assert aead is None
    with ring.cipher(kept) as aead:
        assert aead is not None
    ring.close()


def test_dropping_waits_for_the_cipher_in_use(clock: HandClock) -> None:
    ring = KeyRing(max_age_s=AGE, clock=clock)
    space = ring.tenant_space(b"a")
    number = ring.current(space, 1)
    dropped = threading.Event()

    def drop() -> None:
        ring.drop_space(space)
        dropped.set()

    thread = threading.Thread(target=drop)
    with ring.cipher(number) as aead:
        assert aead is not None
        thread.start()
        assert not dropped.wait(0.1)
        with ring.cipher(number) as again:
            assert again is None or not ring._by_number[number].dropped
    thread.join(120)
    assert dropped.is_set()
    ring.close()


def test_close_leaves_no_key_and_makes_none(clock: HandClock) -> None:
    ring = KeyRing(max_age_s=AGE, clock=clock)
    space = ring.tenant_space(b"a")
    ring.current(space, 1)
    view = ring._memory.view(0)
    ring.close()
    assert bytes(view) == bytes(32)
    assert ring.keys == 0
    with pytest.raises(EngineError):
        ring.current(space, 1)
