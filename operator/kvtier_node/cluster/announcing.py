"""Events of this node, told where `kubectl describe` shows them. The controller posts the others of a volume's life.

What a node did, or found, is the node's to tell: it knows whether or not a controller runs, and has it on record. So an
erasure that no controller saw is told as any other. Each event has a name of its own and is created, never changed: told
again after a restart, it is there already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final

from lightkube.models.core_v1 import ObjectReference

from kvtier_api.errors import InvalidResource, NotFound, NotPermitted
from kvtier_api.meta import API_VERSION
from kvtier_node.cluster.rights import MissingRights
from kvtier_node.cluster.writing import EventText, Writer
from kvtier_node.event_log import Log
from kvtier_node.ledger import Event as LedgerEvent
from kvtier_node.ledger import VolumeRow
from kvtier_node.node import Node
from kvtier_node.pods.consumer import pod_of
from kvtier_node.receipts import Receipt
from kvtier_node.threads import Threads

__all__ = ["NODE_EVENTS", "Announcer"]

NODE_EVENTS: Final[dict[str, tuple[str, str, str]]] = {
    "Erased": ("Normal", "KVCacheTier", "A volume was erased; the note names the receipt."),
    "DeadlineMissed": (
        "Warning",
        "KVCacheTier",
        "An erasure took longer than scrub.deadline; told once of each volume.",
    ),
    "ForeignData": (
        "Warning",
        "KVCacheTier",
        "Something lies at a place that kvtier did not put there. It was not touched.",
    ),
}
"""Reason: type, kind that it is posted on, explanation (docs/events.md has the same)."""
_ERASED: Final = "Erased"
_FOREIGN_DATA: Final = "ForeignData"
_MISSED: Final = "DeadlineMissed"
_AT_ONCE: Final = 200


class Announcer:
    """`find` gives the API's reference for what an event of the ledger is about, or None where there is none."""

    def __init__(
        self,
        node: Node,
        writer: Writer,
        *,
        threads: Threads,
        find: Callable[[str], Awaitable[ObjectReference | None]],
        rights: MissingRights,
        log: Log,
    ) -> None:
        self._node = node
        self._writer = writer
        self._threads = threads
        self._find = find
        self._rights = rights
        self._log = log

    async def post(self, after: int) -> int:
        """Post what came after event number `after`; the number of the last one that was looked at.

        Raises ApiUnavailable. What the API server refuses is logged and passed over: it is in the ledger.
        """
        events = await self._threads.run(lambda: self._node.ledger.events(_AT_ONCE))
        for event in events:
            if event.seq <= after:
                continue
            with self._refusals_passed_over(event.object):
                if event.reason == _FOREIGN_DATA:
                    await self._foreign_data(event)
                elif event.reason == _MISSED:
                    await self._missed(event)
        return max([after, *(event.seq for event in events)])

    async def erased(self, row: VolumeRow, receipt: Receipt) -> None:
        """Of a pod's volume. Raises ApiUnavailable."""
        where = f"{row.volume_id} on {row.node}"
        if receipt.deadline_met is False:
            limit = f"{receipt.deadline_s:g} s" if receipt.deadline_s is not None else "its deadline"
            late = f"{where}: erased, but after {limit}; receipt {receipt.id}"
            with self._refusals_passed_over(row.volume_id):
                await self._of_volume(row, _MISSED, late, datetime.fromisoformat(receipt.end))
        with self._refusals_passed_over(row.volume_id):
            text = f"{where}: receipt {receipt.id}"
            await self._of_volume(row, _ERASED, text, datetime.fromisoformat(receipt.end))

    @contextmanager
    def _refusals_passed_over(self, about: str) -> Iterator[None]:
        try:
            yield
        except (NotPermitted, NotFound, InvalidResource) as error:
            self._rights.wait_for(error)
            self._log.warning("event-refused", object=about, error=str(error))

    async def _foreign_data(self, event: LedgerEvent) -> None:
        regarding = await self._find(event.object)
        if regarding is not None:  # it may come again: each time is news
            name = f"{event.at.replace(':', '').replace('-', '').lower()}.{event.seq:x}"
            text = EventText(event.reason, event.kind, event.message, datetime.fromisoformat(event.at))
            await self._writer.event(name, text, regarding)

    async def _missed(self, event: LedgerEvent) -> None:
        row = await self._threads.run(lambda: self._node.ledger.get(event.object))
        text = f"{row.volume_id} on {row.node}: {event.message}"
        await self._of_volume(row, event.reason, text, datetime.fromisoformat(event.at))

    async def _of_volume(self, row: VolumeRow, reason: str, note: str, at: datetime) -> None:
        """On its tier. A volume ends once, so it has one event of each reason."""
        if pod_of(row.consumer, row.facts) is None:
            return  # of `kvtier run`: its tier is a file on this host
        regarding = ObjectReference(
            apiVersion=API_VERSION,
            kind="KVCacheTier",
            name=row.tier_name,
            namespace=row.tier_namespace,
            uid=row.tier_uid,
        )
        text = EventText(reason, NODE_EVENTS[reason][0], note, at)
        await self._writer.event(f"{row.volume_id}.{reason.lower()}", text, regarding)
