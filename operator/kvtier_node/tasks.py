"""Tasks of the event loop that run until they are ended, and how they are ended for certain.

A cancellation can get lost: `asyncio.wait_for` of Python 3.11 swallows one that comes just as what it waits for is done. So waits
here are by `asyncio.timeout`, and a task is cancelled until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["end_tasks", "wait_for_event"]

_EACH_S: Final = 0.5


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, at most `seconds`; whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], *, limit_s: float) -> int:
    """Cancel the tasks until they have ended, at most for `limit_s` seconds; how many have not."""
    left = {task for task in tasks if not task.done()}
    loop = asyncio.get_running_loop()
    until = loop.time() + limit_s
    while left and loop.time() < until:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_EACH_S)
    return len(left)
