"""The threads that seal, open, write and read. Loads go first: an engine waits for them, nobody waits for a store."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["IoThreads"]

_LOADS_IN_A_ROW: Final = 8


class IoThreads:
    """`count` daemon threads. A task must not raise. After `stop`, tasks still queued are run, then the threads end."""

    def __init__(self, count: int, name: str) -> None:
        self._loads: deque[Callable[[], None]] = deque()
        self._stores: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._in_a_row = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Sequence[Callable[[], None]], *, load: bool) -> None:
        with self._changed:
            (self._loads if load else self._stores).extend(tasks)
            self._changed.notify(len(tasks))

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._loads and not self._stores:
                if self._stopping:
                    return None
                self._changed.wait()
            # A store waits for at most a few loads, so that a stream of loads cannot hold it up for ever.
            if self._loads and (not self._stores or self._in_a_row < _LOADS_IN_A_ROW):
                self._in_a_row += 1
                return self._loads.popleft()
            self._in_a_row = 0
            return self._stores.popleft()

    def _work(self) -> None:
        while (task := self._take()) is not None:
            task()
            del task  # a task refers to the caller's memory: let go of it before waiting for the next

    def stop(self) -> None:
        """Run what is queued and end the threads; waits for both."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
