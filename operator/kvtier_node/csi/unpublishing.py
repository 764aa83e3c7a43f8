"""NodeUnpublishVolume: the pod ended; its volume is taken off the target and erased, and only then is the answer OK.

OK also for a volume that is not known, twice, for a target that is missing, not mounted, or broken (kubernetes#90752, #121271):
kubelet asks until it hears OK, and the pod stays `Terminating` until then. It may also never ask (kubernetes#127229, #92299):
then the evidence of `pods.consumer` ends the volume. The erasing itself is the guardian's; here it is waited for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from kvtier_api.erasure import Trigger
from kvtier_api.errors import KvtierError
from kvtier_api.volume import VolumeState
from kvtier_node.csi.calls import UnpublishCall
from kvtier_node.csi.rows import find_row
from kvtier_node.csi.surroundings import Context
from kvtier_node.ledger import ArrowRefused, VolumeRow
from kvtier_node.pods.consumer import PodConsumer, pod_of
from kvtier_node.pods.target import TargetPath, open_target_if_there

__all__ = ["Unpublisher", "note_end"]

_POLL_S: Final = 0.1
_ASK_S: Final = 3.0


@dataclass(frozen=True)
class Unpublisher:
    context: Context

    async def unpublish(self, call: UnpublishCall) -> None:
        """Return once nothing of the volume is at the target, and it is erased and on record.

        Raises KvtierError; it is then asked again, and what began goes on. Waits for as long as the erasure takes.
        """
        row = await self.context.threads.run(lambda: find_row(self.context.node, call.volume_id))
        if row is None:
            await self.context.threads.run(lambda: _clean(call.target))
            return
        if row.state is VolumeState.IN_USE:
            trigger = await self._trigger(row, call)
            await note_end(self.context, row, trigger, call.target)
            await self._erased(row, trigger)
        else:
            await self.context.threads.run(lambda: _detach(call.target))
            await self._erased(row, Trigger.CRASH)
        await self.context.threads.run(lambda: _clean(call.target))
        self.context.log.info("unpublished", volume=row.volume_id)

    async def _trigger(self, row: VolumeRow, call: UnpublishCall) -> Trigger:
        """Exit only where the API server says that the containers ended by themselves; what nobody saw is a crash."""
        pod = pod_of(row.consumer, row.facts)
        if pod is None:
            return Trigger.CRASH
        try:
            async with asyncio.timeout(_ASK_S):
                facts = await self.context.cluster.pod(pod, call.target.volume)
        except (KvtierError, TimeoutError) as error:  # the pod is gone already, or the API server is: no news
            self.context.log.info("end-not-seen", volume=row.volume_id, error=str(error))
            return Trigger.CRASH
        return Trigger.EXIT if facts.ended_cleanly else Trigger.CRASH

    async def _erased(self, row: VolumeRow, trigger: Trigger) -> None:
        while not (await self.context.threads.run(lambda: self.context.node.ledger.get(row.volume_id))).is_terminal:
            watch = self.context.guards.watch_of(row.volume_id)
            if watch is not None and _believes_in_use(watch.live.row):  # it took over before the end was on record
                await note_end(self.context, row, trigger)
            await asyncio.sleep(_POLL_S)


def _believes_in_use(row: VolumeRow) -> bool:
    pod = PodConsumer.from_record(row.consumer)
    return row.state is VolumeState.IN_USE and pod is not None and pod.ended is None


async def note_end(context: Context, row: VolumeRow, trigger: Trigger, target: TargetPath | None = None) -> None:
    """Put on record that the pod's use has ended, and take the target away; from then on the guardian erases."""

    node = context.node

    def note() -> VolumeRow:
        current = node.ledger.get(row.volume_id)
        pod = PodConsumer.from_record(current.consumer)
        if pod is not None and _believes_in_use(current):
            try:
                current = node.ledger.note(row.volume_id, consumer=pod.with_end(trigger).record())
            except ArrowRefused:  # it ended meanwhile
                return node.ledger.get(row.volume_id)
        if target is not None:
            _detach(target)
        return current

    watch = context.guards.watch_of(row.volume_id)
    if watch is None:  # nobody guards it just now: whoever takes it over reads the record
        await context.threads.run(note)
        return
    async with watch.turn:
        current = await context.threads.run(note)
        if not watch.live.row.is_terminal:
            watch.live.row = current


def _detach(path: TargetPath) -> None:
    target = open_target_if_there(path)
    if target is not None:
        with target:
            target.detach()


def _clean(path: TargetPath) -> None:
    """Nothing mounted, and no directory: kubelet removes what is above it. Data of others stays, and is said."""
    target = open_target_if_there(path)
    if target is None:
        return
    with target:
        target.detach()
        target.remove()
