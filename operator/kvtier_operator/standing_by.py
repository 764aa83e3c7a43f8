"""Memory before its turn comes: filled by lists, kept by watches, and nothing is written.

A replica that has to read ten thousand volumes first, when its turn comes, acts half a minute late. So it reads them while
another one leads. Its watches go on into its term, until kopf's have taken over (`term`). A gap (410 Gone, a version that went
back) makes all of it worthless: then it begins anew, with an empty memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Final

import structlog

from kvtier_operator.facts import Key
from kvtier_operator.feed import Feed
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.problems import ApiProblem, Gone
from kvtier_operator.relisting import listed, missing_kind
from kvtier_operator.settings import Settings
from kvtier_operator.sources import Source, sources
from kvtier_operator.view import View

__all__ = ["Memory"]

log = structlog.get_logger(__name__)
_PAUSE_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.5
_LONGEST_RETRY_S: Final = 15.0


class Memory:
    """`view`, as the API server has it once `whole` is set. `client` makes one: each namespace's watches have their own."""

    def __init__(self, settings: Settings, metrics: Metrics, kube: Kube, client: Callable[[], Kube]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._kube = kube
        self._client = client
        self.whole = asyncio.Event()
        self._given = False
        self._empty()

    def _empty(self) -> None:
        self.whole.clear()
        self.view = View(look_at_agents=bool(self._settings.agent_selector))
        self._feed = Feed(self.view)

    def give(self, queue: Callable[[Key], None], recorded: Callable[[str], None]) -> View:
        """To a term, which is told of every change from now on. A gap ends `keep` then, and empties nothing."""
        self._given = True
        self._feed = Feed(self.view, queue, recorded)
        return self.view

    async def keep(self) -> None:
        """Fill `view` and keep it, for ever; once it was given to a term, until there is a gap. Raises none of ApiProblem."""
        while True:
            try:
                await self._fill_and_follow()
            except* ApiProblem as problems:
                error = problems.exceptions[0]
                log.warning("waiting for the API server", error=str(error))
                pause_s = max(_PAUSE_S, *(getattr(it, "retry_after_s", 0.0) for it in problems.exceptions))
            if self._given:
                return
            self._empty()
            self._metrics.alive()
            await asyncio.sleep(pause_s)

    async def _fill_and_follow(self) -> None:
        await self._wait_for_kinds()
        clients: dict[str, Kube] = {}
        try:
            async with asyncio.TaskGroup() as following:
                count = 0
                started = time.monotonic()
                for source in sources(self._settings):
                    facts, version = await listed(self._kube, self.view, source)
                    for fact in facts:
                        self.view.take(fact)
                    count += len(facts)
                    where = source.namespace or ""
                    clients[where] = clients.get(where) or self._client()
                    following.create_task(self._follow(clients[where], source, version))
                    self._metrics.alive()
                log.info("listed", objects=count, seconds=round(time.monotonic() - started, 3))
                self._metrics.resynced("first", 0)
                self.whole.set()
        finally:
            for client in clients.values():
                await client.close()

    async def _wait_for_kinds(self) -> None:
        while missing := await missing_kind(self._kube, self._settings):
            log.warning("waiting for a CRD", kind=missing)
            self._metrics.alive()
            await asyncio.sleep(_PAUSE_S)

    async def _follow(self, kube: Kube, source: Source, version: str) -> None:
        """Changes since `version`, for ever. Raises Gone."""
        pause_s = _FIRST_RETRY_S
        while True:
            started = time.monotonic()
            try:
                changes = kube.watch(source.kind, source.namespace, since=version, labels=source.labels)
                async with aclosing(changes):
                    async for change in changes:
                        version = _newer(source, version, change.item.identity[2])
                        if change.type != "BOOKMARK":
                            self._feed.change(source.facts, source.parse, change.type, change.item)
                        pause_s = _FIRST_RETRY_S
            except Gone:
                raise
            except ApiProblem as error:
                log.info("watching again", kind=source.name, error=str(error))
                await asyncio.sleep(max(pause_s, error.retry_after_s))
                pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
                continue
            if time.monotonic() - started < pause_s:  # a server that ends each stream at once
                await asyncio.sleep(pause_s)


def _newer(source: Source, known: str, version: str) -> str:
    if known.isdecimal() and version.isdecimal() and int(version) < int(known):
        raise Gone(f"version {version} came after {known}", obj=source.name, remedy="listed anew")
    return version or known
