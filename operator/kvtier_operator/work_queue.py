"""A queue of keys: each at most once, never one key in two hands, failures after a pause that grows.

What is only looked at again, because time has passed, lets what has changed go first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

__all__ = ["WorkQueue"]

KeyT = TypeVar("KeyT", bound=Hashable)
_FIRST_S: Final = 0.2
_LONGEST_S: Final = 60.0
_TURN: Final = 8
"""Of so many keys one is of those that can wait, whatever comes."""


class WorkQueue(Generic[KeyT]):
    """Used from one event loop. A key that is added while it is worked on comes back afterwards."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[None] = asyncio.Queue()
        """As many as there are keys in the two lanes, which are sets in the order of their coming."""
        self._first: dict[KeyT, None] = {}
        self._later: dict[KeyT, None] = {}
        self._turn = 0
        self._working: set[KeyT] = set()
        self._resting: dict[KeyT, asyncio.TimerHandle] = {}
        self._again: set[KeyT] = set()
        self._timers: dict[KeyT, asyncio.TimerHandle] = {}
        self._failures: dict[KeyT, int] = {}
        self._not_before: dict[KeyT, float] = {}

    def add(self, key: KeyT, *, can_wait: bool = False) -> None:
        """Now, or as soon as the API server wants to hear of it again (`failed`). `can_wait`: it is not known to have changed."""
        wait_s = self._not_before.get(key, 0.0) - asyncio.get_running_loop().time()
        if wait_s > 0:
            self.add_after(key, wait_s)
        elif key in self._working or key in self._resting:
            self._again.add(key)
        elif not (key in self._first or (can_wait and key in self._later)):
            if key in self._later:
                del self._later[key]
            else:
                self._ready.put_nowait(None)
            (self._later if can_wait else self._first)[key] = None

    def add_after(self, key: KeyT, delay_s: float) -> None:
        """In `delay_s` seconds at the latest: an earlier time that was asked for stays."""
        loop = asyncio.get_running_loop()
        due = loop.time() + delay_s
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= due:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._due, key)

    def _due(self, key: KeyT) -> None:
        self._timers.pop(key, None)
        self.add(key)

    async def take(self) -> KeyT:
        await self._ready.get()
        self._turn = (self._turn + 1) % _TURN
        lane = self._later if self._later and (not self._first or not self._turn) else self._first
        key = next(iter(lane))
        del lane[key]
        self._working.add(key)
        return key

    def done(self, key: KeyT, *, rest_s: float = 0) -> None:
        """The work on `key` succeeded. What asks for it within `rest_s` seconds gets it then, once for all of it."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._working.discard(key)
        if rest_s > 0:
            self._resting[key] = asyncio.get_running_loop().call_later(rest_s, self._rested, key)
        else:
            self._rested(key)

    def failed(self, key: KeyT, *, at_least_s: float = 0) -> float:
        """It did not: `key` comes back after a pause. Returns the pause in seconds.

        `at_least_s`: what the API server asked for. Then it does not come back earlier, whatever adds it.
        """
        if at_least_s > 0:
            self._not_before[key] = asyncio.get_running_loop().time() + at_least_s
        count = self._failures[key] = self._failures.get(key, 0) + 1
        pause_s: float = max(at_least_s, min(_LONGEST_S, _FIRST_S * 2 ** min(count - 1, 16)) * random.uniform(0.8, 1.2))  # noqa: S311
        # What asked for it meanwhile waits with it: a key that fails must not spin.
        self._again.discard(key)
        self._working.discard(key)
        self.add_after(key, pause_s)
        return pause_s

    def _rested(self, key: KeyT) -> None:
        self._resting.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    @property
    def waiting(self) -> int:
        """Keys that can wait, and do."""
        return len(self._later)

    @property
    def busy(self) -> bool:
        """Whether something that changed is worked on, or waits for it."""
        return bool(self._first or self._working)

    def close(self) -> None:
        for timer in (*self._timers.values(), *self._resting.values()):
            timer.cancel()
        self._timers.clear()
        self._resting.clear()

    def __len__(self) -> int:
        return len(self._first) + len(self._later) + len(self._working)
