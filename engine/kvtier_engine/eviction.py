"""Which block goes when a slot is needed: LRU, or ARC (Megiddo and Modha, FAST 2003).

Policies order node numbers in linked lists that live in flat arrays. They know neither slots' contents nor locks; the
index calls them under its lock. ARC remembers the digests of blocks that it evicted ("ghosts") as nodes of their own,
`slots` … 2*slots-1. Departures from the paper: a ghost hit adapts when the block is stored, not when it is missed
(the store sees no miss that is not looked up), and the order of victims is fixed for the length of one batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, Protocol

from kvtier_engine.digest_table import DigestTable

__all__ = ["Arc", "EvictionPolicy", "Lru", "NodeLists", "make_policy"]


class NodeLists:
    """`lists` doubly linked lists over the nodes 0 … nodes-1; each node is in one list or in none."""

    def __init__(self, nodes: int, lists: int) -> None:
        self._nodes = nodes
        ends = range(nodes, nodes + lists)
        self._next = array("I", [0]) * nodes + array("I", ends)
        self._previous = array("I", [0]) * nodes + array("I", ends)
        self._member = bytearray(nodes)  # list number + 1; 0 for none
        self.lengths = [0] * lists

    def list_of(self, node: int) -> int:
        """The number of the list that holds `node`; -1 for none."""
        return self._member[node] - 1

    def push(self, number: int, node: int) -> None:
        """Put a node that is in no list at the recent end of a list."""
        end = self._nodes + number
        first = self._next[end]
        self._next[node], self._previous[node] = first, end
        self._next[end] = self._previous[first] = node
        self._member[node] = number + 1
        self.lengths[number] += 1

    def push_row(self, number: int, first: int, count: int) -> None:
        """As `push` for the nodes `first`, `first`+1, … in this order."""
        end, last = self._nodes + number, first + count - 1
        before = self._next[end]
        # The last pushed is the most recent: each node's next is its lower neighbour.
        self._next[first : last + 1] = array("I", (before, *range(first, last)))
        self._previous[first : last + 1] = array("I", (*range(first + 1, last + 1), end))
        self._next[end], self._previous[before] = last, first
        self._member[first : last + 1] = bytes((number + 1,)) * count
        self.lengths[number] += count

    def renew(self, number: int, nodes: Iterable[int]) -> None:
        """Put nodes of this list at its recent end, in this order."""
        following, previous = self._next, self._previous
        end = self._nodes + number
        for node in nodes:
            after, before = following[node], previous[node]
            following[before], previous[after] = after, before
            first = following[end]
            following[node], previous[node] = first, end
            following[end] = previous[first] = node

    def take(self, node: int) -> None:
        """Take a node out of its list."""
        following, previous = self._next[node], self._previous[node]
        self._next[previous], self._previous[following] = following, previous
        self.lengths[self._member[node] - 1] -= 1
        self._member[node] = 0

    def oldest(self, number: int) -> int:
        """The node at the old end; -1 when the list is empty."""
        node = self._previous[self._nodes + number]
        return node if node < self._nodes else -1

    def from_oldest(self, number: int) -> Iterator[int]:
        """From the old end to the recent end. Taking out the node just yielded is allowed."""
        node = self._previous[self._nodes + number]
        while node < self._nodes:
            previous = self._previous[node]
            yield node
            node = previous


class EvictionPolicy(Protocol):
    """What the index asks of a policy. `nodes` is how many node numbers it uses, ghosts included."""

    nodes: int

    def admitted(self, first: int, digests: Sequence[bytes]) -> None:
        """Blocks that no slot held came to stand in the slots from `first` on; the caller then inserts their digests."""

    def touched(self, slots: Iterable[int]) -> None:
        """The blocks in `slots` were used, in this order."""

    def removed(self, slot: int) -> None:
        """The block in `slot` is gone for another reason than eviction."""

    def victims(self) -> Iterator[int]:
        """Slots in the order in which they should go. The caller may skip some (slots being read)."""

    def evicted(self, slot: int, digest: bytes) -> None:
        """The block in `slot` was evicted; the caller has removed its digest from the table."""


class Lru:
    """Least recently used goes first."""

    def __init__(self, slots: int) -> None:
        self.nodes = slots
        self._lists = NodeLists(slots, 1)

    def admitted(self, first: int, digests: Sequence[bytes]) -> None:
        self._lists.push_row(0, first, len(digests))

    def touched(self, slots: Iterable[int]) -> None:
        self._lists.renew(0, slots)

    def removed(self, slot: int) -> None:
        self._lists.take(slot)

    def victims(self) -> Iterator[int]:
        return self._lists.from_oldest(0)

    def evicted(self, slot: int, digest: bytes) -> None:  # noqa: ARG002
        self._lists.take(slot)


_T1: Final = 0  # seen once
_T2: Final = 1  # seen again
_B1: Final = 2  # ghosts of _T1
_B2: Final = 3  # ghosts of _T2


class Arc:
    """Adapts between recency and frequency; a scan does not push out what is used often."""

    def __init__(self, slots: int, table: DigestTable) -> None:
        self.nodes = 2 * slots
        self._slots = slots
        self._table = table
        self._lists = NodeLists(self.nodes, 4)
        self._free_ghosts = array("I", range(self.nodes - 1, slots - 1, -1))
        self.target = 0.0  # of _T1, in slots ("p" in the paper)

    def admitted(self, first: int, digests: Sequence[bytes]) -> None:
        for slot, digest in enumerate(digests, first):
            self._admit(slot, digest)

    def _admit(self, slot: int, digest: bytes) -> None:
        lists = self._lists
        ghost = self._table.find(digest)
        if ghost < 0:
            lists.push(_T1, slot)
            self._bound_ghosts()
            return
        kind = lists.list_of(ghost)
        ones, twos = max(lists.lengths[_B1], 1), max(lists.lengths[_B2], 1)
        if kind == _B1:
            self.target = min(float(self._slots), self.target + max(1.0, twos / ones))
        else:
            self.target = max(0.0, self.target - max(1.0, ones / twos))
        self._forget(ghost)
        lists.push(_T2, slot)

    def touched(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._lists.take(slot)
            self._lists.push(_T2, slot)

    def removed(self, slot: int) -> None:
        self._lists.take(slot)

    def victims(self) -> Iterator[int]:
        once, again = self._lists.from_oldest(_T1), self._lists.from_oldest(_T2)
        ones = self._lists.lengths[_T1]
        while True:
            first, second = (once, again) if ones and ones > self.target else (again, once)
            slot = next(first, -1)
            if slot < 0:
                yield from second
                return
            if first is once:
                ones -= 1
            yield slot

    def evicted(self, slot: int, digest: bytes) -> None:
        lists = self._lists
        kind = _B1 if lists.list_of(slot) == _T1 else _B2
        lists.take(slot)
        if not self._free_ghosts:
            self._forget(lists.oldest(_B1 if lists.lengths[_B1] else _B2))
        ghost = self._free_ghosts.pop()
        self._table.insert(digest, ghost)
        lists.push(kind, ghost)

    def _bound_ghosts(self) -> None:
        lengths = self._lists.lengths
        while lengths[_B1] and lengths[_T1] + lengths[_B1] > self._slots:
            self._forget(self._lists.oldest(_B1))

    def _forget(self, ghost: int) -> None:
        self._table.remove(self._table.digest(ghost))
        self._lists.take(ghost)
        self._free_ghosts.append(ghost)


def make_policy(name: Literal["lru", "arc"], slots: int) -> tuple[EvictionPolicy, DigestTable]:
    """The policy and the table that it shares with the index."""
    if name == "lru":
        return Lru(slots), DigestTable(slots)
    table = DigestTable(2 * slots)
    return Arc(slots, table), table
