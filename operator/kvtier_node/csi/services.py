"""The gRPC services: from a request to a call, and from what it raises to a code. No decision is made here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio

from kvtier_api.errors import KernelError, KvtierError
from kvtier_node.csi.calls import PublishCall, StatsCall, UnpublishCall
from kvtier_node.csi.codes import BadCall, Pending, code_of, text_of
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.generated import csi_pb2_grpc
from kvtier_node.csi.names import DRIVER
from kvtier_node.csi.operations import Operations, wait_limit_s
from kvtier_node.csi.usage import Figures, Usage
from kvtier_node.event_log import Log
from kvtier_node.kernel.refusal import refused
from kvtier_node.pods.target import TargetPath

__all__ = ["IdentityService", "NodeService", "Work"]

ServicerContext: TypeAlias = grpc.aio.ServicerContext[object, object]


class Work(Protocol):
    """What the node service hands calls to. Each raises KvtierError or OSError."""

    async def publish(self, call: PublishCall) -> None: ...
    async def unpublish(self, call: UnpublishCall) -> None: ...
    async def usage(self, call: StatsCall) -> Usage: ...

    async def left(self, volume_id: str, target: TargetPath) -> tuple[bool, str]:
        """Whether anything of the volume may be on this node, and what keeps it from being erased, if anything does."""


class IdentityService(csi_pb2_grpc.IdentityServicer):
    """Who this is. `ready`: whether recovery has finished; before, nothing is published."""

    def __init__(self, version: str, ready: Callable[[], bool]) -> None:
        self._version = version
        self._ready = ready

    async def GetPluginInfo(
        self, request: pb.GetPluginInfoRequest, context: ServicerContext
    ) -> pb.GetPluginInfoResponse:
        return pb.GetPluginInfoResponse(name=DRIVER, vendor_version=self._version)

    async def GetPluginCapabilities(
        self, request: pb.GetPluginCapabilitiesRequest, context: ServicerContext
    ) -> pb.GetPluginCapabilitiesResponse:
        return pb.GetPluginCapabilitiesResponse()

    async def Probe(self, request: pb.ProbeRequest, context: ServicerContext) -> pb.ProbeResponse:
        return pb.ProbeResponse(ready=pb.BoolValue(value=self._ready()))


class NodeService(csi_pb2_grpc.NodeServicer):
    """Ephemeral inline volumes. What is not defined here answers UNIMPLEMENTED."""

    def __init__(self, work: Work, *, node_id: str, kubelet: str, ready: Callable[[], bool], log: Log) -> None:
        self._work = work
        self._node_id = node_id
        self._kubelet = kubelet
        self._ready = ready
        self._log = log
        self.operations = Operations()

    async def NodePublishVolume(
        self, request: pb.NodePublishVolumeRequest, context: ServicerContext
    ) -> pb.NodePublishVolumeResponse:
        try:
            call = PublishCall.of(request, kubelet=self._kubelet)
        except BadCall as error:
            await self._refuse(context, error, state_left=False)
        await self._run(context, "publish", call, lambda: self._work.publish(call))
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, request: pb.NodeUnpublishVolumeRequest, context: ServicerContext
    ) -> pb.NodeUnpublishVolumeResponse:
        try:
            call = UnpublishCall.of(request, kubelet=self._kubelet)
        except BadCall as error:
            await self._refuse(context, error, state_left=False)
        await self._run(context, "unpublish", call, lambda: self._work.unpublish(call))
        return pb.NodeUnpublishVolumeResponse()

    async def _run(
        self,
        context: ServicerContext,
        name: str,
        call: PublishCall | UnpublishCall,
        work: Callable[[], Awaitable[None]],
    ) -> None:
        if not self._ready():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent finishes what a crash or restart left")
        volume_id, target = call.volume_id, call.target

        async def begun() -> None:
            try:
                await work()
            except KvtierError:
                raise
            except OSError as error:
                raise refused(error, str(target)) from error
            except Exception as error:
                self._log.exception(f"{name}-failed", csi_volume=volume_id)
                raise KernelError(
                    f"a defect of kvtier: {type(error).__name__}", obj=volume_id, remedy="see the agent's log"
                ) from error

        limit_s = wait_limit_s(context.time_remaining())
        try:
            await self.operations.run(volume_id, (name, call), begun, limit_s=limit_s)
        except KvtierError as error:
            left, why = await self._work.left(volume_id, target)
            if why and why not in str(error):
                error = Pending(f"{error.cause}; {why}", obj=error.obj, remedy=error.remedy)
            self._log.info(f"{name}-refused", csi_volume=volume_id, error=str(error), state_left=left)
            await self._refuse(context, error, state_left=left)

    async def NodeGetVolumeStats(
        self, request: pb.NodeGetVolumeStatsRequest, context: ServicerContext
    ) -> pb.NodeGetVolumeStatsResponse:
        try:
            found = await self._work.usage(StatsCall.of(request, kubelet=self._kubelet))
        except KvtierError as error:
            await self._refuse(context, error, state_left=False)
        except OSError as error:
            await self._refuse(context, refused(error, request.volume_path), state_left=False)
        usage = [_usage(found.bytes, pb.VolumeUsage.BYTES)]
        if found.inodes is not None:
            usage.append(_usage(found.inodes, pb.VolumeUsage.INODES))
        return pb.NodeGetVolumeStatsResponse(usage=usage)

    async def NodeGetCapabilities(
        self, request: pb.NodeGetCapabilitiesRequest, context: ServicerContext
    ) -> pb.NodeGetCapabilitiesResponse:
        stats = pb.NodeServiceCapability.RPC(type=pb.NodeServiceCapability.RPC.GET_VOLUME_STATS)
        return pb.NodeGetCapabilitiesResponse(capabilities=[pb.NodeServiceCapability(rpc=stats)])

    async def NodeGetInfo(self, request: pb.NodeGetInfoRequest, context: ServicerContext) -> pb.NodeGetInfoResponse:
        return pb.NodeGetInfoResponse(node_id=self._node_id)

    async def _refuse(self, context: ServicerContext, error: KvtierError, *, state_left: bool) -> NoReturn:
        await context.abort(code_of(error, state_left=state_left), text_of(error))
        raise AssertionError("abort returned")


def _usage(figures: Figures, unit: pb.VolumeUsage.Unit) -> pb.VolumeUsage:
    return pb.VolumeUsage(total=figures.total, used=figures.used, available=figures.available, unit=unit)
