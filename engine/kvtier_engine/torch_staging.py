"""Tensors to and from a slot store, through pinned memory. The only module that imports torch.

Store: GPU → pinned buffers by DMA on a side stream → sealed and written by the store's threads, while the next part of
the job is already being copied. Load: the same way back. On a CPU, tensors that are one contiguous piece go to the
store without a copy, and others are gathered in the same buffers (which then are ordinary memory).

A block is, per rank of the store, a sequence of tensors (the layers' regions, say) that stand in the slot one after
the other. Jobs, outcomes and `finished` are the store's; while a TorchStaging is in use, the store takes no jobs from
elsewhere (`put`, `get`, `lookup` and the rest are free to use).

The CUDA path is written for CUDA 12 and torch 2.6 and later; docs/limitations.md says where it was run.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from kvtier_api.errors import EngineError
from kvtier_engine.jobs import Job, JobBoard, JobKind, JobResult, Outcome
from kvtier_engine.staging import PAGE_BYTES, aligned_memory
from kvtier_engine.store import SlotStore

__all__ = ["TensorItem", "TorchStaging"]

TensorItem = tuple[bytes, Sequence[Sequence[torch.Tensor]]]  # key, and for each rank the parts of the block
_PARTS_UNDER_WAY: Final = 2


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a contiguous tensor. Raises EngineError for one that is not."""
    if not tensor.is_contiguous():
        raise EngineError("not contiguous", obj=f"tensor of shape {tuple(tensor.shape)}", remedy="pass its pieces")
    return tensor.detach().reshape(-1).view(torch.uint8)


class _PinnedBuffers:
    """`count` slot-sized, page-aligned buffers per rank; pinned for DMA when there is a CUDA device."""

    def __init__(self, *, count: int, ranks: int, slot_size_bytes: int, cuda: bool) -> None:
        stride = -(-slot_size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._memory = aligned_memory(count * ranks * stride)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._cuda = cuda
        if cuda:
            code = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.nbytes, 0))
            if code:
                raise EngineError(
                    f"cudaHostRegister: error {code}", obj=f"{self.tensor.nbytes} bytes", remedy="raise RLIMIT_MEMLOCK"
                )
        self._rooms = [
            [self.tensor[(number * ranks + rank) * stride :][:slot_size_bytes] for rank in range(ranks)]
            for number in range(count)
        ]
        self._free = list(range(count))
        self._changed = threading.Condition()

    def take(self, count: int) -> list[int]:
        """Wait for `count` buffers (of each rank) and take them."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= count)
            return [self._free.pop() for _ in range(count)]

    def give(self, numbers: Sequence[int]) -> None:
        with self._changed:
            self._free.extend(numbers)
            self._changed.notify_all()

    def room(self, number: int) -> list[torch.Tensor]:
        return self._rooms[number]

    def close(self) -> None:
        if self._cuda:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


@dataclass
class _Part:
    """Some items of one job on their way: the store's job number, buffers, and the event that ends their copy."""

    job: Job
    items: list[int]
    sizes: list[list[int]]
    targets: list[list[list[torch.Tensor]]]
    buffers: list[int] = field(default_factory=list)
    number: int = 0
    event: Any = None


