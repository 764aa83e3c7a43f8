"""A ring of page-aligned buffers through which slots pass on their way to and from the file.

A buffer holds one run of adjacent slots (what one pwritev or preadv moves), a page for the last tag, and room for one
padded block. The memory is anonymous and private, kept out of core dumps and wiped in forked children. It is taken
from the kernel when first used. `torch_staging` registers the same kind of memory with CUDA.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from kvtier_api.errors import EngineError
from kvtier_engine import kernel_calls
from kvtier_engine.sealing import TAG_BYTES

__all__ = ["PAGE_BYTES", "StagingBuffer", "StagingRing", "aligned_memory"]

PAGE_BYTES: Final = 4096
_HUGE_PAGE_BYTES: Final = 2 << 20


def aligned_memory(size_bytes: int) -> mmap.mmap:
    """Page-aligned anonymous memory of at least `size_bytes`, in no core dump, zeros in a forked child.

    From 2 MiB on it asks for huge pages: a direct transfer then costs the kernel a third of the processor time, because
    it pins one page where it would pin 512. A kernel without huge pages ignores the wish.
    """
    unit = _HUGE_PAGE_BYTES if size_bytes >= _HUGE_PAGE_BYTES else PAGE_BYTES
    memory = mmap.mmap(-1, -(-size_bytes // unit) * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if unit == _HUGE_PAGE_BYTES:
        with suppress(OSError):  # EINVAL: this kernel has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTDUMP)
    memory.madvise(kernel_calls.MADV_WIPEONFORK)
    return memory


class StagingBuffer(NamedTuple):
    """`run`: the slots and a page; `scratch`: one slot, for a block that must be padded before it is sealed.

    `rooms`: for each slot of `run` its bytes and the tag's behind them, which are the next one's first.
    """

    run: memoryview
    scratch: memoryview
    rooms: tuple[memoryview, ...]


class StagingRing:
    """`count` buffers of `run_slots` slots, lent one at a time."""

    def __init__(self, *, count: int, run_slots: int, slot_size_bytes: int) -> None:
        run_bytes = run_slots * slot_size_bytes
        self.run_bytes = run_bytes
        self.count = count
        pages = -(-(run_bytes + PAGE_BYTES) // PAGE_BYTES) * PAGE_BYTES
        runs = memoryview(aligned_memory(count * pages))
        scratches = memoryview(aligned_memory(count * slot_size_bytes))
        self.total_bytes = len(runs) + len(scratches)
        self._free = []
        for number in range(count):
            run = runs[number * pages : number * pages + run_bytes + PAGE_BYTES]
            scratch = scratches[number * slot_size_bytes : (number + 1) * slot_size_bytes]
            starts = range(0, run_bytes, slot_size_bytes)
            rooms = tuple(run[start : start + slot_size_bytes + TAG_BYTES] for start in starts)
            self._free.append(StagingBuffer(run, scratch, rooms))
        self._changed = threading.Condition(threading.Lock())
        self._closed = False

    @contextmanager
    def lend(self, before_waiting: Callable[[], None] = lambda: None) -> Iterator[StagingBuffer]:
        """One buffer for the length of the block; waits while all are lent, and calls `before_waiting` before it does."""
        with self._changed:
            if not self._free:
                before_waiting()
            while not self._free and not self._closed:
                self._changed.wait()
            if self._closed:
                raise EngineError("the staging ring is closed", obj="StagingRing", remedy="open a new store")
            buffer = self._free.pop()
        try:
            yield buffer
        finally:
            with self._changed:
                self._free.append(buffer)
                self._changed.notify()

    def close(self) -> None:
        """Refuse further loans. The memory goes back to the kernel with the last reference to it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
