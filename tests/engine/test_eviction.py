"""LRU and ARC, through the index that uses them."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_engine.eviction import Arc, NodeLists
from kvtier_engine.index import SlotIndex

Policy = Literal["lru", "arc"]


def _digest(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % (1 << 128)).to_bytes(16, "little")


def _store(index: SlotIndex, number: int) -> None:
    (slot,) = index.allocate(1)
    index.describe(slot, 1, key_number=1, counter=0)
    index.commit(slot, [_digest(number)], [[bytes(16)]])


def _use(index: SlotIndex, number: int) -> bool:
    slot = index.find(_digest(number))
    if slot < 0:
        _store(index, number)
        return False
    index.touch(slot)
    return True


@settings(max_examples=150)
@given(st.lists(st.integers(0, 12), max_size=120))
def test_lru_keeps_what_was_used_last(uses: list[int]) -> None:
    index, model = SlotIndex(slots=5, ranks=1, policy="lru"), OrderedDict[int, None]()
    for number in uses:
        assert _use(index, number) == (number in model)
        model[number] = None
        model.move_to_end(number)
        if len(model) > 5:
            model.popitem(last=False)
    assert [index.find(_digest(number)) >= 0 for number in range(13)] == [number in model for number in range(13)]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 6), st.integers(0, 2)), max_size=40))
def test_rows_of_nodes_stand_in_the_list_as_if_pushed_one_by_one(steps: list[tuple[int, int, int]]) -> None:
    lists, model = NodeLists(16, 2), list[int]()  # the model: oldest first
    for first, count, act in steps:
        nodes = range(first, min(first + count, 16))
        if act == 0 and not set(nodes) & set(model):
            lists.push_row(1, first, len(nodes))
            model += nodes
        elif act == 1:
            known = [node for node in reversed(nodes) if node in model]
            lists.renew(1, known)
            model = [node for node in model if node not in known] + known
        elif act == 2 and first in model:
            lists.take(first)
            model.remove(first)
        assert list(lists.from_oldest(1)) == model
        assert lists.lengths == [0, len(model)]
        assert [lists.list_of(node) for node in range(16)] == [1 if node in model else -1 for node in range(16)]
        assert lists.oldest(1) == (model[0] if model else -1)
        assert lists.oldest(0) == -1


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=200))
def test_arc_keeps_its_lists_within_bounds(uses: list[tuple[int, bool]]) -> None:
    index = SlotIndex(slots=6, ranks=1, policy="arc")
    policy = index._policy
    assert isinstance(policy, Arc)
    for number, discard in uses:
        if discard and (slot := index.find(_digest(number))) >= 0:
            index.discard(slot)
        else:
            _use(index, number)
        once, again, once_ghosts, again_ghosts = policy._lists.lengths
        assert once + again == index.ready <= 6
        assert once + once_ghosts <= 6
        assert once_ghosts + again_ghosts <= 6
        assert 0 <= policy.target <= 6
        assert index.ready + index.free == 6


def test_a_scan_pushes_out_what_is_used_often_with_lru_but_not_with_arc() -> None:
    hits = {}
    for policy in ("lru", "arc"):
        index = SlotIndex(slots=64, ranks=1, policy=policy)  # type: ignore[arg-type]
        for _ in range(4):
            for number in range(32):
                _use(index, number)
        for number in range(1000, 1400):
            _use(index, number)
        hits[policy] = sum(index.find(_digest(number)) >= 0 for number in range(32))
    assert hits["lru"] == 0
    assert hits["arc"] == 32


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_slot_being_read_or_pinned_is_never_chosen(policy: Policy) -> None:
    index = SlotIndex(slots=4, ranks=1, policy=policy)
    for number in range(4):
        _store(index, number)
    read, pinned = index.find(_digest(0)), index.find(_digest(1))
    assert index.hold(read)
    assert index.pin(pinned)
    assert sorted(index.allocate(4)) == sorted({0, 1, 2, 3} - {read, pinned})
    assert index.find(_digest(0)) == read
    assert index.find(_digest(1)) == pinned


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_batch_gets_slots_that_stand_together_also_once_the_store_is_full(policy: Policy) -> None:
    index = SlotIndex(slots=32, ranks=1, policy=policy)
    for first in range(0, 96, 8):
        slots = index.allocate(8)
        assert slots == list(range(slots[0], slots[0] + 8))
        index.describe(slots[0], 8, key_number=1, counter=0)
        index.commit(slots[0], [_digest(first + k) for k in range(8)], [[bytes(16)] * 8])


_FULL_INDEX = """
import os, sys
from kvtier_engine.index import SlotIndex
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
policy, ranks, slots = sys.argv[1], int(sys.argv[2]), 200_000
tags = [[bytes(16)]] * ranks
before = resident()
index = SlotIndex(slots=slots, ranks=ranks, policy=policy)
number = 0
for turn in range(2):  # the second turn evicts everything, and fills ARC's ghost lists
    for first in range(0, slots, 1000):
        for slot in index.allocate(1000):
            number += 1
            index.describe(slot, 1, key_number=1, counter=number)
            index.commit(slot, [(number * 0x9E3779B97F4A7C15).to_bytes(16, "little")], tags)
assert index.ready == slots
print((resident() - before) / slots)
"""


@pytest.mark.parametrize(("policy", "ranks"), [("lru", 1), ("arc", 1), ("lru", 8)])
def test_the_index_takes_at_most_200_bytes_a_slot_when_full(policy: Policy, ranks: int) -> None:
    command = [sys.executable, "-c", _FULL_INDEX, policy, str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < float(done.stdout) <= 200