class TorchStaging:
    """`blocks` buffers for stores and as many for loads; `device` is where the tensors are."""

    def __init__(self, store: SlotStore, *, device: torch.device | str, blocks: int = 16) -> None:
        """Raises EngineError when memory cannot be pinned."""
        self._store = store
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._ranks = len(store.config.ranks)
        self._size = store.config.slot_size_bytes
        self._part_items = max(1, blocks // _PARTS_UNDER_WAY)
        count = self._part_items * _PARTS_UNDER_WAY
        self._buffers: dict[JobKind, _PinnedBuffers] = {}
        for kind in ("store", "load"):
            self._buffers[kind] = _PinnedBuffers(
                count=count, ranks=self._ranks, slot_size_bytes=self._size, cuda=self._cuda
            )
        self._streams: dict[str, Any] = (
            {kind: torch.cuda.Stream(self._device) for kind in ("store", "load")} if self._cuda else {}
        )
        self._board = JobBoard()
        self._numbers = itertools.count(1)
        self._results: dict[int, JobResult] = {}
        self._results_lock = threading.Lock()
        self._queues: dict[JobKind, deque[Any]] = {"store": deque(), "load": deque()}
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._pump, args=(kind,), name=f"kvtier-torch-{kind}", daemon=True)
            for kind in ("store", "load")
        ]
        for thread in self._threads:
            thread.start()

    def submit_store(self, job_id: int, items: Sequence[TensorItem], *, tenant: bytes | None = None) -> None:
        """Store blocks. The tensors may be overwritten once the job is finished, not before."""
        self._submit("store", job_id, items, tenant)

    def submit_load(self, job_id: int, items: Sequence[TensorItem], *, tenant: bytes | None = None) -> None:
        """Load blocks into tensors. They are whole, on their device, when the job is finished."""
        self._submit("load", job_id, items, tenant)

    def finished(self) -> list[JobResult]:
        """As SlotStore.finished: each job once."""
        return self._board.take_finished()

    def wait(self, job_ids: Sequence[int], timeout_s: float | None = None) -> bool:
        return self._board.wait(job_ids, timeout_s)

    def drain(self, timeout_s: float | None = None) -> bool:
        return self._board.wait(None, timeout_s)

    def close(self) -> None:
        """Finish what was submitted, end the threads, unpin. The store stays open."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for buffers in self._buffers.values():
            buffers.close()

    def _submit(self, kind: JobKind, job_id: int, items: Sequence[TensorItem], tenant: bytes | None) -> None:
        targets = []
        for number, (_key, ranks) in enumerate(items):
            parts = [[_as_bytes(tensor) for tensor in tensors] for tensors in ranks]
            sizes = [sum(part.nbytes for part in rank) for rank in parts]
            if len(parts) != self._ranks or not all(0 < size <= self._size for size in sizes):
                raise EngineError(
                    f"{sizes} bytes", obj=f"item {number}", remedy=f"{self._ranks} ranks of at most {self._size} bytes"
                )
            targets.append(parts)
        job = self._board.open(job_id, kind, len(items))
        ready = None
        if self._cuda:  # the copy must wait for the kernels that compute these tensors
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device))
        with self._changed:
            self._queues[kind].append((job, [item[0] for item in items], targets, tenant, ready))
            self._changed.notify_all()

    def _pump(self, kind: JobKind) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queues[kind] or self._stopping)
                if not self._queues[kind]:
                    return
                job, keys, targets, tenant, ready = self._queues[kind].popleft()
            try:
                self._run(job, keys, targets, tenant, ready)
            except Exception as error:  # noqa: BLE001 - told with the job; the thread must go on
                job.outcomes = [outcome if outcome.ok else Outcome.IO_ERROR for outcome in job.outcomes]
                job.error = job.error or str(error)
            self._board.finish(job)

    def _run(
        self, job: Job, keys: list[bytes], targets: list[list[list[torch.Tensor]]], tenant: bytes | None, ready: Any
    ) -> None:
        begin = self._begin_store if job.kind == "store" else self._begin_load
        end = self._end_store if job.kind == "store" else self._end_load
        under_way: deque[_Part] = deque()
        try:
            for first in range(0, len(keys), self._part_items):
                items = list(range(first, min(first + self._part_items, len(keys))))
                chosen = [targets[item] for item in items]
                sizes = [[sum(part.nbytes for part in rank) for rank in ranks] for ranks in chosen]
                part = _Part(job=job, items=items, sizes=sizes, targets=chosen)
                if len(under_way) == _PARTS_UNDER_WAY:
                    end(under_way.popleft())
                begin(part, [keys[item] for item in items], tenant, ready)
                under_way.append(part)
        finally:
            while under_way:
                end(under_way.popleft())

    # Between the store and buffers.

    def _memory(self, part: _Part, kind: JobKind) -> list[list[memoryview]]:
        """What the store reads or fills: the tensors themselves where that can be, else buffers."""
        views = []
        for k, ranks in enumerate(part.targets):
            if not self._cuda and all(len(tensors) == 1 for tensors in ranks):
                views.append([memoryview(tensors[0].numpy()) for tensors in ranks])
                continue
            (number,) = self._buffers[kind].take(1)
            part.buffers.append(number)
            rooms = self._buffers[kind].room(number)
            views.append([memoryview(room[: part.sizes[k][rank]].numpy()) for rank, room in enumerate(rooms)])
        return views

    def _copy(
        self, part: _Part, views: list[list[memoryview]], items: Sequence[int], kind: JobKind, ready: Any
    ) -> None:
        """Copy between tensors and buffers, on the side stream where there is one; sets the part's event."""
        if not part.buffers:
            return
        if not self._cuda:
            self._copy_tensors(part, views, items, kind)
            return
        stream = self._streams[kind]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            self._copy_tensors(part, views, items, kind)
            part.event = torch.cuda.Event()
            part.event.record(stream)

    def _copy_tensors(self, part: _Part, views: list[list[memoryview]], items: Sequence[int], kind: JobKind) -> None:
        for k in items:
            for rank, tensors in enumerate(part.targets[k]):
                room = torch.from_numpy(np.frombuffer(views[k][rank], np.uint8))
                start = 0
                for tensor in tensors:
                    piece = room[start : start + tensor.nbytes]
                    start += tensor.nbytes
                    if tensor.data_ptr() == piece.data_ptr():
                        continue  # the store uses the tensor's own memory
                    if kind == "store":
                        piece.copy_(tensor, non_blocking=True)
                    else:
                        tensor.copy_(piece, non_blocking=True)

    def _begin_store(self, part: _Part, keys: list[bytes], tenant: bytes | None, ready: Any) -> None:
        views = self._memory(part, "store")
        try:
            self._copy(part, views, range(len(keys)), "store", ready)
            if part.event is not None:
                part.event.synchronize()  # the previous part is being sealed and written meanwhile
            part.number = next(self._numbers)
            self._store.submit_store(part.number, list(zip(keys, views, strict=True)), tenant=tenant)
        except BaseException:
            self._buffers["store"].give(part.buffers)
            raise

    def _end_store(self, part: _Part) -> None:
        self._take_result(part)
        self._buffers["store"].give(part.buffers)

    def _begin_load(self, part: _Part, keys: list[bytes], tenant: bytes | None, ready: Any) -> None:
        views = self._memory(part, "load")
        part.event = (views, ready)
        part.number = next(self._numbers)
        try:
            self._store.submit_load(part.number, list(zip(keys, views, strict=True)), tenant=tenant)
        except BaseException:
            self._buffers["load"].give(part.buffers)
            raise

    def _end_load(self, part: _Part) -> None:
        views, ready = part.event
        part.event = None
        try:
            outcomes = self._take_result(part)
            loaded = [k for k, outcome in enumerate(outcomes) if outcome is Outcome.LOADED]
            self._copy(part, views, loaded, "load", ready)
            if part.event is not None:
                part.event.synchronize()  # the store is reading the next part meanwhile
        finally:
            self._buffers["load"].give(part.buffers)

    def _take_result(self, part: _Part) -> tuple[Outcome, ...]:
        """Wait for the store's job of this part and enter its outcomes into the caller's job."""
        self._store.wait([part.number])
        with self._results_lock:  # both pumps take results; each keeps the other's
            self._results.update({result.job_id: result for result in self._store.finished()})
            result = self._results.pop(part.number)
        for item, outcome in zip(part.items, result.outcomes, strict=True):
            part.job.outcomes[item] = outcome
        part.job.transferred_bytes += result.transferred_bytes
        part.job.error = part.job.error or result.error
        return result.outcomes
