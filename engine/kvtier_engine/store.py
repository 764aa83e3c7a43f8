"""The slot store: batches of blocks into and out of sealed, fixed slots. Start here.

    with SlotStore.from_environment() as store:
        store.submit_store(1, [(key, [block])], tenant=b"acme")
        store.wait([1])
        for result in store.finished(): ...

A block is a key (bytes; a block hash) and one buffer per rank file that this store owns. A buffer is contiguous memory
of at most one slot; shorter ones are padded with zeros. Memory of a submitted job must stay as it is until its result
is taken. Whatever goes wrong with bytes, files or keys is an outcome of an item, never an exception: the engine sees a
miss. EngineError is raised for wrong use only (an unsuitable buffer, a job number in use, a closed store, a forked
child).

`tenant` is the trusted salt of the request. Policy Required refuses requests without one; PerTenant puts them into a
space of their own; Shared has one space for all and ignores the tenant.

This module opens, closes, and carries requests to threads. It leaves to `bookkeeping` what stands where, to `transfer`
the bytes, to `keys` ages and erasure, and to `torch_staging` tensors.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from kvtier_api.errors import EngineError
from kvtier_engine import fork_guard
from kvtier_engine.bookkeeping import Presence, SlotBook
from kvtier_engine.config import StoreConfig, config_from_environment, config_from_marker
from kvtier_engine.io_threads import IoThreads, Turn
from kvtier_engine.jobs import Job, JobBoard, JobKind, JobResult, Outcome
from kvtier_engine.key_memory import harden_process
from kvtier_engine.keys import KeyRing
from kvtier_engine.runs import Item, Run, views_of
from kvtier_engine.sealing import TierBinding
from kvtier_engine.slotfile import SlotFile
from kvtier_engine.staging import StagingRing
from kvtier_engine.stats import RankStatistics, StoreStatistics
from kvtier_engine.transfer import Transfer

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["SlotStore"]

_MAX_TICK_S: Final = 1.0
_OWN_JOB: Final = -1  # a job of `put` or `get`, which no board knows
_SMALL_SLOT_BYTES: Final = 512 << 10


def _turns(slot_size_bytes: int) -> int:
    """How many threads seal or open at a time. More than processors would only take them from each other.

    With small slots the interpreter lock changes hands so often that one thread, which seals about 5 GB/s, does best.
    """
    return 1 if slot_size_bytes < _SMALL_SLOT_BYTES else os.cpu_count() or 1


class SlotStore:
    """Thread-safe. One process owns its rank files alone; nothing on disk outlives it in readable form."""

    def __init__(self, config: StoreConfig) -> None:
        """Raises NotFound, UnsafePath, EngineError; on failure nothing stays open."""
        self.config = config
        self._pid = os.getpid()
        self._hardening_error = ""
        if config.harden_process:
            try:
                harden_process()
            except OSError as error:
                self._hardening_error = str(error)
        size = config.slot_size_bytes
        with ExitStack() as undo:
            self._files: list[SlotFile] = []
            for path in config.files:
                file = SlotFile(
                    path,
                    min_bytes=(config.slots or 1) * size,
                    slot_size_bytes=size,
                    direct=config.direct,
                    dir_fd=config.directory_fd,
                )
                undo.callback(file.close)
                self._files.append(file)
            self._keys = KeyRing(max_age_s=config.max_age_s, clock=config.clock)
            undo.pop_all()
        slots = config.slots or min(file.size_bytes for file in self._files) // size
        for file in self._files:
            file.min_bytes = slots * size
        self._book = SlotBook(config=config, slots=slots, keys=self._keys)
        self._staging = StagingRing(count=config.io_depth + 1, run_slots=self._book.run_slots, slot_size_bytes=size)
        self._transfer = Transfer(
            keys=self._keys,
            staging=self._staging,
            binding=TierBinding(tier_uid=config.tier_uid, volume_id=config.volume_id),
            slot_size_bytes=size,
            sealed=config.seal_slots,
        )
        self._closed = False
        self._tasks = 0
        self._idle = threading.Condition(threading.Lock())
        self._stop = threading.Event()
        self._board = JobBoard(config.on_finished)
        self._threads = IoThreads(config.io_depth, "kvtier-io", turns=_turns(size))
        self._timer = threading.Thread(target=self._keep_time, name="kvtier-timer", daemon=True)
        self._timer.start()
        fork_guard.guard(self)

    @classmethod
    def open(
        cls,
        marker_path: str,
        *,
        nonce: str | None = None,
        pod_uid: str | None = None,
        rank: int | None = None,
        **options: Any,
    ) -> Self:
        """Open the volume that the marker describes; `rank` for one process per rank, None for all ranks here.

        `nonce` or `pod_uid` prove that it is this process's own (`check_marker`).
        `options` are fields of StoreConfig. Raises VerificationFailed, NotFound, UnsafePath, EngineError.
        """
        return cls._opened(config_from_marker(marker_path, nonce=nonce, pod_uid=pod_uid, rank=rank, **options))

    @classmethod
    def from_environment(cls, **options: Any) -> Self:
        """As `open`, with KVTIER_MARKER, KVTIER_NONCE or KVTIER_POD_UID, and for one rank KVTIER_SLOT_FILE."""
        return cls._opened(config_from_environment(**options))

    @classmethod
    def _opened(cls, config: StoreConfig) -> Self:
        try:
            return cls(config)
        finally:
            if config.directory_fd is not None:
                os.close(config.directory_fd)

    # Jobs.

    def submit_store(
        self, job_id: int, items: Sequence[Item], *, tenant: bytes | None = None, replace: bool = False
    ) -> None:
        """Store a batch. A block that is there already stays as it is, and keeps its age, unless `replace`."""
        self._submit("store", job_id, items, tenant, replace=replace)

    def submit_load(self, job_id: int, items: Sequence[Item], *, tenant: bytes | None = None) -> None:
        """Load a batch. Memory of an item that is not LOADED is zeros or as it was, never wrong data."""
        self._submit("load", job_id, items, tenant)

    def finished(self) -> list[JobResult]:
        """Results of the jobs that finished since the last call: each job once. Also after `close`."""
        return self._board.take_finished()

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> bool:
        """Block until these jobs are finished; takes no result. False when the time ran out."""
        return self._board.wait(job_ids, timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Block until every submitted job is finished. False when the time ran out."""
        return self._board.wait(None, timeout_s)

    def confirm(self, job_id: int) -> int:
        """With confirm="external": all ranks' processes wrote this store job. Returns the blocks made findable.

        Each rank's process calls it with its own job number, after its own result said WRITTEN. Nothing is exchanged
        between processes here: who confirms vouches that all ranks wrote, and a later load counts only if it
        succeeded in every rank's process, because each evicts by itself.
        """
        return self._settle(job_id, keep=True)

    def abandon(self, job_id: int) -> int:
        """With confirm="external": another rank failed. Frees what this store wrote; returns the number of blocks."""
        return self._settle(job_id, keep=False)

    def _settle(self, job_id: int, *, keep: bool) -> int:
        self._refuse_unusable()
        if self._board.is_open(job_id):
            raise EngineError("the job is not finished", obj=f"job {job_id}", remedy="wait for its result")
        return self._book.settle(job_id, keep=keep)

    # One block at a time, in the calling thread.

    def put(
        self, key: bytes, buffers: Sequence[Buffer], *, tenant: bytes | None = None, replace: bool = False
    ) -> Outcome:
        """Store one block and wait for it. Raises EngineError with confirm="external": use jobs there."""
        if self.config.confirm == "external":
            raise EngineError("a block needs the other ranks", obj="put", remedy="use submit_store and confirm")
        return self._submit("store", None, [(key, buffers)], tenant, replace=replace).outcomes[0]

    def get(self, key: bytes, buffers: Sequence[Buffer], *, tenant: bytes | None = None) -> Outcome:
        """Load one block and wait for it; LOADED, or a miss of some kind."""
        return self._submit("load", None, [(key, buffers)], tenant).outcomes[0]

    def lookup(self, keys: Sequence[bytes], *, tenant: bytes | None = None) -> list[Presence]:
        """What a load would find now. A HIT may still be evicted before it is loaded, unless it is pinned."""
        self._refuse_unusable()
        space = self._space(tenant)
        return [Presence.MISS] * len(keys) if space is None else self._book.lookup(space, keys)

    def contains(self, key: bytes, *, tenant: bytes | None = None) -> bool:
        return self.lookup([key], tenant=tenant)[0] is Presence.HIT

    def touch(self, keys: Iterable[bytes], *, tenant: bytes | None = None) -> None:
        """Count as used, for the order of eviction."""
        self._each_slot(keys, tenant, self._book.index.touch)

    def pin(self, keys: Iterable[bytes], *, tenant: bytes | None = None) -> list[bool]:
        """Keep blocks from eviction until as many `unpin`; True where the block is there. Erasure ignores pins."""
        return self._each_slot(keys, tenant, self._book.index.pin)

    def unpin(self, keys: Iterable[bytes], *, tenant: bytes | None = None) -> None:
        self._each_slot(keys, tenant, self._book.index.unpin)

    def evict(self, keys: Iterable[bytes], *, tenant: bytes | None = None) -> int:
        """Forget blocks; returns how many were there. Their ciphertext is erased only with its key."""
        return sum(self._each_slot(keys, tenant, self._book.index.discard))

    def _each_slot(self, keys: Iterable[bytes], tenant: bytes | None, act: Callable[[int], bool | None]) -> list[bool]:
        self._refuse_unusable()
        space = self._space(tenant)
        return [False for _ in keys] if space is None else self._book.each_slot(space, keys, act)

    # Erasing.

    def erase(self, tenant: bytes | None) -> int:
        """Destroy the tenant's keys, then forget its blocks; returns how many. On return nothing of it can be opened.

        What the tenant submitted before the call fails as EXPIRED; what it submits afterwards gets new keys. With
        salt policy Shared there is one key space, so this raises EngineError: use `erase_all`.
        """
        self._refuse_unusable()
        if self.config.salt_policy == "Shared":
            raise EngineError("tenants share one key space", obj="salt policy Shared", remedy="use erase_all")
        space = self._space(tenant)
        return 0 if space is None else self._book.forget(self._keys.drop_space(space))

    def erase_all(self) -> int:
        """Destroy every key, then forget every block; returns how many."""
        self._refuse_unusable()
        return self._book.forget(self._keys.drop_all())

    def expire(self, older_than_s: float | None = None) -> int:
        """Destroy the keys of every block that has come of age, or may be older than `older_than_s`; returns blocks.

        The timer does the former by itself. Younger blocks of the same epoch (max_age/8) go with the older ones.
        """
        self._refuse_unusable()
        keys = self._keys
        return self._book.forget(keys.drop_expired() if older_than_s is None else keys.drop_older_than(older_than_s))

    def _keep_time(self) -> None:
        tick_s = min(self._keys.margin_s / 2, _MAX_TICK_S)
        while not self._stop.wait(tick_s):
            try:
                self._book.forget(self._keys.drop_expired())
                self._book.end_quarantines()
            except Exception as error:  # noqa: BLE001 - counted and tried again: this thread must outlive any fault
                self._book.count_error(f"timer:{type(error).__name__}")

    # From request to tasks.

    def _space(self, tenant: bytes | None) -> bytes | None:
        """The key space of a request; None when the salt policy refuses it."""
        if tenant is not None and not isinstance(tenant, bytes):
            raise EngineError("not bytes", obj="tenant", remedy="pass the trusted salt as bytes, or None")
        if self.config.salt_policy == "Shared":
            return self._keys.tenant_space(None)
        if not tenant:
            return None if self.config.salt_policy == "Required" else self._keys.tenant_space(None)
        return self._keys.tenant_space(tenant)

    def _submit(
        self, kind: JobKind, job_id: int | None, items: Sequence[Item], tenant: bytes | None, *, replace: bool = False
    ) -> Job:
        self._refuse_unusable()
        ranks = len(self._files)
        keys, views = views_of(items, ranks=ranks, slot_size_bytes=self.config.slot_size_bytes, writable=kind == "load")
        space = self._space(tenant)
        own = job_id is None
        job = Job(_OWN_JOB, kind, len(keys)) if job_id is None else self._board.open(job_id, kind, len(keys))
        runs: list[Run] = []
        if space is None:
            job.outcomes = [Outcome.REFUSED] * len(keys)
        elif kind == "store":
            runs = self._book.plan_store(job, space, keys, views, replace=replace)
        else:
            runs = self._book.plan_load(job, space, keys, views)
        job.tasks_left = len(runs) * ranks
        tasks = [functools.partial(self._move, run, position, own) for run in runs for position in range(ranks)]
        if not tasks:
            self._finish(job, own=own)
            return job
        with self._idle:
            closed = self._closed
            self._tasks += len(tasks)
        if own or closed:  # closed meanwhile: the tasks only say so, and no thread may be left to run them
            self._threads.run_here(tasks, load=kind == "load")
        else:
            self._threads.submit(tasks, load=kind == "load")
        return job

    def _move(self, run: Run, position: int, own: bool, turn: Turn) -> None:
        """One run of one rank. Whatever is raised fails this run alone: it is counted and reported with the job."""
        file, rank = self._files[position], self.config.ranks[position]
        verdicts: list[Outcome]
        failure: Exception | None = None
        try:
            if self._closed:
                verdicts = [Outcome.EXPIRED] * len(run.items)
            else:
                move = self._transfer.load if run.job.kind == "load" else self._transfer.store
                verdicts, failure = move(run, position, rank, file, turn)
        except Exception as error:  # noqa: BLE001 - raised here it would end the thread, and the job would never end
            failure = error
            verdicts = [Outcome.IO_ERROR] * len(run.items)
        finally:
            with self._idle:
                self._tasks -= 1
                if not self._tasks:
                    self._idle.notify_all()
        if self._book.note(run, verdicts, failure, file.path):
            self._finish(run.job, own=own)

    def _finish(self, job: Job, *, own: bool) -> None:
        self._book.count(job)
        if own:
            return
        try:
            self._board.finish(job)
        except Exception as error:  # noqa: BLE001 - the caller's `on_finished` must not end an I/O thread
            self._book.count_error(f"on_finished:{type(error).__name__}")

    # Life.

    def stats(self) -> StoreStatistics:
        """A snapshot. Also after `close`."""
        self._refuse_child()
        book, index = self._book, self._book.index
        oldest = self._keys.oldest_epoch_start()
        with book.lock:
            return StoreStatistics(
                slots=index.slots,
                ready=index.ready,
                free=index.free,
                quarantined=index.quarantined,
                evictions=index.evictions,
                open_jobs=self._board.open_jobs,
                stored_bytes=book.stored_bytes,
                loaded_bytes=book.loaded_bytes,
                outcomes=book.outcomes.copy(),
                errors=book.errors.copy(),
                keys=self._keys.keys,
                locked_key_bytes=self._keys.locked_bytes,
                keys_dropped=book.keys_dropped,
                oldest_block_age_s=None if oldest is None else self.config.clock() - oldest,
                sealed=self.config.seal_slots,
                hardened=self.config.harden_process and not self._hardening_error,
                hardening_error=self._hardening_error,
                staging_bytes=self._staging.total_bytes,
                ranks=tuple(
                    RankStatistics(rank=rank, path=file.path, direct=file.direct, direct_reason=file.direct_reason)
                    for rank, file in zip(self.config.ranks, self._files, strict=True)
                ),
            )

    def close(self) -> None:
        """Destroy the keys, fail what is still under way, end the threads, close the files. Idempotent.

        Results of open jobs stay available from `finished`. Waits for system calls that have begun.
        """
        self._refuse_child()
        with self._idle:
            if self._closed:
                return
            self._closed = True
        self._keys.close()
        self._stop.set()
        with self._idle:  # nobody may still be using a descriptor's number when it is closed
            self._idle.wait_for(lambda: not self._tasks)
        self._threads.stop()
        self._timer.join()
        self._staging.close()
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_child(self) -> None:
        if os.getpid() != self._pid:
            raise EngineError("the store is the parent process's", obj="SlotStore", remedy="open one in the child")

    def _refuse_unusable(self) -> None:
        self._refuse_child()
        if self._closed:
            raise EngineError("the store is closed", obj="SlotStore", remedy="open it again")

    def before_fork(self) -> None:
        self._keys.before_fork()

    def after_fork_in_parent(self) -> None:
        self._keys.after_fork_in_parent()

    def after_fork_in_child(self) -> None:
        """A child holds neither keys nor the slot files, so that it keeps no volume in use."""
        self._keys.after_fork_in_child()
        for file in self._files:
            file.close()
