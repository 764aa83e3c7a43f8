"""The books: which block stands in which slot, which is being written, read, awaited or quarantined.

One lock keeps index, keys and jobs in step. Plans are made and runs are settled here; bytes are moved elsewhere
(`transfer`), by whoever calls (`store`). Nothing here does I/O or waits for any.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Final

from kvtier_api.errors import EngineError
from kvtier_engine.config import StoreConfig
from kvtier_engine.index import SlotIndex
from kvtier_engine.jobs import Job, Outcome
from kvtier_engine.keys import KeyRing
from kvtier_engine.runs import Run, adjacent

__all__ = ["Presence", "SlotBook"]

_SWEEP_SLOTS: Final = 4096
_MOST_RUN_SLOTS: Final = 512  # fewer than IOV_MAX views in one pwritev


class Presence(Enum):
    """What `lookup` says of a block: PENDING is being written now."""

    MISS = "miss"
    PENDING = "pending"
    HIT = "hit"


class SlotBook:
    """Thread-safe. A `space` is the name of a tenant's key space (`KeyRing.tenant_space`)."""

    def __init__(self, *, config: StoreConfig, slots: int, keys: KeyRing) -> None:
        self._keys = keys
        self._clock = config.clock
        self._ranks = len(config.files)
        self._block_bytes = config.slot_size_bytes * self._ranks
        self._quarantine_s = config.quarantine_s
        self._external = config.confirm == "external"
        self.run_slots = min(max(1, config.run_bytes // config.slot_size_bytes), _MOST_RUN_SLOTS)
        self.index = SlotIndex(slots=slots, ranks=self._ranks, policy=config.eviction, sealed=config.seal_slots)
        self.lock = threading.Lock()
        self._pending: set[bytes] = set()
        self._awaiting: dict[int, list[Run]] = {}
        self._quarantine: deque[tuple[float, int]] = deque()
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.stored_bytes = 0
        self.loaded_bytes = 0
        self.keys_dropped = 0

    # Asking.

    def lookup(self, space: bytes, keys: Iterable[bytes]) -> list[Presence]:
        digests = [self._keys.block_digest(space, key) for key in keys]
        with self.lock:
            return [self._presence(digest) for digest in digests]

    def each_slot(self, space: bytes, keys: Iterable[bytes], act: Callable[[int], bool | None]) -> list[bool]:
        """Call `act` with the slot of each block that is there; True where it was and `act` did not return False."""
        found = []
        for key in keys:
            digest = self._keys.block_digest(space, key)
            with self.lock:
                slot = self._readable_slot(digest)
                found.append(slot >= 0 and act(slot) is not False)
        return found

    def _readable_slot(self, digest: bytes) -> int:
        slot = self.index.find(digest)
        return slot if slot >= 0 and self._keys.readable(self.index.key_number(slot)) else -1

    def _presence(self, digest: bytes) -> Presence:
        if self._readable_slot(digest) >= 0:
            return Presence.HIT
        return Presence.PENDING if digest in self._pending else Presence.MISS

    # Planning.

    def plan_store(
        self, job: Job, space: bytes, keys: Sequence[bytes], views: list[list[memoryview]], *, replace: bool
    ) -> list[Run]:
        """Take slots, a key and counters for the blocks that are not there; outcomes of the others are set."""
        digests = [self._keys.block_digest(space, key) for key in keys]
        with self.lock:
            wanted = self._wanted(job, digests, replace)
            slots = self.index.allocate(len(wanted))
            for item in wanted[len(slots) :]:
                self._pending.discard(digests[item])
                job.outcomes[item] = Outcome.NO_SPACE
            del wanted[len(slots) :]
            if not wanted:
                return []
            try:
                number = self._keys.current(space, len(slots) * self._ranks)
                counter = self._keys.reserve_counters(len(slots))
            except EngineError as error:
                self.index.release(slots)
                job.error = str(error)
                for item in wanted:
                    self._pending.discard(digests[item])
                    job.outcomes[item] = Outcome.REFUSED
                return []
            seals = [self.index.describe(slot, key_number=number, counter=counter + k) for k, slot in enumerate(slots)]
        runs = []
        for span in adjacent(slots, self.run_slots):
            items = [wanted[k] for k in span]
            runs.append(
                Run(
                    job,
                    items=items,
                    seals=[seals[k] for k in span],
                    digests=[digests[item] for item in items],
                    views=[[views[item][position] for item in items] for position in range(self._ranks)],
                    tags=[[] for _ in range(self._ranks)],
                )
            )
        return runs

    def _wanted(self, job: Job, digests: list[bytes], replace: bool) -> list[int]:
        wanted = []
        for item, digest in enumerate(digests):
            if digest in self._pending:
                job.outcomes[item] = Outcome.PENDING
                continue
            slot = -1 if replace else self._readable_slot(digest)
            if slot >= 0:
                self.index.touch(slot)
                job.outcomes[item] = Outcome.PRESENT
                continue
            self._pending.add(digest)
            wanted.append(item)
        return wanted

    def plan_load(self, job: Job, space: bytes, keys: Sequence[bytes], views: list[list[memoryview]]) -> list[Run]:
        """Hold the slots of the blocks that are there; outcomes of the others are set."""
        digests = [self._keys.block_digest(space, key) for key in keys]
        found: list[tuple[int, int]] = []
        positions = range(self._ranks)
        runs = []
        with self.lock:
            for item, digest in enumerate(digests):
                slot = self.index.find(digest)
                if slot < 0:
                    continue
                if not self._keys.readable(self.index.key_number(slot)):
                    self.index.discard(slot)
                    job.outcomes[item] = Outcome.EXPIRED
                elif self.index.hold(slot):
                    self.index.touch(slot)
                    found.append((slot, item))
            found.sort()
            for span in adjacent([slot for slot, _item in found], self.run_slots):
                part = [found[k] for k in span]
                runs.append(
                    Run(
                        job,
                        items=[item for _slot, item in part],
                        seals=[self.index.seal(slot) for slot, _item in part],
                        digests=[digests[item] for _slot, item in part],
                        views=[[views[item][position] for _slot, item in part] for position in positions],
                        tags=[[self.index.tag(slot, position) for slot, _item in part] for position in positions],
                    )
                )
        return runs

    # Settling.

    def note(self, run: Run, verdicts: Sequence[Outcome], failure: Exception | None, path: str) -> bool:
        """One rank of a run has been moved, or has failed; True when that was the last task of the job."""
        job = run.job
        with self.lock:
            if failure is not None:
                number = failure.errno if isinstance(failure, OSError) else None
                self.errors[errno.errorcode.get(number or 0, type(failure).__name__)] += 1
                run.bad_medium = run.bad_medium or number == errno.EIO
                job.error = job.error or f"{path}: {failure}"
            for k, verdict in enumerate(verdicts):
                known = run.verdicts[k]
                run.verdicts[k] = verdict if known is None or known.ok else known
            run.ranks_left -= 1
            if not run.ranks_left:
                self._finish_run(run)
            job.tasks_left -= 1
            return not job.tasks_left

    def count(self, job: Job) -> None:
        """Add the outcomes of a finished job to the counters."""
        counts = Counter(job.outcomes)
        with self.lock:
            for outcome, count in counts.items():
                self.outcomes[f"{job.kind}.{outcome.value}"] += count

    def count_error(self, name: str) -> None:
        with self.lock:
            self.errors[name] += 1

    def _finish_run(self, run: Run) -> None:
        job = run.job
        good = [verdict is not None and verdict.ok for verdict in run.verdicts]
        if job.kind == "load":
            self._finish_load(run, good)
        elif not all(good):  # one rank's failure fails the whole run: a slot is valid only if all ranks wrote it
            self._free(run)
        elif self._external:
            run.verdicts = [Outcome.WRITTEN] * len(run.items)
            self._awaiting.setdefault(job.job_id, []).append(run)
        elif not self._commit(run):
            run.verdicts = [Outcome.EXPIRED] * len(run.items)
        good = [verdict is not None and verdict.ok for verdict in run.verdicts]
        moved = self._block_bytes * sum(good)
        job.transferred_bytes += moved
        if job.kind == "load":
            self.loaded_bytes += moved
        else:
            self.stored_bytes += moved
        if run.bad_medium:
            until = self._clock() + self._quarantine_s
            self._quarantine.extend((until, seal.slot) for seal in run.seals if self.index.quarantine(seal.slot))
        for item, verdict in zip(run.items, run.verdicts, strict=True):
            job.outcomes[item] = verdict or Outcome.IO_ERROR

    def _finish_load(self, run: Run, good: list[bool]) -> None:
        index = self.index
        for k, seal in enumerate(run.seals):
            # The slot may hold another block by now only if this one was discarded, so look before forgetting.
            if not good[k] and index.find(run.digests[k]) == seal.slot and index.seal(seal.slot) == seal:
                index.discard(seal.slot)
            index.unhold(seal.slot)

    def _commit(self, run: Run) -> int:
        """Make a written run findable, unless its key went meanwhile; returns the blocks made findable."""
        if not self._keys.readable(run.seals[0].key_number):
            self._free(run)
            return 0
        self._pending.difference_update(run.digests)
        for k, seal in enumerate(run.seals):
            self.index.commit(seal.slot, run.digests[k], [tags[k] for tags in run.tags])
        return len(run.seals)

    def _free(self, run: Run) -> None:
        self._pending.difference_update(run.digests)
        self.index.release([seal.slot for seal in run.seals])

    def settle(self, job_id: int, *, keep: bool) -> int:
        """Commit or free what a job with external confirmation wrote; returns the number of blocks."""
        with self.lock:
            runs = self._awaiting.pop(job_id, [])
            if keep:
                return sum(self._commit(run) for run in runs)
            for run in runs:
                self._free(run)
            return sum(len(run.seals) for run in runs)

    # Forgetting.

    def forget(self, numbers: list[int]) -> int:
        """Take the blocks of destroyed keys out of the index, a part at a time; they are misses already."""
        if not numbers:
            return 0
        gone = set(numbers)
        count = 0
        for first in range(0, self.index.slots, _SWEEP_SLOTS):
            with self.lock:
                slots = self.index.under_keys(numbers, first, _SWEEP_SLOTS)
                for slot in slots:
                    self.index.discard(slot)
                count += len(slots)
        with self.lock:
            self.index.sort_free()
            self.keys_dropped += len(gone)
            for job_id, runs in list(self._awaiting.items()):
                for run in [run for run in runs if run.seals[0].key_number in gone]:
                    self._free(run)
                    runs.remove(run)
                if not runs:
                    del self._awaiting[job_id]
        return count

    def end_quarantines(self) -> None:
        """Let slots that failed be tried again once their time is over."""
        now = self._clock()
        with self.lock:
            while self._quarantine and self._quarantine[0][0] <= now:
                self.index.end_quarantine(self._quarantine.popleft()[1])
