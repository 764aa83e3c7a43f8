"""Threads for the agent's blocking work, so that one call that hangs in the kernel keeps nobody else waiting.

Each call is bounded by `kernel.bounded` in the end; the pool only has to be larger than the number of calls that hang at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

__all__ = ["Threads"]

_MOST: Final = 64
_Result = TypeVar("_Result")


class Threads:
    """A pool. Children that a thread starts die with it, so threads are kept, and ended by `close` alone."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_MOST, thread_name_prefix="kvtier")
        self._busy = 0

    @property
    def busy(self) -> int:
        return self._busy

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` in a thread; its result, or what it raised. A cancelled wait does not end the work."""
        self._busy += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        future.add_done_callback(self._ended)
        return await future

    def _ended(self, _future: asyncio.Future[_Result]) -> None:
        self._busy -= 1

    def close(self) -> None:
        """Take no more work. Does not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
