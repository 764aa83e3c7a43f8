"""Events of this node, told where `kubectl describe` shows them: foreign data, and an erasure that missed its deadline.

All others of a volume's life are the controller's, who sees every node.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from lightkube.models.core_v1 import ObjectReference

from kvtier_api.errors import InvalidResource, NotFound, NotPermitted
from kvtier_node.cluster.writing import Writer
from kvtier_node.event_log import Log
from kvtier_node.node import Node
from kvtier_node.threads import Threads

__all__ = ["Announcer"]

_REASONS: Final = frozenset({"ForeignData", "DeadlineMissed"})
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
        log: Log,
    ) -> None:
        self._node = node
        self._writer = writer
        self._threads = threads
        self._find = find
        self._log = log

    async def post(self, after: int) -> int:
        """Post what came after event number `after`; the number of the last one that was looked at.

        Raises ApiUnavailable. What the API server refuses is logged and passed over: it is in the ledger.
        """
        events = await self._threads.run(lambda: self._node.ledger.events(_AT_ONCE))
        for event in events:
            if event.seq <= after or event.reason not in _REASONS:
                continue
            try:
                regarding = await self._find(event.object)
                if regarding is not None:
                    await self._writer.event(event, regarding)
            except (NotPermitted, NotFound, InvalidResource) as error:
                self._log.warning("event-refused", reason=event.reason, object=event.object, error=str(error))
        return max([after, *(event.seq for event in events)])
