"""One operation on a volume at a time; what was begun goes on when its caller gives up, and the next such call joins it.

kubelet gives a call two minutes and asks again; a large volume, or a slow disk, may need longer. A call that comes while
another one waits for the same volume is told so (`Pending`, ABORTED: "operation pending for volume" in the CSI specification).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final

from kvtier_node.csi.codes import Pending

__all__ = ["Operations", "wait_limit_s"]

_MOST_S: Final = 110.0
"""Less than the two minutes that kubelet waits (pkg/volume/csi, `csiTimeout`)."""
_MARGIN_S: Final = 5.0
_LEAST_S: Final = 0.2


def wait_limit_s(remaining_s: float | None) -> float:
    """How long a call may wait, if `remaining_s` seconds are left until its own deadline (None: it has none)."""
    if remaining_s is None:
        return _MOST_S
    return max(_LEAST_S, min(_MOST_S, remaining_s - min(_MARGIN_S, remaining_s / 4)))


@dataclass
class _Operation:
    what: Hashable
    task: asyncio.Task[None]
    waiters: int = 0


class Operations:
    """The operations of one service."""

    def __init__(self) -> None:
        self._running: dict[str, _Operation] = {}

    async def run(
        self, volume_id: str, what: Hashable, work: Callable[[], Coroutine[Any, Any, None]], *, limit_s: float
    ) -> None:
        """Do `work`, or join the same `what` that a caller left behind; raises what the work raises.

        Raises Pending when another call waits for this volume, when another `what` is under way, and after `limit_s` seconds.
        """
        operation = self._running.get(volume_id)
        if operation is None:
            operation = _Operation(what, asyncio.get_running_loop().create_task(work()))
            self._running[volume_id] = operation
            operation.task.add_done_callback(lambda task: self._ended(volume_id, task))
        elif operation.waiters or operation.what != what:
            raise Pending("another call for this volume is under way", obj=volume_id, remedy="kubelet asks again")
        operation.waiters += 1
        try:
            await asyncio.wait({operation.task}, timeout=limit_s)
        finally:
            operation.waiters -= 1
        if not operation.task.done():
            raise Pending(
                f"not done after {limit_s:.0f} s; it goes on, and the next call joins it",
                obj=volume_id,
                remedy="kubelet asks again",
            )
        operation.task.result()

    def _ended(self, volume_id: str, task: asyncio.Task[None]) -> None:
        self._running.pop(volume_id, None)
        if not task.cancelled():
            task.exception()  # its caller may have gone; what failed is tried anew by the next call

    async def drain(self, limit_s: float) -> int:
        """Wait for what runs, at most `limit_s` seconds; how many go on."""
        tasks = [operation.task for operation in self._running.values()]
        if not tasks:
            return 0
        _, pending = await asyncio.wait(tasks, timeout=limit_s)
        return len(pending)
