"""One term of office: from the Lease's acquisition to its loss. kopf and the workers have a thread and loop of their own.

kopf cancels tasks of the loop that it runs in, and health and election must not depend on how busy it is. The order of
a term: wait for the CRDs, list everything, then watch and work. A term ends when the fence closes, when it is told to
stop, or when kopf fails; memory ends with it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, Final

import kopf
import structlog
from lightkube import KubeConfig

from kvtier_operator.event_poster import EventPoster
from kvtier_operator.facts import Key
from kvtier_operator.fence import Fence
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.problems import ApiProblem, NotLeading
from kvtier_operator.reconciling import Reconciler
from kvtier_operator.relisting import missing_kind, relist
from kvtier_operator.settings import Settings
from kvtier_operator.view import View
from kvtier_operator.watching import Feed, operator_settings, registry
from kvtier_operator.work_queue import WorkQueue

__all__ = ["Term"]

log = structlog.get_logger(__name__)
_WORKERS: Final = 16
"""Tiers at once. Each waits for the API server most of its time; what is slow there must not make others wait."""
_TELLERS: Final = 2
_CANARY: Final[Key] = ("", "")
_CANARY_S: Final = 10.0
_PAUSE_S: Final = 2.0


class Term:
    """`start`, then wait for `ended`; `stop` from any thread. `quiet` comes before `ended`: nothing is written any more."""

    def __init__(self, settings: Settings, config: KubeConfig, metrics: Metrics, fence: Fence) -> None:
        self._settings = settings
        self._config = config
        self._metrics = metrics
        self._fence = fence
        self._stop = threading.Event()
        self.quiet = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="term", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except NotLeading as error:
            log.warning("term ended", error=str(error))
        except Exception:
            # The last frame of the thread: what kopf raises is told, and the process tries a new term.
            log.exception("term failed")
        finally:
            self.quiet.set()
            self.ended.set()

    async def _serve(self) -> None:
        kube = Kube(self._config, self._metrics, self._fence)
        try:
            await self._until_stopped(self._begin(kube))
        finally:
            await kube.close()
            self._metrics.all_tiers_gone()

    async def _begin(self, kube: Kube) -> None:
        view = View(look_at_agents=bool(self._settings.agent_selector))
        queue: WorkQueue[Key] = WorkQueue()
        poster = EventPoster(kube, self._settings.identity, self._metrics)
        telling: WorkQueue[Key] = WorkQueue()
        limit = self._settings.history_limit
        reconciler = Reconciler(
            kube, view, poster, self._metrics, history_limit=limit, tell_later=telling.add, look_at=queue.add
        )
        await self._first_list(kube, view)
        reconciler.begin()
        for key in view.tier_keys():
            queue.add(key, can_wait=True)
        feed = Feed(view, queue.add, self._metrics.erasure_recorded)
        work: list[Coroutine[Any, Any, None]] = [self._work(queue, reconciler) for _ in range(_WORKERS)]
        work += [self._tell(telling, reconciler) for _ in range(_TELLERS)]
        work += [self._relist_for_ever(kube, view, queue), self._canary(queue)]
        tasks = [asyncio.create_task(each) for each in work]
        watching = asyncio.create_task(self._kopf(feed))
        try:
            done, _ = await asyncio.wait({watching, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            queue.close()
            telling.close()
            await _cancelled(*tasks)
            self.quiet.set()
            await _cancelled(watching)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, `stop` is called, or the fence closes."""
        task = asyncio.create_task(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.2)
            if self._stop.is_set() or not self._fence.is_open:
                task.cancel()
                break
        try:
            await task
        except asyncio.CancelledError:
            log.info("term stopped", leading=self._fence.is_open)

    async def _first_list(self, kube: Kube, view: View) -> None:
        while True:
            pause_s = _PAUSE_S
            try:
                missing = await missing_kind(kube, self._settings)
                if not missing:
                    _, count = await relist(kube, view, self._settings)
                    log.info("listed", objects=count)
                    self._metrics.resynced("first", 0)
                    return
                log.warning("waiting for a CRD", kind=missing)
            except ApiProblem as error:
                log.warning("waiting for the API server", error=str(error))
                pause_s = max(pause_s, error.retry_after_s)
            self._metrics.alive()
            await asyncio.sleep(pause_s)

    async def _kopf(self, feed: Feed) -> None:
        namespaces = self._settings.watched_namespaces
        await kopf.operator(
            registry=registry(feed, self._settings),
            settings=operator_settings(self._settings),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
        )
        raise NotLeading("kopf ended by itself")

    async def _work(self, queue: WorkQueue[Key], reconciler: Reconciler) -> None:
        while True:
            key = await queue.take()
            if key == _CANARY:
                queue.done(key)
                self._metrics.alive()
                continue
            started = time.monotonic()
            result = "done"
            try:
                again_in_s = await reconciler.reconcile(key)
                queue.done(key)
                if again_in_s is not None:
                    queue.add_after(key, again_in_s)
                self._metrics.alive()
            except ApiProblem as error:
                result = type(error).__name__
                pause_s = queue.failed(key, at_least_s=error.retry_after_s)
                log.warning("reconcile failed", tier="/".join(key), error=str(error), again_in_s=round(pause_s, 1))
            finally:
                self._metrics.reconciled(result, time.monotonic() - started)

    async def _tell(self, queue: WorkQueue[Key], reconciler: Reconciler) -> None:
        """Events come after statuses: hands of their own, so that a burst of them delays none."""
        while True:
            key = await queue.take()
            again_in_s = await reconciler.tell(key)
            queue.done(key)
            if again_in_s is not None:
                queue.add_after(key, again_in_s)

    async def _relist_for_ever(self, kube: Kube, view: View, queue: WorkQueue[Key]) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_s)
            started = time.monotonic()
            try:
                concerned, differing = await relist(kube, view, self._settings)
            except ApiProblem as error:
                log.warning("resync failed", error=str(error))
                self._metrics.resynced(type(error).__name__, 0)
                continue
            self._metrics.resynced("done", differing)
            log.info("resynced", objects=differing, seconds=round(time.monotonic() - started, 3))
            if differing:
                log.warning("memory differed from the API server", objects=differing, tiers=len(concerned))
            # All of them, not only what differed: a tier whose plan was wrong is found again.
            for key in view.tier_keys() | concerned:
                queue.add(key, can_wait=key not in concerned)

    async def _canary(self, queue: WorkQueue[Key]) -> None:
        """A key that asks for nothing: what it measures is whether work is taken and completed."""
        while True:
            queue.add(_CANARY)
            await asyncio.sleep(_CANARY_S)


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
