"""Writes to the API server: the node's volumes and the records of their erasures, by server-side apply.

An apply says all that this agent has to say about an object, so it can be repeated, and repeats cost the server nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from lightkube import AsyncClient
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Node
from lightkube.resources.events_v1 import Event

from kvtier_api.erasure import KVCacheErasureStatus
from kvtier_api.errors import Busy, NotFound
from kvtier_api.meta import API_VERSION
from kvtier_api.volume import KVCacheVolumeStatus
from kvtier_node.cluster.client import ERASURES, FIELD_MANAGER, VOLUMES, Kind, translated
from kvtier_node.cluster.errors import NamespaceEnding
from kvtier_node.cluster.objects import erasure_object, volume_object
from kvtier_node.ledger import VolumeRow
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.receipts import Receipt

__all__ = ["EventText", "Writer"]

_NOTE_LIMIT: Final = 1024
_CONTROLLER: Final = "kvtier.dev/node"


@dataclass(frozen=True)
class EventText:
    """What an event says. `kind` is Normal or Warning."""

    reason: str
    kind: str
    note: str
    at: datetime


class Writer:
    """Raises ApiUnavailable, and NotPermitted, NotFound (the namespace is gone), InvalidResource for what is refused."""

    def __init__(self, client: AsyncClient, node_name: str) -> None:
        self._client = client
        self._node_name = node_name
        self._system_uuid: str | None = None

    async def volume(self, row: VolumeRow, pod: PodIdentity, *, owned: bool) -> None:
        """The object of a volume, without its status; `owned` by its tier, while that is there."""
        uuid = await self._machine()
        await self._apply(VOLUMES, volume_object(row, pod, system_uuid=uuid, owned=owned))

    async def volume_status(self, row: VolumeRow, status: KVCacheVolumeStatus) -> None:
        await self._apply_status(VOLUMES, row.tier_namespace, row.volume_id, status)

    async def erasure(self, row: VolumeRow, pod: PodIdentity, receipt: Receipt) -> None:
        """The record of an erasure, with its status. One that is complete already stays as it is.

        In a namespace that is being deleted none can be made: then the receipt in this node's chain is the record, and the
        volume's status names it. Otherwise the namespace would wait for its volumes, and they for it.
        """
        body, status = erasure_object(row, pod, receipt)
        try:
            await self._apply(ERASURES, body)
        except NamespaceEnding:
            return
        await self._apply_status(ERASURES, row.tier_namespace, receipt.id, status)

    async def _apply(self, kind: Kind, body: dict[str, Any]) -> None:
        with translated(f"{kind.__name__} {body['metadata']['namespace']}/{body['metadata']['name']}"):
            await self._client.apply(_as(kind, body), field_manager=FIELD_MANAGER, force=True)

    async def _apply_status(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        status: KVCacheVolumeStatus | KVCacheErasureStatus,
        uid: str | None = None,
    ) -> None:
        body = {
            "apiVersion": API_VERSION,
            "kind": kind.__name__,
            "metadata": {"name": name, "namespace": namespace} | ({"uid": uid} if uid is not None else {}),
            "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        with translated(f"{kind.__name__} {namespace}/{name}, status"):
            await self._client.apply(
                _as(kind.Status, body), name, namespace=namespace, field_manager=FIELD_MANAGER, force=True
            )

    async def _machine(self) -> str | None:
        """`status.nodeInfo.systemUUID` of this node: which machine has the keys."""
        if self._system_uuid is None:
            try:
                with translated(f"Node {self._node_name}"):
                    node = await self._client.get(Node, self._node_name)
            except NotFound:
                return None
            info = node.status.nodeInfo if node.status is not None else None
            self._system_uuid = info.systemUUID if info is not None else None
        return self._system_uuid

    async def unknown(self, body: Mapping[str, Any], status: KVCacheVolumeStatus) -> None:
        """Of a volume that is not this node's by its ledger: this very object, or none."""
        meta = body["metadata"]
        await self._apply_status(VOLUMES, meta["namespace"], meta["name"], status, uid=meta["uid"])

    async def event(self, name: str, event: EventText, regarding: ObjectReference) -> None:
        """`name` is the event's among those of this node: one that is there already was told before."""
        namespace = regarding.namespace or "default"
        name = f"kvtier.{self._node_name[:100]}.{name}"
        body = Event(
            metadata=ObjectMeta(name=name, namespace=namespace),
            eventTime=event.at,
            reportingController=_CONTROLLER,
            reportingInstance=self._node_name[:128],
            action="Watching",
            reason=event.reason,
            type=event.kind,
            regarding=regarding,
            note=_cut(event.note),
        )
        try:
            with translated(f"Event {namespace}/{name}"):
                await self._client.create(body)
        except Busy:  # it is there: told before a restart
            return


def _cut(note: str) -> str:
    """The limit is in bytes."""
    return note.encode()[:_NOTE_LIMIT].decode(errors="ignore")


def _as(kind: Any, body: dict[str, Any]) -> Any:
    """The body as an object of lightkube's: its generic classes are dicts, and typed as something else."""
    return kind(body)
