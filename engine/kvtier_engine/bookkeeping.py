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
_LOAD_RUN_BYTES: Final = 1 << 20  # a thread that opens what it read does not read meanwhile: more of them, shorter


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
        self._load_slots = min(max(1, _LOAD_RUN_BYTES // config.slot_size_bytes), self.run_slots)
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
        digests = self._keys.block_digests(space, keys)
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
        digests = self._keys.block_digests(space, keys)
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
            runs = []
            for span in adjacent(slots, self.run_slots):
                items = wanted[span.start : span.stop]
                runs.append(
                    Run(
                        job,
                        items=items,
                        seals=self.index.describe(
                            slots[span.start], len(span), key_number=number, counter=counter + span.start
                        ),
                        digests=[digests[item] for item in items],
                        views=[[column[item] for item in items] for column in views],
                        tags=[[b""] * len(items) for _ in views],
                    )
                )
            return runs

    def _wanted(self, job: Job, digests: list[bytes], replace: bool) -> list[int]:
        wanted, present = [], []
        pending, outcomes = self._pending, job.outcomes
        slots = [-1] * len(digests) if replace else self.index.find_each(digests)
        for item, (digest, slot) in enumerate(zip(digests, slots, strict=True)):
            if digest in pending:
                outcomes[item] = Outcome.PENDING
            elif slot >= 0 and self._keys.readable(self.index.key_number(slot)):
                present.append(slot)
                outcomes[item] = Outcome.PRESENT
            else:
                pending.add(digest)
                wanted.append(item)
        self.index.touch_each(present)
        return wanted

    def plan_load(self, job: Job, space: bytes, keys: Sequence[bytes], views: list[list[memoryview]]) -> list[Run]:
        """Hold the slots of the blocks that are there; outcomes of the others are set."""
        digests = self._keys.block_digests(space, keys)
        found: list[tuple[int, int]] = []
        readable: dict[int, bool] = {}
        runs = []
        with self.lock:
            index = self.index
            for item, slot in enumerate(index.find_each(digests)):
                if slot < 0:
                    continue
                number = index.key_number(slot)
                if number not in readable:
                    readable[number] = self._keys.readable(number)
                if not readable[number]:
                    index.discard(slot)
                    job.outcomes[item] = Outcome.EXPIRED
                elif index.hold(slot):
                    found.append((slot, item))
            index.touch_each([slot for slot, _item in found])
            found.sort()
            slots, items = [slot for slot, _item in found], [item for _slot, item in found]
            for span in adjacent(slots, self._load_slots):
                part = items[span.start : span.stop]
                runs.append(
                    Run(
                        job,
                        items=part,
                        seals=index.seals(slots[span.start], len(span)),
                        digests=[digests[item] for item in part],
                        views=[[column[item] for item in part] for column in views],
                        tags=index.tags(slots[span.start], len(span)),
                    )
                )
        return runs

    # Settling.

    def note(self, run: Run, verdicts: list[Outcome], failure: Exception | None, path: str) -> bool:
        """One rank of a run has been moved, or has failed; True when that was the last task of the job."""
        job = run.job
        with self.lock:
            if failure is not None:
                number = failure.errno if isinstance(failure, OSError) else None
                self.errors[errno.errorcode.get(number or 0, type(failure).__name__)] += 1
                run.bad_medium = run.bad_medium or number == errno.EIO
                job.error = job.error or f"{path}: {failure}"
            if run.verdicts is None:
                run.verdicts = verdicts
            else:  # of several ranks the first that failed is told
                pairs = zip(run.verdicts, verdicts, strict=True)
                run.verdicts = [new if known.ok else known for known, new in pairs]
            run.ranks_left -= 1
            if not run.ranks_left:
                self._finish_run(run, run.verdicts)
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

    def _finish_run(self, run: Run, verdicts: list[Outcome]) -> None:
        job = run.job
        if job.kind == "load":
            good = verdicts.count(Outcome.LOADED)
            self._finish_load(run, verdicts, good)
            self.loaded_bytes += self._block_bytes * good
        else:
            good = self._finish_store(run, verdicts)
            self.stored_bytes += self._block_bytes * good
        job.transferred_bytes += self._block_bytes * good
        if run.bad_medium:
            until = self._clock() + self._quarantine_s
            self._quarantine.extend((until, slot) for slot in run.slots if self.index.quarantine(slot))
        for item, verdict in zip(run.items, verdicts, strict=True):
            job.outcomes[item] = verdict

    def _finish_store(self, run: Run, verdicts: list[Outcome]) -> int:
        """Commit, or leave to `settle`, what every rank wrote; free the rest. Returns the blocks written."""
        count = len(verdicts)
        if verdicts.count(Outcome.STORED) == count:
            parts = [range(count)]
        else:  # a slot is valid only if all ranks wrote it
            self._free(run.part([k for k in range(count) if not verdicts[k].ok]))
            good = [k for k in range(count) if verdicts[k].ok]
            parts = [range(good[span.start], good[span.start] + len(span)) for span in adjacent(good, count)]
        written = 0
        for part in parts:
            whole = run if len(part) == count else run.part(part)
            outcome = Outcome.STORED
            if self._external:
                outcome = Outcome.WRITTEN
                self._awaiting.setdefault(run.job.job_id, []).append(whole)
            elif not self._commit(whole):
                outcome = Outcome.EXPIRED
            verdicts[part.start : part.stop] = [outcome] * len(part)
            written += len(part) if outcome.ok else 0
        return written

    def _finish_load(self, run: Run, verdicts: list[Outcome], good: int) -> None:
        index = self.index
        if good < len(verdicts):
            for seal, digest, verdict in zip(run.seals, run.digests, verdicts, strict=True):
                # The slot may hold another block by now only if this one was discarded, so look before forgetting.
                if not verdict.ok and index.find(digest) == seal.slot and index.seal(seal.slot) == seal:
                    index.discard(seal.slot)
        index.unhold(run.slots)

    def _commit(self, run: Run) -> int:
        """Make a written run findable, unless its key went meanwhile; returns the blocks made findable."""
        if not self._keys.readable(run.seals[0].key_number):
            self._free(run)
            return 0
        self._pending.difference_update(run.digests)
        self.index.commit(run.first_slot, run.digests, run.tags)
        return len(run.seals)

    def _free(self, run: Run) -> None:
        self._pending.difference_update(run.digests)
        self.index.release(run.slots)

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
