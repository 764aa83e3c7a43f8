"""Jobs: what was asked for in one batch, and its result, which is reported exactly once.

A job is open from its submission until its last task ends, then finished until `JobBoard.take_finished` hands out its
result. This module knows nothing of slots.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple

from kvtier_api.errors import EngineError

__all__ = ["Job", "JobBoard", "JobKind", "JobResult", "Outcome"]

JobKind = Literal["store", "load"]


class Outcome(enum.Enum):
    """What became of one block of a job. Everything but the first five is a miss to the engine, never an error."""

    STORED = "stored"
    PRESENT = "present"  # it was there already; nothing was written
    PENDING = "pending"  # another job, or an earlier item of this one, is writing it
    WRITTEN = "written"  # this store's ranks are written; findable after `confirm`
    LOADED = "loaded"
    MISS = "miss"
    REFUSED = "refused"  # the salt policy, or no memory could be locked for a new key
    NO_SPACE = "no-space"  # every slot is pinned, read or being written
    EXPIRED = "expired"  # too old, or its tenant was erased, or the store was closed
    BAD_TAG = "bad-tag"  # the slot's bytes are not what was sealed
    IO_ERROR = "io-error"

    def __init__(self, text: str) -> None:
        self.ok = text in {"stored", "present", "pending", "written", "loaded"}

    __hash__ = object.__hash__  # members are singletons, and every block of a job is counted


class JobResult(NamedTuple):
    """`outcomes` has one entry per item of the job, in its order. `error` is the first system error's text, or empty."""

    job_id: int
    kind: JobKind
    outcomes: tuple[Outcome, ...]
    transferred_bytes: int
    elapsed_s: float
    error: str

    @property
    def success(self) -> bool:
        """Every item was stored or present, or every item was loaded."""
        return all(outcome.ok for outcome in self.outcomes)


class Job:
    """One batch under way. The store changes it under its lock."""

    __slots__ = ("error", "job_id", "kind", "outcomes", "started_s", "tasks_left", "transferred_bytes")

    def __init__(self, job_id: int, kind: JobKind, items: int) -> None:
        self.job_id = job_id
        self.kind = kind
        self.outcomes: list[Outcome] = [Outcome.MISS] * items
        self.tasks_left = 0
        self.transferred_bytes = 0
        self.started_s = time.monotonic()
        self.error = ""

    def result(self) -> JobResult:
        elapsed_s = time.monotonic() - self.started_s
        return JobResult(self.job_id, self.kind, tuple(self.outcomes), self.transferred_bytes, elapsed_s, self.error)


class JobBoard:
    """Thread-safe. `on_finished` is called from an I/O thread after each result became available; it must not raise."""

    def __init__(self, on_finished: Callable[[], None] | None = None) -> None:
        self._open: set[int] = set()
        self._finished: dict[int, JobResult] = {}
        self._changed = threading.Condition(threading.Lock())
        self._on_finished = on_finished

    def open(self, job_id: int, kind: JobKind, items: int) -> Job:
        """Raises EngineError when a job of this number is open, or finished and not yet reported."""
        with self._changed:
            if job_id in self._open or job_id in self._finished:
                raise EngineError(
                    "the job number is in use", obj=f"job {job_id}", remedy="number jobs uniquely until reported"
                )
            self._open.add(job_id)
        return Job(job_id, kind, items)

    def finish(self, job: Job) -> None:
        with self._changed:
            self._open.discard(job.job_id)
            self._finished[job.job_id] = job.result()
            self._changed.notify_all()
        if self._on_finished is not None:
            self._on_finished()

    def take_finished(self) -> list[JobResult]:
        """The results that came in since the last call, in the order in which the jobs finished."""
        with self._changed:
            results, self._finished = self._finished, {}
        return list(results.values())

    def wait(self, job_ids: Collection[int] | None, timeout_s: float | None) -> bool:
        """Block until none of `job_ids` (None: no job at all) is open; False when the time ran out first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._open if job_ids is None else self._open.isdisjoint(job_ids), timeout_s
            )

    def is_open(self, job_id: int) -> bool:
        with self._changed:
            return job_id in self._open

    @property
    def open_jobs(self) -> int:
        return len(self._open)
