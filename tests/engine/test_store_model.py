"""The store against a dict, under any order of put, get, evict, erase, expire, pins and damage on disk."""

from __future__ import annotations

import math
import os
import tempfile
from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_material import HandClock, block
from kvtier_engine import Outcome, SlotStore, StoreConfig

SIZE = 4096
SLOTS = 6
AGE = 80.0
EPOCH = AGE / 8

TENANTS = st.sampled_from([b"a", b"b", b"c"])
KEYS = st.integers(0, 8).map(lambda number: bytes([number]))


class StoreMachine(RuleBasedStateMachine):
    """LRU and one rank, so that the model can tell exactly what is there."""

    @initialize(sealed=st.booleans())
    def open(self, sealed: bool) -> None:
        self.sealed = sealed
        self.clock = HandClock()
        descriptor, self.path = tempfile.mkstemp(prefix="kvtier-model-")
        os.posix_fallocate(descriptor, 0, SLOTS * SIZE)
        self.descriptor = descriptor
        self.store = SlotStore(
            StoreConfig(
                files=(self.path,),
                ranks=(0,),
                slot_size_bytes=SIZE,
                tier_uid="t",
                volume_id="v",
                salt_policy="Required",
                max_age_s=AGE,
                seal_slots=sealed,
                io_depth=1,
                harden_process=False,
                clock=self.clock,
            )
        )
        self.model: OrderedDict[tuple[bytes, bytes], tuple[int, float]] = OrderedDict()
        self.damaged: set[tuple[bytes, bytes]] = set()
        self.version = 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            os.close(self.descriptor)
            os.unlink(self.path)

    def _forget(self, name: tuple[bytes, bytes]) -> None:
        self.model.pop(name, None)
        self.damaged.discard(name)

    @rule(tenant=TENANTS, key=KEYS, replace=st.booleans())
    def put(self, tenant: bytes, key: bytes, replace: bool) -> None:
        self.version += 1
        outcome = self.store.put(key, [block(self.version, SIZE)], tenant=tenant, replace=replace)
        name = (tenant, key)
        if name in self.model and not replace:
            assert outcome is Outcome.PRESENT
            self.model.move_to_end(name)
            return
        assert outcome is Outcome.STORED
        # A replaced block needs a second slot for a moment, so a full store evicts its oldest for it.
        if len(self.model) == SLOTS:
            self._forget(next(iter(self.model)))
        self._forget(name)
        self.model[name] = (self.version, self.clock.now)

    @rule(tenant=TENANTS, key=KEYS)
    def get(self, tenant: bytes, key: bytes) -> None:
        room = bytearray(b"\xee" * SIZE)
        outcome = self.store.get(key, [room], tenant=tenant)
        name = (tenant, key)
        if name not in self.model:
            assert outcome is Outcome.MISS
        elif name in self.damaged:
            assert outcome is Outcome.BAD_TAG
            assert bytes(room) == bytes(SIZE)
            self._forget(name)
        else:
            assert outcome is Outcome.LOADED
            assert bytes(room) == block(self.model[name][0], SIZE)
            self.model.move_to_end(name)

    @rule(tenant=TENANTS, key=KEYS)
    def evict(self, tenant: bytes, key: bytes) -> None:
        assert self.store.evict([key], tenant=tenant) == ((tenant, key) in self.model)
        self._forget((tenant, key))

    @rule(tenant=TENANTS)
    def erase(self, tenant: bytes) -> None:
        names = [name for name in self.model if name[0] == tenant]
        assert self.store.erase(tenant) == len(names)
        for name in names:
            self._forget(name)

    @rule(seconds=st.floats(0, 60))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.expire()
        for name, (_version, born) in list(self.model.items()):
            deadline = math.floor(born / EPOCH) * EPOCH + AGE - self.store._keys.margin_s
            assert deadline < born + AGE
            if self.clock.now >= deadline:
                self._forget(name)

    @rule(tenant=TENANTS, key=KEYS, bit=st.integers(0, SIZE * 8 - 1))
    def damage(self, tenant: bytes, key: bytes, bit: int) -> None:
        name = (tenant, key)
        if not self.sealed or name not in self.model or name in self.damaged:
            return
        keys = self.store._keys
        offset = self.store._book.index.find(keys.block_digest(keys.tenant_space(tenant), key)) * SIZE + bit // 8
        byte = os.pread(self.descriptor, 1, offset)[0] ^ 1 << bit % 8
        os.pwrite(self.descriptor, bytes([byte]), offset)
        self.damaged.add(name)

    @invariant()
    def nothing_is_lost_and_every_slot_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        stats = self.store.stats()
        assert stats.ready == len(self.model)
        assert stats.ready + stats.free == SLOTS
        for name in self.model:
            assert self.store.contains(name[1], tenant=name[0])


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=30)
