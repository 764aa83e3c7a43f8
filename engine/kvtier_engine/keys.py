"""The key ring: one data key per (tenant space, epoch); dropping a key is what erases.

Hierarchy. There is no master key. When a store opens, it draws one secret (for the digests that name keys and
tenants) and, as blocks arrive, one random AES-256 key per (tenant space, epoch). An epoch is an eighth of the maximum
age. All of it lives in `key_memory` and ends with the process: a new process has new keys and can read nothing old.

Nonces. A 96-bit nonce is the rank (32 bits) and a counter (64 bits) that one ring counts up over all its keys, so a
(key, nonce) pair is used once: the counter never repeats within a ring, ranks differ, and no key is in two rings.
A key that has sealed 2**32 blocks is replaced.

Age. A key of epoch k holds blocks that arrived in [k*e, (k+1)*e) with e = max_age/8. It is unreadable, and then
dropped, `margin` before k*e + max_age, so that a late timer still drops it in time.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier_api.errors import EngineError
from kvtier_engine.clock import Clock
from kvtier_engine.key_memory import KeyMemory

__all__ = ["EPOCHS_PER_AGE", "KeyRing", "RingInChild"]

EPOCHS_PER_AGE: Final = 8
_MAX_MARGIN_S: Final = 2.0
_DIGEST_BYTES: Final = 16
_KEY_NUMBERS: Final = 1 << 32  # key numbers are kept per slot in 32 bits
_SEALS_PER_KEY: Final = 1 << 32
_COUNTERS: Final = 1 << 64


class RingInChild(EngineError):
    """A forked child asked for a key. It has none: open a store of its own instead."""


class _DataKey:
    __slots__ = ("cell", "deadline", "dropped", "epoch", "number", "seals", "space", "users")

    def __init__(self, number: int, space: bytes, epoch: int, deadline: float, cell: int) -> None:
        self.number = number
        self.space = space
        self.epoch = epoch
        self.deadline = deadline
        self.cell = cell
        self.seals = 0
        self.users = 0
        self.dropped = False


class KeyRing:
    """Thread-safe. `max_age_s` in seconds; `clock` counts seconds and never goes back."""

    def __init__(self, *, max_age_s: float, clock: Clock, seals_per_key: int = _SEALS_PER_KEY) -> None:
        self.epoch_s = max_age_s / EPOCHS_PER_AGE
        self.margin_s = min(self.epoch_s / 4, _MAX_MARGIN_S)
        self._max_age_s = max_age_s
        self._clock = clock
        self._seals_per_key = seals_per_key
        self._memory = KeyMemory()
        self._secret = self._memory.view(self._memory.new())
        self._by_number: dict[int, _DataKey] = {}
        self._current: dict[tuple[bytes, int], _DataKey] = {}
        self._next_number = 1
        self._next_counter = 0
        self._users = 0
        self._pid = os.getpid()
        self._closed = False
        self._forking = False
        self._changed = threading.Condition(threading.Lock())

    # Names: digests keyed with a secret of this process, because a raw block hash is an oracle for prompts.

    def tenant_space(self, tenant: bytes | None) -> bytes:
        """The 16-byte name of a tenant's key space; `None` is the one space of requests without a tenant."""
        self._refuse_child()
        data = b"n" if tenant is None else b"t" + tenant
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=self._secret, person=b"kvtier space").digest()

    def block_digest(self, space: bytes, key: bytes) -> bytes:
        """The 16-byte name under which the index knows `key` of one tenant space."""
        return self.block_digests(space, (key,))[0]

    def block_digests(self, space: bytes, keys: Iterable[bytes]) -> list[bytes]:
        """As `block_digest`, for a batch: the secret is taken in once, by a state that lives for this call."""
        keyed = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=self._secret, salt=space, person=b"kvtier block")
        digests = []
        for key in keys:
            state = keyed.copy()
            state.update(key)
            digests.append(state.digest())
        return digests

    # Keys.

    def current(self, space: bytes, blocks: int) -> int:
        """The number of the key that seals `blocks` blocks arriving now in `space`; made when there is none yet.

        Raises EngineError when no memory can be locked for it, RingInChild in a forked child.
        """
        self._refuse_child()
        epoch = math.floor(self._clock() / self.epoch_s)
        with self._changed:
            if self._closed:
                raise EngineError("the key ring is closed", obj="KeyRing", remedy="open a new store")
            key = self._current.get((space, epoch))
            if key is None or key.seals + blocks > self._seals_per_key:
                if self._next_number >= _KEY_NUMBERS:
                    raise EngineError("out of key numbers", obj="KeyRing", remedy="open a new store")
                deadline = epoch * self.epoch_s + self._max_age_s - self.margin_s
                key = _DataKey(self._next_number, space, epoch, deadline, self._memory.new())
                self._next_number += 1
                self._by_number[key.number] = key
                self._current[space, epoch] = key
            key.seals += blocks
            return key.number

    def reserve_counters(self, blocks: int) -> int:
        """The first of `blocks` consecutive counters that nobody else gets."""
        with self._changed:
            first = self._next_counter
            if first + blocks > _COUNTERS:
                raise EngineError("out of nonces", obj="KeyRing", remedy="open a new store")
            self._next_counter += blocks
            return first

    def readable(self, number: int) -> bool:
        """True while the key exists and no block under it can be older than the maximum age."""
        key = self._by_number.get(number)
        return key is not None and not key.dropped and self._clock() < key.deadline

    def epoch_of(self, number: int) -> int:
        """The key's epoch; -1 once it was dropped."""
        key = self._by_number.get(number)
        return -1 if key is None else key.epoch

    @contextmanager
    def cipher(self, number: int) -> Iterator[AESGCM | None]:
        """The key's cipher for one task; None when the key is gone. Keep no reference after the block."""
        self._refuse_child()
        with self._changed:
            while self._forking:
                self._changed.wait()
            key = self._by_number.get(number)
            if key is None or key.dropped or self._clock() >= key.deadline:
                key = None
            else:
                key.users += 1
                self._users += 1
        if key is None:
            yield None
            return
        aead: AESGCM | None = None
        try:
            aead = AESGCM(self._memory.view(key.cell))
            yield aead
        finally:
            del aead
            with self._changed:
                key.users -= 1
                self._users -= 1
                if not key.users:
                    self._changed.notify_all()

    # Dropping.

    def _drop(self, matches: Callable[[_DataKey], bool]) -> list[int]:
        """Destroy each key that matches; returns their numbers.

        From the call on no task can begin to use them; on return no expanded copy is left and the cells are zero.
        """
        with self._changed:
            doomed = [key for key in self._by_number.values() if matches(key)]
            for key in doomed:
                key.dropped = True
                if self._current.get((key.space, key.epoch)) is key:
                    del self._current[key.space, key.epoch]
            for key in doomed:
                while key.users:
                    self._changed.wait()
                if self._by_number.pop(key.number, None) is not None:
                    self._memory.wipe(key.cell)
            return [key.number for key in doomed]

    def drop_space(self, space: bytes) -> list[int]:
        """Destroy every key of one tenant space: that tenant's blocks are erased."""
        return self._drop(lambda key: key.space == space)

    def drop_all(self) -> list[int]:
        """Destroy every key."""
        return self._drop(lambda _key: True)

    def drop_expired(self) -> list[int]:
        """Destroy the keys whose deadline has come."""
        now = self._clock()
        return self._drop(lambda key: key.deadline <= now)

    def drop_older_than(self, age_s: float) -> list[int]:
        """Destroy every key that may hold a block older than `age_s`. Younger blocks of the same epoch go with them."""
        limit = self._clock() - age_s
        return self._drop(lambda key: key.epoch * self.epoch_s < limit)

    def close(self) -> None:
        """Destroy every key and the secret. The ring makes no key afterwards."""
        with self._changed:
            self._closed = True
        self.drop_all()
        with self._changed:
            self._memory.wipe_all()

    @property
    def keys(self) -> int:
        return len(self._by_number)

    @property
    def locked_bytes(self) -> int:
        return self._memory.locked_bytes

    def oldest_epoch_start(self) -> float | None:
        """Clock time in seconds at which the oldest epoch with a key began; None without keys."""
        with self._changed:
            return min((key.epoch * self.epoch_s for key in self._by_number.values()), default=None)

    # Fork: a child must hold neither raw keys (the kernel wipes those) nor expanded ones.

    def _refuse_child(self) -> None:
        if os.getpid() != self._pid:
            raise RingInChild("a forked child holds no keys", obj="KeyRing", remedy="open a store in the child itself")

    def before_fork(self) -> None:
        """Hold every new use of a key, and wait until no expanded copy exists."""
        self._changed.acquire()
        self._forking = True
        while self._users:
            self._changed.wait()

    def after_fork_in_parent(self) -> None:
        self._forking = False
        self._changed.notify_all()
        self._changed.release()

    def after_fork_in_child(self) -> None:
        """Forget everything. The locked cells are zeros already (MADV_WIPEONFORK)."""
        self._memory.wipe_all()
        self._by_number.clear()
        self._current.clear()
        self._closed = True
        self._changed = threading.Condition(threading.Lock())
