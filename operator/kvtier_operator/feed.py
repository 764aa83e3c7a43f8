"""What an event does, whoever tells of it: memory takes it, and the tiers that it concerns are to be looked at."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from kvtier_api.errors import InvalidResource
from kvtier_operator.facts import Body, ErasureFacts, Key, identity
from kvtier_operator.listing import Listed
from kvtier_operator.view import Fact, View

__all__ = ["Feed"]

log = structlog.get_logger(__name__)


def _nobody(_: object) -> None:
    pass


class Feed:
    """`queue` gets each tier that an event concerns, `recorded` the trigger of each record of an erasure that came."""

    def __init__(
        self, view: View, queue: Callable[[Key], None] = _nobody, recorded: Callable[[str], None] = _nobody
    ) -> None:
        self._view = view
        self._queue = queue
        self._recorded = recorded

    def event(self, kind: type[Fact], parse: Callable[[Body], Fact], event_type: str | None, body: Body) -> None:
        """An object as kopf has it."""
        self._take(kind, parse, event_type, identity(body), lambda: body)

    def change(self, kind: type[Fact], parse: Callable[[Body], Fact], event_type: str | None, item: Listed) -> None:
        """An object that is read only if it is news."""
        self._take(kind, parse, event_type, item.identity, item.body)

    def _take(
        self,
        kind: type[Fact],
        parse: Callable[[Body], Fact],
        event_type: str | None,
        who: tuple[Key, str, str],
        body: Callable[[], Body],
    ) -> None:
        try:
            if event_type == "DELETED":
                key, _, version = who
                concerned = self._view.drop(kind, key, int(version))
            else:
                fact = self._view.known(kind, *who) or parse(body())
                concerned = self._view.take(fact)
                if concerned and event_type == "ADDED" and isinstance(fact, ErasureFacts) and fact.is_record:
                    self._recorded(fact.spec.trigger.value)
        except InvalidResource as error:
            log.warning("an object cannot be read", kind=kind.__name__, error=str(error))
            return
        for tier in concerned:
            self._queue(tier)
