"""The slot index: which block stands in which slot, what opens it, and which slots are free. In memory only.

One record per slot in flat arrays: digest 16 bytes, tags 16 per rank, counter 8, key number 4, generation 4, state 1,
readers 2, pins 2, links 8, list 1, table entries 16, free list 4; ARC adds 45 for its ghosts. Not thread-safe: the store
calls it under its lock. Blocks of one run stand in adjacent slots, so most of what is done to them is one slice of each
array, not a loop.

States: FREE → WRITING (taken for a store) → READY (all ranks written; findable) → FREE, or DOOMED while it is still
being read: no longer findable, not yet reusable.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, Literal

import numpy as np

from kvtier_engine.eviction import make_policy
from kvtier_engine.sealing import TAG_BYTES, SlotSeal

__all__ = ["SlotIndex"]

_FREE: Final = 0
_WRITING: Final = 1
_READY: Final = 2
_DOOMED: Final = 3
_QUARANTINED: Final = 4
_MOST: Final = (1 << 16) - 1
_GENERATIONS: Final = (1 << 32) - 1


class SlotIndex:
    """`slots` slots of `ranks` files. Evicts by `policy`."""

    def __init__(self, *, slots: int, ranks: int, policy: Literal["lru", "arc"], sealed: bool = True) -> None:
        self.slots = slots
        self.ready = 0
        self.evictions = 0
        self._ranks = ranks
        self._tag_bytes = TAG_BYTES if sealed else 0
        self._policy, self._table = make_policy(policy, slots)
        self._counters = array("Q", [0]) * slots
        self._keys = array("I", [0]) * slots
        self._generations = array("I", [0]) * slots
        self._tags = bytearray(self._tag_bytes * ranks * slots)
        self._states = bytearray(slots)
        self._readers = array("H", [0]) * slots
        self._pins = array("H", [0]) * slots
        self._free = array("I", range(slots - 1, -1, -1))
        self.quarantined = 0

    @property
    def free(self) -> int:
        return len(self._free)

    # Finding.

    def find(self, digest: bytes) -> int:
        """The READY slot of a block; -1 when there is none."""
        node = self._table.find(digest)
        return node if node < self.slots else -1

    def find_each(self, digests: Sequence[bytes]) -> list[int]:
        """As `find`, for a batch."""
        slots = self.slots
        return [node if node < slots else -1 for node in self._table.find_each(digests)]

    def seal(self, slot: int) -> SlotSeal:
        return SlotSeal(self._keys[slot], slot, self._generations[slot], self._counters[slot])

    def seals(self, first: int, count: int) -> list[SlotSeal]:
        """As `seal`, for adjacent slots."""
        end = first + count
        fields = zip(
            self._keys[first:end],
            range(first, end),
            self._generations[first:end],
            self._counters[first:end],
            strict=True,
        )
        return list(map(SlotSeal._make, fields))

    def key_number(self, slot: int) -> int:
        return self._keys[slot]

    def tags(self, first: int, count: int) -> list[list[bytes]]:
        """The tags of adjacent slots: one list for each of this store's files."""
        size, ranks = self._tag_bytes, self._ranks
        data = bytes(self._tags[first * ranks * size : (first + count) * ranks * size])
        tags = [data[start : start + size] for start in range(0, len(data), size)] if size else [b""] * (count * ranks)
        return [tags[position::ranks] for position in range(ranks)]

    def touch(self, slot: int) -> None:
        self._policy.touched((slot,))

    def touch_each(self, slots: Sequence[int]) -> None:
        """As `touch`, in this order."""
        self._policy.touched(slots)

    # Storing.

    def allocate(self, count: int) -> list[int]:
        """Up to `count` slots for writing, ascending, so that a batch stands together; evicts when none is free."""
        taken = self._free[max(0, len(self._free) - count) :].tolist()
        del self._free[len(self._free) - len(taken) :]
        if len(taken) < count:
            victims = []
            for slot in self._policy.victims():
                if not self._readers[slot] and not self._pins[slot]:
                    victims.append(slot)
                    if len(taken) + len(victims) == count:
                        break
            for slot in victims:
                digest = self._table.digest(slot)
                self._table.remove(digest)
                self._policy.evicted(slot, digest)
            self.ready -= len(victims)
            self.evictions += len(victims)
            taken += victims
        taken.sort()
        states, generations = self._states, self._generations
        for slot in taken:  # counted up before the first byte is written
            states[slot] = _WRITING
            generations[slot] = generations[slot] + 1 & _GENERATIONS
        return taken

    def describe(self, first: int, count: int, *, key_number: int, counter: int) -> list[SlotSeal]:
        """Note what the blocks being written into adjacent slots are sealed with: counters go up from `counter`."""
        end = first + count
        self._keys[first:end] = array("I", (key_number,)) * count
        self._counters[first:end] = array("Q", range(counter, counter + count))
        return self.seals(first, count)

    def commit(self, first: int, digests: Sequence[bytes], tags: Sequence[Sequence[bytes]]) -> None:
        """All ranks of adjacent slots are written: their blocks are findable. Older ones of the same names go.

        `tags`: one list for each file, as `tags` gives it. The digests differ.
        """
        for old in self.find_each(digests):
            if old >= 0:
                self.discard(old)
        count = len(digests)
        end, size = first + count, self._ranks * self._tag_bytes
        flat = tags[0] if self._ranks == 1 else chain.from_iterable(zip(*tags, strict=True))
        self._tags[first * size : end * size] = b"".join(flat)
        self._policy.admitted(first, digests)
        self._table.insert_each(digests, first)
        self._states[first:end] = bytes((_READY,)) * count
        self._pins[first:end] = array("H", (0,)) * count
        self.ready += count

    def release(self, slots: Iterable[int]) -> None:
        """Give back slots taken by `allocate` that will not be committed."""
        for slot in slots:
            self._states[slot] = _FREE
            self._free.append(slot)

    # Removing.

    def discard(self, slot: int) -> None:
        """Forget the READY block in `slot`; the slot is reused once nobody reads it."""
        if self._states[slot] != _READY:
            return
        self._table.remove(self._table.digest(slot))
        self._policy.removed(slot)
        self.ready -= 1
        self._pins[slot] = 0
        if self._readers[slot]:
            self._states[slot] = _DOOMED
        else:
            self._states[slot] = _FREE
            self._free.append(slot)

    def hold(self, slot: int) -> bool:
        """Begin to read a READY slot: it is not reused before `unhold`. False when too many read it already."""
        if self._readers[slot] == _MOST:
            return False
        self._readers[slot] += 1
        return True

    def unhold(self, slots: Iterable[int]) -> None:
        readers, states = self._readers, self._states
        for slot in slots:
            readers[slot] = left = readers[slot] - 1
            if not left and states[slot] == _DOOMED:
                states[slot] = _FREE
                self._free.append(slot)

    def quarantine(self, slot: int) -> bool:
        """Keep a FREE slot that failed from being taken; False when it is not free."""
        if self._states[slot] != _FREE:
            return False
        self._free.remove(slot)
        self._states[slot] = _QUARANTINED
        self.quarantined += 1
        return True

    def end_quarantine(self, slot: int) -> None:
        """Let the slot be taken again, after all that are free now."""
        self._states[slot] = _FREE
        self._free.insert(0, slot)
        self.quarantined -= 1

    def pin(self, slot: int) -> bool:
        """Keep a READY block from eviction (not from erasure). False when it is pinned too often already."""
        if self._pins[slot] == _MOST:
            return False
        self._pins[slot] += 1
        return True

    def unpin(self, slot: int) -> None:
        if self._pins[slot]:
            self._pins[slot] -= 1

    def under_keys(self, numbers: list[int], first: int, count: int) -> list[int]:
        """The READY slots among `count` from `first` whose key is one of `numbers`."""
        keys = np.frombuffer(self._keys, np.uint32)[first : first + count]
        found = np.flatnonzero(np.isin(keys, numbers))
        return [slot for slot in (found + first).tolist() if self._states[slot] == _READY]

    def sort_free(self) -> None:
        """Order the free slots, so that batches stand together again after many were freed."""
        np.frombuffer(self._free, np.uint32).sort()
        self._free.reverse()
