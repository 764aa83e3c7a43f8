"""Tasks end when they are told to, also one that loses a cancellation."""

from __future__ import annotations

import asyncio

from kvtier_node.tasks import end_tasks, wait_for_event


def test_a_task_that_swallows_cancellations_is_cancelled_until_it_ends() -> None:
    """Python 3.11's `asyncio.wait_for` does so when what it waits for is done at the same moment."""

    async def run() -> None:
        swallowed = 0

        async def stubborn() -> None:
            nonlocal swallowed
            while swallowed < 3:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    swallowed += 1

        async def deaf() -> None:
            while not enough.is_set():
                try:
                    await enough.wait()
                except asyncio.CancelledError:
                    continue

        enough = asyncio.Event()
        one, other = asyncio.create_task(stubborn()), asyncio.create_task(deaf())
        await asyncio.sleep(0)
        assert await end_tasks([one, other], limit_s=2.5) == 1
        assert swallowed == 3
        enough.set()
        await other

    asyncio.run(run())


def test_a_wait_for_an_event_says_whether_it_came_and_is_cancelled_even_when_it_did() -> None:
    async def run() -> None:
        event = asyncio.Event()
        assert await wait_for_event(event, 0.01) is False
        task = asyncio.create_task(wait_for_event(event, 60))
        await asyncio.sleep(0)
        event.set()
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        raise AssertionError("the cancellation was swallowed")

    asyncio.run(run())
