"""Many files, few children: reading back and overwriting open files in batches, with one child and one time limit for each.

An engine may write a file for each block of its cache: 16,384 in one volume. A child for each takes longer than any deadline.
A child gets descriptors, never names. How many of them depends on how many this process may have; how much is sampled in one
call, on how long the files of a batch stay open. Which files, and what the answer means, is left to the callers.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

from kvtier_node.kernel import bounded, lease
from kvtier_node.sampling import BLOCK_BYTES, PLACES_EACH, SUBSECTIONS, Range, SampleResult

__all__ = ["MOST_FILES", "Batch", "overwrite_files", "places_of", "read_files", "still_held"]

MOST_FILES: Final = 200
"""Of one batch. A child takes more descriptors than that, but each is there twice while it starts."""
MOST_PLACES: Final = 2 * SUBSECTIONS * PLACES_EACH
"""Blocks that one child samples; a file that has more places to read than are left begins a batch of its own."""
_LIMIT_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20 << 20


class Batch:
    """Open files that are worked on together: `work` gets their paths and descriptors, and then they are closed.

    A context manager; what was added and not worked on when an exception comes is closed all the same.
    """

    def __init__(
        self, work: Callable[[Sequence[tuple[str, int]]], None], *, weigh: Callable[[int], int] = lambda _: 0
    ) -> None:
        """`weigh` says how many places of a descriptor's file are read: a batch holds MOST_PLACES, or one file."""
        self._work = work
        self._weigh = weigh
        self._files: list[tuple[str, int]] = []
        self._weight = 0
        self._room = _room()

    def add(self, path: str, fd: int) -> None:
        """Take the descriptor over. Raises what `work` does."""
        self._files.append((path, fd))
        weight = self._weigh(fd)
        if len(self._files) > 1 and self._weight + weight > MOST_PLACES:
            newest = self._files.pop()
            try:
                self.flush()
            finally:
                self._files.append(newest)
        self._weight += weight
        if len(self._files) >= self._room:
            self.flush()

    def flush(self) -> None:
        try:
            if self._files:
                self._work(self._files)
        finally:
            self._close()

    def _close(self) -> None:
        for _, fd in self._files:
            os.close(fd)
        self._files = []
        self._weight = 0
        self._room = _room()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()
        else:
            self._close()


def _room() -> int:
    """How many files the next batch may have: a quarter of the descriptors that are left, for others in this process."""
    left = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    return max(1, min(MOST_FILES, left // 4))


def still_held(files: Sequence[tuple[str, int]]) -> list[str]:
    """Those of `files`, opened by the caller itself, that another process has open or mapped."""
    return [path for path, fd in files if not lease.sole_holder(fd)]


def places_of(ranges: Sequence[Range]) -> int:
    """How many blocks a sample of `ranges` reads at the most."""
    return min(sum(part.length // BLOCK_BYTES for part in ranges), SUBSECTIONS * PLACES_EACH + 2)


def read_files(files: Sequence[tuple[str, int]], ranges: Mapping[int, Sequence[Range]]) -> list[SampleResult]:
    """Sample `ranges[fd]` of each file with the second reader, in one child. Raises KernelError, OSError with the path."""
    wanted = [(path, fd) for path, fd in files if ranges.get(fd)]
    if not wanted:
        return []
    answer = _call(
        "kvtier_node.children.reading:read_files",
        wanted,
        _LIMIT_S,
        ranges=[[[part.offset, part.length] for part in ranges[fd]] for _, fd in wanted],
    )
    return [SampleResult(**found) for found in answer["samples"]]


def overwrite_files(files: Sequence[tuple[str, int]]) -> int:
    """Overwrite each file with random bytes, durably, in one child with a limit by their size; the bytes written.

    Raises KernelError, OSError with the path.
    """
    if not files:
        return 0
    limit_s = _LIMIT_S + sum(os.fstat(fd).st_blocks for _, fd in files) * 512 / _SLOWEST_BYTES_PER_S
    return int(_call("kvtier_node.children.overwriting:overwrite_files", files, limit_s)["written"])


def _call(function: str, files: Sequence[tuple[str, int]], limit_s: float, **arguments: Any) -> dict[str, Any]:
    """A child knows a file by its number in `files`: what it says of one is told with the path."""
    fds = {str(number): fd for number, (_, fd) in enumerate(files)}
    try:
        return bounded.call(function, timeout_s=limit_s, fds=fds, **arguments)
    except OSError as error:
        if isinstance(error.filename, str) and error.filename in fds:
            raise OSError(error.errno, error.strerror, files[int(error.filename)][0]) from error
        raise
