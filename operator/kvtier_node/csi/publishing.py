"""NodePublishVolume: kubelet keeps the pod waiting until this is done, which is the fence.

Order: authorise, look at the target, record (ledger), provision, record (API), look at the tier again, record the consumer, put
the gate before the files (`pods.between`), show the volume to the pod. A publish that fails takes everything back; what cannot be
taken back stays on record, guarded, and is said with a code that makes kubelet ask again. Every step can be run twice: kubelet
asks again after a restart of its own, or of the agent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvtier_api.erasure import Trigger
from kvtier_api.errors import Busy, KvtierError
from kvtier_api.volume import VolumeState
from kvtier_node.csi.calls import PublishCall
from kvtier_node.csi.codes import Pending
from kvtier_node.csi.owners import authorise, check_node, owner_of
from kvtier_node.csi.rows import find_row, volume_root
from kvtier_node.csi.surroundings import Context, PodFacts
from kvtier_node.csi.unpublishing import note_end
from kvtier_node.erasing import erase
from kvtier_node.kernel.refusal import refused
from kvtier_node.ledger import VolumeRow
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node, uid_of
from kvtier_node.pods.between import hold_back
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.pods.target import TargetState, open_target, open_target_if_there
from kvtier_node.provisioning import provision, start
from kvtier_node.recovery import destroys_keys
from kvtier_node.volume_watch import VolumeWatch

__all__ = ["Publisher"]


@dataclass(frozen=True)
class Publisher:
    """Makes, or finds again, the volume that a call is about."""

    context: Context

    async def publish(self, call: PublishCall) -> None:
        """Return once the pod's volume is at the target. Raises KvtierError; Pending where asking again helps."""
        row = await self.context.threads.run(lambda: find_row(self.context.node, call.pod.csi_volume_id))
        if row is not None:
            await self._again(call, row)
        else:
            await self._first(call)

    async def _first(self, call: PublishCall) -> None:
        await self.context.threads.run(lambda: _clear_target(call))
        pod = await self.context.cluster.pod(call.pod, call.target.volume)
        tier = await self.context.cluster.tier(call.pod.namespace, call.tier)
        authorise(tier, call.pod, pod, self.context.node.name)
        if tier.spec.node_selector:
            check_node(tier, await self.context.cluster.node_labels(), self.context.node.name)
        uid, gid = owner_of(pod)
        live = await self.context.threads.run(
            lambda: provision(self.context.node, tier, uid=uid, gid=gid, facts={"pod": call.pod.record()})
        )
        log = self.context.log.bind(volume=live.volume_id, pod=f"{call.pod.namespace}/{call.pod.name}", tier=tier.key)
        try:
            await self.context.cluster.recorded(live.volume_id)
            await self._check_again(call, pod, live)
            await self.context.threads.run(lambda: self._hand_over(call, live))
        except Exception as error:
            log.warning("publish-failed", error=str(error))
            await asyncio.shield(self._take_back(call, live))
            raise
        self.context.guards.take(live)
        log.info("published", backend=live.row.backend.value, uid=uid, gid=gid)

    async def _check_again(self, call: PublishCall, pod: PodFacts, live: LiveVolume) -> None:
        """The tier can have been deleted since it was read, and released because no volume was on record. Now one is."""
        tier = await self.context.cluster.tier(call.pod.namespace, call.tier)
        authorise(tier, call.pod, pod, self.context.node.name)
        if uid_of(tier) != live.row.tier_uid:
            raise Pending("was made anew", obj=f"KVCacheTier {tier.key}", remedy="kubelet asks again")

    def _hand_over(self, call: PublishCall, live: LiveVolume) -> None:
        """Consumer on record, then the gate, then the mount: before it, nobody but root reaches the volume."""
        consumer = PodConsumer.of(call.pod)
        start(self.context.node, live, consumer)
        if destroys_keys(live.row):
            hold_back(self.context.node, live, consumer)
        self._show(call, live.row)

    def _show(self, call: PublishCall, row: VolumeRow) -> None:
        with volume_root(self.context.node, row) as root, open_target(call.target) as target:
            target.attach(root)

    async def _take_back(self, call: PublishCall, live: LiveVolume) -> None:
        """Leave nothing: unmount, erase. If that fails the volume stays guarded, and is erased when it can be."""
        try:
            await self.context.threads.run(lambda: self._undo(call, live))
        except (KvtierError, OSError) as error:
            self.context.log.warning("take-back-failed", volume=live.volume_id, error=str(error))
        if not live.row.is_terminal:
            self.context.guards.take(live)

    def _undo(self, call: PublishCall, live: LiveVolume) -> None:
        if live.row.state is VolumeState.IN_USE:
            ended = PodConsumer.of(call.pod).with_end(Trigger.EXIT)
            live.row = self.context.node.ledger.note(live.volume_id, consumer=ended.record())
        try:
            target = open_target_if_there(call.target)
            if target is not None:
                with target:
                    target.detach()
        finally:
            erase(self.context.node, live, Trigger.EXIT)

    async def _again(self, call: PublishCall, row: VolumeRow) -> None:
        """The volume is there already, or its predecessor is not gone yet."""
        watch = self.context.guards.watch_of(row.volume_id)
        if watch is None:
            raise Pending("has no guardian yet", obj=row.volume_id, remedy="kubelet asks again")
        async with watch.turn:  # its end is not noted, and its erasure does not begin, while it is shown
            lost = await self.context.threads.run(lambda: self._show_again(call, row.volume_id, watch))
        if lost is not None:
            # What is at the place is not the volume any more: its key went with its last mount. Never the bare directory.
            await note_end(self.context, row, Trigger.CRASH)
            raise Pending(
                f"lost its mount and is erased first: {lost}", obj=row.volume_id, remedy="kubelet asks again"
            ) from lost

    def _show_again(self, call: PublishCall, volume_id: str, watch: VolumeWatch) -> KvtierError | None:
        """Show the volume if it is in use as the ledger has it now. Returns the error where it is not whole any more."""
        row = self.context.node.ledger.get(volume_id)
        pod = PodConsumer.from_record(row.consumer)
        if row.state is not VolumeState.IN_USE or pod is None or pod.ended:
            why = watch.failure or row.reason
            raise Pending(
                f"an earlier volume of this pod is {row.state.value} and is erased first" + (f": {why}" if why else ""),
                obj=volume_id,
                remedy="kubelet asks again",
            )
        if pod.pod.target != call.pod.target:
            raise Busy(f"is already at {pod.pod.target}", obj=volume_id)
        try:
            self._show(call, row)
        except KvtierError as error:
            if _is_whole(self.context.node, row):
                raise
            return error
        return None


def _is_whole(node: Node, row: VolumeRow) -> bool:
    try:
        with volume_root(node, row):
            return True
    except (KvtierError, OSError):
        return False


def _clear_target(call: PublishCall) -> None:
    """Nothing may be at the target before its volume is made: a mount there is of a volume that ended, data is foreign."""
    try:
        with open_target(call.target) as target:
            if target.state() is TargetState.MOUNTED:
                target.detach()
            if target.state() is TargetState.DATA:
                raise target.foreign()
    except OSError as error:
        raise refused(error, call.pod.target) from error
