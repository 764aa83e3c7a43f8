"""Posts events of events.k8s.io/v1. The same thing said again is a series of one event, across restarts too.

An event's name is made of what it says, so a second controller, or the next one, finds the first event instead of making another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_operator.announcing import NOTE_LIMIT, Announcement
from kvtier_operator.kinds import EVENTS
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.names import CONTROLLER
from kvtier_operator.problems import AlreadyThere

__all__ = ["EventPoster", "event_name"]

_ACTION: Final = "Reconcile"
_NAME_LIMIT: Final = 220


class EventPoster:
    def __init__(
        self, kube: Kube, identity: str, metrics: Metrics, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._kube = kube
        self._identity = identity[:128]
        self._metrics = metrics
        self._now = now

    async def post(self, announcement: Announcement, *, again: bool = False) -> None:
        """Raises ApiProblem. A deleted namespace refuses events: that is the caller's to accept.

        `again`: this very one was sent before, and the answer was lost. If it is there, it is not counted as another.
        """
        try:
            await self._kube.create(EVENTS, self._body(announcement))
        except AlreadyThere:
            if not again:
                await self._count(announcement)
        self._metrics.event_posted(announcement.reason.value)

    async def _count(self, announcement: Announcement) -> None:
        namespace, name = announcement.regarding.namespace, event_name(announcement)
        known = await self._kube.get(EVENTS, name, namespace)
        count = int((known.get("series") or {}).get("count", 1)) + 1
        series = {"count": count, "lastObservedTime": _micro_time(self._now())}
        patch = {"metadata": {"resourceVersion": known["metadata"]["resourceVersion"]}, "series": series}
        await self._kube.merge(EVENTS, namespace, name, patch)

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
