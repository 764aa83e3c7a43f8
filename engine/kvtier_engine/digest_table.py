"""A compact hash table from 16-byte digests to node numbers: 32 bytes a node where a dict takes about 200.

Open addressing with linear probing over 64-bit entries (32 bits of the digest, node number + 1), at most half
full, with backward shifts instead of tombstones. The digests themselves stand in one bytearray, by node. Digests are
keyed hashes, so their bits are uniform and an outsider cannot choose colliding ones. Not thread-safe.

Batches go through one loop each, with everything in local names: at 64 KiB a block the interpreter is what costs.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

__all__ = ["DIGEST_BYTES", "DigestTable"]

DIGEST_BYTES: Final = 16
_NODE_MASK: Final = (1 << 32) - 1
_FINGERPRINT_BYTES: Final = 4


def _fingerprint(digest: bytes) -> int:
    return int.from_bytes(digest[:_FINGERPRINT_BYTES], sys.byteorder)


def _fingerprints(digests: Sequence[bytes]) -> array[int]:
    return array("I", b"".join(digests))[:: DIGEST_BYTES // _FINGERPRINT_BYTES]


class DigestTable:
    """Holds each of the nodes 0 … nodes-1 at most once."""

    def __init__(self, nodes: int) -> None:
        self._capacity = 2 * nodes + 2
        self._entries = array("Q", [0]) * self._capacity
        self._digests = bytearray(DIGEST_BYTES * nodes)

    def digest(self, node: int) -> bytes:
        """The digest under which `node` was last inserted."""
        return bytes(self._digests[node * DIGEST_BYTES : (node + 1) * DIGEST_BYTES])

    def find(self, digest: bytes) -> int:
        """The node with this digest, or -1."""
        position = self._position(digest)
        return -1 if position < 0 else (self._entries[position] & _NODE_MASK) - 1

    def find_each(self, digests: Sequence[bytes]) -> list[int]:
        """For each digest its node, or -1."""
        entries, kept, capacity = self._entries, self._digests, self._capacity
        nodes = []
        for digest, fingerprint in zip(digests, _fingerprints(digests), strict=True):
            position = fingerprint * capacity >> 32
            node = -1
            while entry := entries[position]:
                if entry >> 32 == fingerprint:
                    start = ((entry & _NODE_MASK) - 1) * DIGEST_BYTES
                    if kept[start : start + DIGEST_BYTES] == digest:
                        node = (entry & _NODE_MASK) - 1
                        break
                position += 1
                if position == capacity:
                    position = 0
            nodes.append(node)
        return nodes

    def _position(self, digest: bytes) -> int:
        fingerprint = _fingerprint(digest)
        position = fingerprint * self._capacity >> 32
        entries, digests = self._entries, self._digests
        while entry := entries[position]:
            if entry >> 32 == fingerprint:
                start = ((entry & _NODE_MASK) - 1) * DIGEST_BYTES
                if digests[start : start + DIGEST_BYTES] == digest:
                    return position
            position += 1
            if position == self._capacity:
                position = 0
        return -1

    def insert(self, digest: bytes, node: int) -> None:
        """Add a digest that is not in the table, for a node that is not in the table."""
        self.insert_each([digest], node)

    def insert_each(self, digests: Sequence[bytes], first: int) -> None:
        """As `insert`, for the nodes from `first` on. The digests differ."""
        entries, capacity = self._entries, self._capacity
        self._digests[first * DIGEST_BYTES : (first + len(digests)) * DIGEST_BYTES] = b"".join(digests)
        for node, fingerprint in enumerate(_fingerprints(digests), first + 1):
            position = fingerprint * capacity >> 32
            while entries[position]:
                position += 1
                if position == capacity:
                    position = 0
            entries[position] = fingerprint << 32 | node

    def remove(self, digest: bytes) -> None:
        """Take a digest out; the entries behind it move up, so that no search ends too early."""
        hole = self._position(digest)
        if hole < 0:
            return
        entries, capacity = self._entries, self._capacity
        position = hole
        while True:
            position += 1
            if position == capacity:
                position = 0
            entry = entries[position]
            if not entry:
                break
            home = (entry >> 32) * capacity >> 32
            # The entry may fill the hole unless its home lies, cyclically, behind the hole and at or before it.
            if (position - home) % capacity >= (position - hole) % capacity:
                entries[hole] = entry
                hole = position
        entries[hole] = 0
