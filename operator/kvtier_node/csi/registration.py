"""Registration with kubelet, without a sidecar: its plug-in watcher finds a socket, asks it who it is, and comes back for more.

The socket is shown last, after recovery: an unclean node publishes nothing, and pods wait. It is shown again when kubelet refused
it, and when its name went (node-driver-registrar#139). Why not node-driver-registrar: docs/decisions/006-own-registration.md.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

import grpc
import grpc.aio

from kvtier_api.errors import KvtierError
from kvtier_node.csi.generated import pluginregistration_pb2 as pb
from kvtier_node.csi.generated.pluginregistration_pb2_grpc import (
    RegistrationServicer,
    add_RegistrationServicer_to_server,
)
from kvtier_node.csi.names import DRIVER, REGISTRATION_SOCKET, SUPPORTED_VERSIONS
from kvtier_node.csi.sockets import SocketPlace
from kvtier_node.event_log import Log
from kvtier_node.tasks import wait_for_event

__all__ = ["Registration"]

ServicerContext: TypeAlias = grpc.aio.ServicerContext[object, object]

_LOOK_S: Final = 2.0
_FIRST_RETRY_S: Final = 1.0
_LAST_RETRY_S: Final = 60.0
_GRACE_S: Final = 1.0


class _Service(RegistrationServicer):
    def __init__(self, endpoint: str, log: Log) -> None:
        self._endpoint = endpoint
        self._log = log
        self.registered: bool | None = None
        """What kubelet said last; None before it said anything."""
        self.refused = asyncio.Event()

    async def GetInfo(self, request: pb.InfoRequest, context: ServicerContext) -> pb.PluginInfo:
        return pb.PluginInfo(
            type="CSIPlugin", name=DRIVER, endpoint=self._endpoint, supported_versions=SUPPORTED_VERSIONS
        )

    async def NotifyRegistrationStatus(
        self, request: pb.RegistrationStatus, context: ServicerContext
    ) -> pb.RegistrationStatusResponse:
        self.registered = request.plugin_registered
        if request.plugin_registered:
            self._log.info("registered-with-kubelet", endpoint=self._endpoint)
        else:
            self._log.error("kubelet-refused", error=request.error)
            self.refused.set()
        return pb.RegistrationStatusResponse()


class Registration:
    """Shows the socket from `run` until it is cancelled, and then takes it away."""

    def __init__(self, directory: str, *, kubelet: str, endpoint: str, log: Log) -> None:
        self._path = f"{directory}/{REGISTRATION_SOCKET}"
        self._kubelet = kubelet
        self._endpoint = endpoint
        self._log = log
        self._service = _Service(endpoint, log)

    @property
    def registered(self) -> bool:
        return self._service.registered is True

    async def run(self) -> None:
        """Register, and stay registered, until cancelled. What fails is logged and tried again."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                await self._shown_until_lost()
                if self.registered:
                    delay_s = _FIRST_RETRY_S
            except (KvtierError, OSError) as error:
                self._log.error("cannot-register", path=self._path, error=str(error))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _LAST_RETRY_S)

    async def _shown_until_lost(self) -> None:
        place = SocketPlace(self._path, root=self._kubelet, create=False)
        server = grpc.aio.server()
        try:
            # `registered` stays as it was: kubelet says it anew.
            self._service.refused.clear()
            add_RegistrationServicer_to_server(self._service, server)  # type: ignore[no-untyped-call]
            server.add_insecure_port(place.address)
            await server.start()
            place.show()
            while place.is_shown() and not self._service.refused.is_set():
                await wait_for_event(self._service.refused, _LOOK_S)
        finally:
            place.remove()
            await server.stop(_GRACE_S)
            place.close()
