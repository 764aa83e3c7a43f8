"""One list and watch that stays true: what is in it now, kept up over dropped connections, silence and 410 Gone.

A watch that says nothing for five minutes may be dead, so everything is listed anew, as after any gap. What a change means is
left to the one who asked.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lightkube import AsyncClient

from kvtier_api.errors import KvtierError
from kvtier_node.cluster.client import Kind, plain, translated
from kvtier_node.event_log import Log

__all__ = ["Selection", "Watcher"]

_SERVER_TIMEOUT_S: Final = 120
_SILENCE_S: Final = 300.0
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 30.0

Body = dict[str, Any]


@dataclass(frozen=True)
class Selection:
    """Which objects: of one namespace, or of all (`None`); `fields` and `labels` as the API server takes them."""

    kind: Kind
    namespace: str | None = None
    fields: dict[str, Any] | None = None
    labels: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        where = ", ".join(f"{key}={value}" for key, value in (self.fields or {}).items())
        return f"{self.kind.__name__} {where}".strip()


class Watcher:
    """`objects` by uid, once `synced`; during an outage, as they were. `changed` is called after each change,
    `listed` after each list, `deleted` with what was deleted while it was watched."""

    def __init__(
        self,
        client: AsyncClient,
        selection: Selection,
        *,
        changed: Callable[[], None],
        log: Log,
        listed: Callable[[], None] = lambda: None,
        deleted: Callable[[Body], None] = lambda _: None,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._client = client
        self._selection = selection
        self._changed = changed
        self._listed = listed
        self._deleted = deleted
        self._log = log
        self._silence_s = silence_s
        self.objects: dict[str, Body] = {}
        self.synced = False

    async def run(self) -> None:
        """List and watch until cancelled. Nothing that the API server does ends it."""
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                version = await self._list()
                delay_s = _FIRST_RETRY_S
                await self._watch(version)
                continue
            except KvtierError as error:
                self._log.warning("watch", what=self._selection.title, error=str(error), again_in_s=round(delay_s, 1))
            await asyncio.sleep(delay_s * random.uniform(0.7, 1.3))  # noqa: S311  spread, not a secret
            delay_s = min(delay_s * 2, _LAST_RETRY_S)

    async def _list(self) -> str:
        found: dict[str, Body] = {}
        with translated(self._selection.title):
            listed = self._client.list(
                self._selection.kind,
                namespace=self._selection.namespace or "*",
                fields=self._selection.fields,
                labels=self._selection.labels,
                chunk_size=500,
            )
            async for item in listed:
                body = plain(item)
                found[str(body["metadata"]["uid"])] = body
            version = listed.resourceVersion
        self.objects = found
        self.synced = True
        self._listed()
        self._changed()
        return version

    async def _watch(self, version: str) -> None:
        """Until nothing was said for too long: then it is time to list anew. Raises KvtierError where the watch broke."""
        with translated(self._selection.title):
            stream = aiter(
                self._client.watch(
                    self._selection.kind,
                    namespace=self._selection.namespace or "*",
                    fields=self._selection.fields,
                    labels=self._selection.labels,
                    server_timeout=_SERVER_TIMEOUT_S,
                    resource_version=version,
                )
            )
            while True:
                try:
                    async with asyncio.timeout(self._silence_s):
                        kind, item = await anext(stream)
                except (TimeoutError, StopAsyncIteration):
                    return
                self._take(kind, plain(item))

    def _take(self, kind: str, body: Body) -> None:
        uid = str(body["metadata"]["uid"])
        if kind == "DELETED":
            self.objects.pop(uid, None)
            self._deleted(body)
        else:
            self.objects[uid] = body
        self._changed()
