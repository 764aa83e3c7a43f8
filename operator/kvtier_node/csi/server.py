"""The CSI node service as the agent runs it: when it listens, when it begins to serve, how it stops.

Two steps: `listen` opens the endpoint, which says "not ready" to a probe; `serve`, after recovery, registers with kubelet.
Stopping takes the registration away first, so that kubelet asks nothing more, and waits for what is under way. Volumes stay
as they are.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import grpc.aio

from kvtier_api.errors import ForeignData, KernelError, KvtierError
from kvtier_node.csi.calls import PublishCall, StatsCall, UnpublishCall
from kvtier_node.csi.generated import csi_pb2_grpc
from kvtier_node.csi.names import DRIVER
from kvtier_node.csi.publishing import Publisher
from kvtier_node.csi.registration import Registration
from kvtier_node.csi.rows import left_of
from kvtier_node.csi.services import IdentityService, NodeService
from kvtier_node.csi.sockets import SocketPlace
from kvtier_node.csi.surroundings import Cluster, Context, Guards
from kvtier_node.csi.unpublishing import Unpublisher
from kvtier_node.csi.usage import Usage, usage_of
from kvtier_node.event_log import Log
from kvtier_node.node import Node
from kvtier_node.pods.target import TargetPath
from kvtier_node.tasks import end_tasks
from kvtier_node.threads import Threads

__all__ = ["DEFAULT_KUBELET", "CsiOptions", "CsiService"]

DEFAULT_KUBELET: Final = "/var/lib/kubelet"
_GRACE_S: Final = 2.0
_DRAIN_S: Final = 15.0


@dataclass(frozen=True)
class CsiOptions:
    """Paths as kubelet has them. `endpoint` and `registration` None: in kubelet's own directory."""

    kubelet: str = DEFAULT_KUBELET
    endpoint: str | None = None
    registration: str | None = None

    @property
    def endpoint_path(self) -> str:
        return self.endpoint or f"{self.kubelet}/plugins/{DRIVER}/csi.sock"

    @property
    def registration_directory(self) -> str:
        return self.registration or f"{self.kubelet}/plugins_registry"


class _Work:
    """What the services hand calls to."""

    def __init__(self, context: Context) -> None:
        self._node = context.node
        self._threads = context.threads
        self._guards = context.guards
        self._publisher = Publisher(context)
        self._unpublisher = Unpublisher(context)
        self._foreign: set[str] = set()

    async def publish(self, call: PublishCall) -> None:
        key = f"{call.pod.namespace}/{call.tier}"
        try:
            await self._publisher.publish(call)
        except ForeignData as error:
            self._guards.foreign_data(key, True)
            await self._say(f"KVCacheTier {key}", error)
            raise
        self._guards.foreign_data(key, False)

    async def unpublish(self, call: UnpublishCall) -> None:
        try:
            await self._unpublisher.unpublish(call)
        except ForeignData as error:
            await self._say(str(call.target), error)
            raise

    async def _say(self, obj: str, error: ForeignData) -> None:
        """An event, once for each object and text: kubelet asks again and again."""
        if f"{obj} {error}" not in self._foreign:
            self._foreign.add(f"{obj} {error}")
            await self._threads.run(
                lambda: self._node.ledger.add_event("Warning", "ForeignData", obj, str(error)[:1000])
            )

    async def usage(self, call: StatsCall) -> Usage:
        return await self._threads.run(lambda: usage_of(self._node, call))

    async def left(self, volume_id: str, target: TargetPath) -> tuple[bool, str]:
        found = await self._threads.run(lambda: left_of(self._node, volume_id, target))
        watch = self._guards.watch_of(found.row.volume_id) if found.row is not None else None
        return found.anything, watch.failure if watch is not None else ""


class CsiService:
    """`listen`, then `serve` once recovery has finished, then `close`."""

    def __init__(
        self, node: Node, options: CsiOptions, *, guards: Guards, cluster: Cluster, threads: Threads, log: Log
    ) -> None:
        self._options = options
        self._log = log
        self._ready = False
        self._place: SocketPlace | None = None
        self._server: grpc.aio.Server | None = None
        self._registering: asyncio.Task[None] | None = None
        work = _Work(Context(node, guards, cluster, threads, log))
        self._identity = IdentityService(version("kvtier"), lambda: self._ready)
        self._node_service = NodeService(
            work, node_id=node.name, kubelet=options.kubelet, ready=lambda: self._ready, log=log
        )
        self.registration = Registration(
            options.registration_directory, kubelet=options.kubelet, endpoint=options.endpoint_path, log=log
        )

    async def listen(self) -> None:
        """Open the endpoint. Raises Busy where another agent answers there, ForeignData, UnsafePath, KernelError."""
        path = self._options.endpoint_path
        root = self._options.kubelet if path.startswith(f"{self._options.kubelet}/") else os.path.dirname(path)
        self._place = SocketPlace(path, root=root, create=True)
        # Kernel work has limits of its own; a message of kubelet's is small.
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 20)])
        csi_pb2_grpc.add_IdentityServicer_to_server(self._identity, self._server)  # type: ignore[no-untyped-call]
        csi_pb2_grpc.add_NodeServicer_to_server(self._node_service, self._server)  # type: ignore[no-untyped-call]
        try:
            self._server.add_insecure_port(self._place.address)
            await self._server.start()
            self._place.show()
        except (RuntimeError, OSError) as error:  # gRPC raises RuntimeError where it cannot bind
            raise KernelError(f"cannot listen: {error}", obj=path) from error

    def serve(self) -> None:
        """Recovery has finished: say so, and register with kubelet."""
        self._ready = True
        self._registering = asyncio.get_running_loop().create_task(self.registration.run())

    async def close(self) -> None:
        """Take the registration away, let what runs come to its end, stop. Volumes in use stay in use."""
        if self._registering is not None:
            await end_tasks([self._registering], limit_s=_DRAIN_S)
        self._ready = False
        left = await self._node_service.operations.drain(_DRAIN_S)
        if left:
            self._log.warning("stopped-with-calls-under-way", calls=left)
        if self._server is not None:
            await self._server.stop(_GRACE_S)
        if self._place is not None:
            try:
                self._place.remove()
            except KvtierError as error:
                self._log.warning("socket-left", error=str(error))
            self._place.close()
