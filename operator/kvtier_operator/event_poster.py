"""Posts events of events.k8s.io/v1. The same thing said again is a series of one event, across restarts too.

An event's name is made of what it says, so a second controller, or the next one, finds the first event instead of making another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from kvtier_operator.announcing import NOTE_LIMIT, Announcement
from kvtier_operator.facts import Body
from kvtier_operator.kinds import EVENTS
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.names import CONTROLLER
from kvtier_operator.problems import AlreadyThere, Conflict, Missing

__all__ = ["EventPoster", "event_name"]

_ACTION: Final = "Reconcile"
_NAME_LIMIT: Final = 220
_REMEMBERED: Final = 4096


class _Known(NamedTuple):
    version: str
    times: int


async def _at_once() -> None:
    pass


class EventPoster:
    """`gives_way` is awaited before each event: what is more important goes first."""

    def __init__(
        self,
        kube: Kube,
        identity: str,
        metrics: Metrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        gives_way: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        self._kube = kube
        self._identity = identity[:128]
        self._metrics = metrics
        self._now = now
        self._gives_way = gives_way
        self._known: dict[str, _Known] = {}
        """The newest events by name, as they were written: one that is said again needs one request, not three."""

    async def post(self, announcement: Announcement, *, again: bool = False) -> None:
        """Raises ApiProblem. A deleted namespace refuses events: that is the caller's to accept.

        `again`: this very one was sent before, and the answer was lost. If it is there, it is not counted as another.
        """
        await self._gives_way()
        known = self._known.get(event_name(announcement))
        if again or known is None or not await self._count_from(announcement, known):
            try:
                self._remember(await self._kube.create(EVENTS, self._body(announcement)))
            except AlreadyThere:
                if not again:
                    await self._count(announcement)
        self._metrics.event_posted(announcement.reason.value)

    async def _count(self, announcement: Announcement) -> None:
        namespace, name = announcement.regarding.namespace, event_name(announcement)
        await self._write(announcement, _known(await self._kube.get(EVENTS, name, namespace)))

    async def _count_from(self, announcement: Announcement, known: _Known) -> bool:
        """False: it is not what it was, or not there any more."""
        try:
            await self._write(announcement, known)
        except (Conflict, Missing):
            self._known.pop(event_name(announcement), None)
            return False
        return True

    async def _write(self, announcement: Announcement, known: _Known) -> None:
        series = {"count": known.times + 1, "lastObservedTime": _micro_time(self._now())}
        patch = {"metadata": {"resourceVersion": known.version}, "series": series}
        namespace, name = announcement.regarding.namespace, event_name(announcement)
        self._remember(await self._kube.merge(EVENTS, namespace, name, patch))

    def _remember(self, event: Body) -> None:
        name = event["metadata"]["name"]
        self._known.pop(name, None)
        self._known[name] = _known(event)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _body(self, announcement: Announcement) -> dict[str, Any]:
        about = announcement.regarding
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": event_name(announcement), "namespace": about.namespace},
            "eventTime": _micro_time(self._now()),
            "reportingController": CONTROLLER,
            "reportingInstance": self._identity,
            "action": _ACTION,
            "type": announcement.type,
            "reason": announcement.reason.value,
            "note": _note(announcement),
            "regarding": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "namespace": about.namespace,
                "name": about.name,
                "uid": about.uid,
            },
        }


def _known(event: Body) -> _Known:
    return _Known(str(event["metadata"]["resourceVersion"]), int((event.get("series") or {}).get("count", 1)))


def event_name(announcement: Announcement) -> str:
    about = announcement.regarding
    said = "\0".join((about.kind, about.uid, announcement.reason.value, announcement.note))
    return f"{about.name[:_NAME_LIMIT]}.{hashlib.sha256(said.encode()).hexdigest()[:20]}"


def _note(announcement: Announcement) -> str:
    data = announcement.note.encode()
    if len(data) <= NOTE_LIMIT:
        return announcement.note
    return data[: NOTE_LIMIT - 3].decode(errors="ignore") + "…"


def _micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
