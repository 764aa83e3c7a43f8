"""One guarded volume, looked after until it has ended: its consumer's end, its erasure, retries, requests about it.

Each turn runs in a thread, so that a volume that is slow, or hangs in the kernel, keeps nobody else waiting. Which volumes
there are to guard is the agent's to find out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import KvtierError, LedgerError
from kvtier_api.tier import KVCacheTierSpec
from kvtier_node.erasing import abandon
from kvtier_node.event_log import Log
from kvtier_node.guarding import LOOK_S, Look, fulfil_requests, in_scope, look
from kvtier_node.kernel.refusal import as_refusal
from kvtier_node.ledger import ABANDON, ArrowRefused, EraseRequest
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.recovery import usage
from kvtier_node.threads import Threads

__all__ = ["VolumeWatch"]

_FIRST_RETRY_S: Final = 0.5
_RETRY_IN_TIME_S: Final = 5.0
_RETRY_LATE_S: Final = 30.0


@dataclass
class Turn:
    """The result of one turn: the volume has ended, or what the look at it found."""

    ended: bool
    seen: Look


class VolumeWatch:
    """Guards `live` from construction to the end of `run`. `failure` is the last error, empty if there is none."""

    def __init__(
        self,
        node: Node,
        live: LiveVolume,
        *,
        log: Log,
        requests: Callable[[], Sequence[EraseRequest]],
        threads: Threads,
    ) -> None:
        self._node = node
        self.live = live
        self._log = log.bind(volume=live.volume_id, tier=live.row.tier_key)
        self._requests = requests
        self._threads = threads
        self.failure = ""
        self._failing_since = 0.0
        self.turn = asyncio.Lock()
        """Held during a turn and during a measurement: an open file of the one must not mislead the other."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look until the volume has ended or `stopping` is set. Then the guardian's lock is free again."""
        try:
            while not stopping.is_set():
                async with self.turn:
                    turn = await self._threads.run(self._turn)
                if turn.ended:
                    return
                await _sleep(stopping, self._delay_s())
        finally:
            self.release()

    def release(self) -> None:
        """Stop guarding without erasing: what is in use stays in use, and the next start adopts it."""
        self.live.close_watch()
        self.live.guardian.close()

    def _turn(self) -> Turn:
        try:
            return self._look()
        except (KvtierError, OSError) as error:
            failure = as_refusal(error, self.live.row.place)
            self._failed(failure)
            return Turn(False, Look(True, "not known", error=failure))

    def _look(self) -> Turn:
        live = self.live
        for request in self._requests():
            if request.scope == ABANDON and request.argument == live.volume_id:
                if (used := usage(self._node, live)).alive:
                    _close(self._node, request, f"the volume is in use: {used.reason}", done=False)
                    self._log.warning("not-abandoned", reason=used.reason)
                    continue
                abandon(self._node, live, request.reason)
                _close(self._node, request)
                self._log.warning("abandoned", reason=request.reason)
                return Turn(True, Look(False, "abandoned"))
            if in_scope(request, live.row):
                done = fulfil_requests(self._node, [live])
                if done:
                    self._done(Look(False, "requested", receipt=done[0]))
                    return Turn(True, Look(False, "requested", receipt=done[0]))
                if live.said:
                    self._failed(KvtierError(live.said))
        seen = look(self._node, live)
        if seen.receipt is not None:
            self._done(seen)
            return Turn(True, seen)
        if seen.error is not None:
            self._failed(seen.error)
        elif seen.in_use:
            self.failure = ""
        return Turn(False, seen)

    def _done(self, seen: Look) -> None:
        receipt = seen.receipt
        if receipt is None:
            return
        self.failure = ""
        self._log.info(
            "erased",
            receipt=receipt.id,
            trigger=receipt.trigger.value,
            technique=receipt.technique.value,
            seconds=str(receipt.duration_s),
            deadline_met=receipt.deadline_met,
        )

    def _failed(self, error: KvtierError) -> None:
        text = str(error)
        if not self.failure:
            self._failing_since = time.monotonic()
        if text != self.failure:  # not the same one again at every try
            self._log.warning("cannot-erase-yet", error=text)
            try:
                self._node.ledger.add_event("Warning", type(error).__name__, self.live.volume_id, text)
            except LedgerError as full:  # it must not keep the volume from being tried again
                self._log.error("event-not-recorded", error=str(full))
        self.failure = text

    def _delay_s(self) -> float:
        """Until the next turn: short while the consumer lives; after failures, longer and longer, and still in time."""
        if not self.failure:
            return LOOK_S
        failing_s = time.monotonic() - self._failing_since
        deadline_s = float(KVCacheTierSpec.model_validate(self.live.row.spec).scrub.deadline)
        return min(max(_FIRST_RETRY_S, failing_s / 4), _RETRY_IN_TIME_S if failing_s < deadline_s else _RETRY_LATE_S)


def _close(
    node: Node, request: EraseRequest, result: str = "abandoned; nothing is claimed", *, done: bool = True
) -> None:
    try:
        node.ledger.close_request(request.id, result, done=done)
    except ArrowRefused:
        pass  # closed by another already


async def _sleep(stopping: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        pass
