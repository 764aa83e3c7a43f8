"""The threads that seal, open, write and read. Loads go first: an engine waits for them, nobody waits for a store.

Sealing and opening need a processor and, between two blocks, the interpreter; writing and reading need neither. So
only `turns` threads do the former at a time: more would hand the interpreter lock, and the caches, to each other at
every block. A thread that has sealed wakes the next one and goes on to write (leader and followers): one thread is
woken for each run, and none for nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

__all__ = ["IoThreads", "Task", "Turn"]

_LOADS_IN_A_ROW: Final = 8


class Turn:
    """One thread's right to seal and open, or the lack of it. For that thread alone."""

    __slots__ = ("_held", "_threads")

    def __init__(self, threads: IoThreads, *, held: bool) -> None:
        self._threads = threads
        self._held = held

    def begin(self) -> None:
        """Wait for a turn, unless this thread has it."""
        if not self._held:
            self._threads.wait_for_turn()
            self._held = True

    def end(self) -> None:
        """Give the turn back, if this thread has it, and let the next one begin."""
        if self._held:
            self._held = False
            self._threads.turn_ended()


Task: TypeAlias = Callable[[Turn], None]


class IoThreads:
    """`count` daemon threads. A task must not raise. After `stop`, tasks still queued are run, then the threads end.

    A store is called in its turn, and ends it; a load is called without one, and begins it when it has read.
    """

    def __init__(self, count: int, name: str, *, turns: int) -> None:
        lock = threading.Lock()
        self._loads: deque[Task] = deque()
        self._stores: deque[Task] = deque()
        self._changed = threading.Condition(lock)
        self._turn_free = threading.Condition(lock)
        self._turns = turns
        self._waiting_for_turn = 0
        self._idle = 0
        self._stopping = False
        self._in_a_row = 0
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: Sequence[Task], *, load: bool) -> None:
        with self._changed:
            (self._loads if load else self._stores).extend(tasks)
            # Of stores only as many threads are woken as may seal now; each wakes the next.
            self._wake(len(tasks) if load else min(len(tasks), self._turns))

    def run_here(self, tasks: Sequence[Task], *, load: bool) -> None:
        """Run tasks in the calling thread."""
        for task in tasks:
            turn = Turn(self, held=False)
            if not load:
                turn.begin()
            try:
                task(turn)
            finally:
                turn.end()

    def wait_for_turn(self) -> None:
        with self._turn_free:
            self._waiting_for_turn += 1
            while not self._turns:
                self._turn_free.wait()
            self._waiting_for_turn -= 1
            self._turns -= 1

    def turn_ended(self) -> None:
        with self._changed:
            self._turns += 1
            if self._waiting_for_turn:
                self._turn_free.notify()
            if self._stores:
                self._wake(1)

    def _wake(self, count: int) -> None:
        if self._idle and count:
            self._changed.notify(count)

    def _take(self) -> tuple[Task, Turn] | None:
        with self._changed:
            while True:
                store = self._stores and self._turns
                # A store waits for at most a few loads, so that a stream of loads cannot hold it up for ever.
                if self._loads and (not store or self._in_a_row < _LOADS_IN_A_ROW):
                    self._in_a_row += 1
                    return self._loads.popleft(), Turn(self, held=False)
                if store:
                    self._in_a_row = 0
                    self._turns -= 1
                    if self._stopping:  # the others may have nothing left to wait for
                        self._changed.notify_all()
                    return self._stores.popleft(), Turn(self, held=True)
                if self._stopping and not self._stores:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            task, turn = taken
            task(turn)
            turn.end()
            del taken, task  # a task refers to the caller's memory: let go of it before waiting for the next

    def stop(self) -> None:
        """Run what is queued and end the threads; waits for both."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
