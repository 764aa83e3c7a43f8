"""One term of office, and the wait for it: until the Lease is lost. kopf and the workers have a thread and loop of their own.

kopf cancels tasks of the loop that it runs in, and health and election must not depend on how busy it is. The order of
a term: fill a memory and keep it (`standing_by`); when the fence opens, work; when everything was looked at once, kopf, which
lists all of it again. A term ends when the fence closes, when it is told to stop, or when kopf fails; memory ends with it.
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
from kvtier_operator.feed import Feed
from kvtier_operator.fence import Fence
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.problems import ApiProblem, NotLeading
from kvtier_operator.reconciling import Reconciler
from kvtier_operator.relisting import relist
from kvtier_operator.settings import Settings
from kvtier_operator.standing_by import Memory
from kvtier_operator.view import View
from kvtier_operator.watching import operator_settings, registry
from kvtier_operator.work_queue import WorkQueue

__all__ = ["Term"]

log = structlog.get_logger(__name__)
_WORKERS: Final = 16
"""Tiers at once. Each waits for the API server most of its time; what is slow there must not make others wait."""
_TELLERS: Final = 2
_CANARY: Final[Key] = ("", "")
_CANARY_S: Final = 10.0
_REST_S: Final = 0.5
"""Between two looks at one tier: of a roll-out each volume is news, and each status a write that others wait for."""
_LOOK_S: Final = 0.1
_WAY_S: Final = 0.25
"""For so long an event waits for statuses."""
_FIRST_LOOK_S: Final = 60.0
"""For so long at most kopf waits until every tier was looked at; memory's own watches tell what changes meanwhile."""


class Term:
    """`start` stands by; work begins when the fence opens, by whoever holds the Lease. Then wait for `ended`.

    `stop` and `forget` from any thread. `quiet` comes before `ended`: nothing is written any more.
    """

    def __init__(self, settings: Settings, config: KubeConfig, metrics: Metrics, fence: Fence) -> None:
        self._settings = settings
        self._config = config
        self._metrics = metrics
        self._fence = fence
        self._stop = threading.Event()
        self._forget = threading.Event()
        self.quiet = threading.Event()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="term", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def forget(self) -> None:
        """What was read so far is of another history: etcd was restored. Read again, if the turn has not come yet."""
        self._forget.set()

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
        kube = self._client()
        try:
            await self._until_stopped(self._stand_by(kube))
        finally:
            await kube.close()
            self._metrics.all_tiers_gone()

    def _client(self) -> Kube:
        return Kube(self._config, self._metrics, self._fence)

    async def _stand_by(self, kube: Kube) -> None:
        while True:
            memory = Memory(self._settings, self._metrics, kube, self._client)
            keeping = asyncio.create_task(memory.keep())
            try:
                while not ((self._fence.is_open and memory.whole.is_set()) or self._forget.is_set() or keeping.done()):
                    await asyncio.sleep(_LOOK_S)
                if keeping.done():
                    keeping.result()
                if not self._forget.is_set():
                    await self._begin(kube, memory, keeping)
                    return
                self._forget.clear()
                log.warning("memory is of another history; reading again")
            finally:
                await _cancelled(keeping)

    async def _begin(self, kube: Kube, memory: Memory, keeping: asyncio.Task[None]) -> None:
        queue: WorkQueue[Key] = WorkQueue()
        poster = EventPoster(kube, self._settings.identity, self._metrics, gives_way=lambda: _until_idle(queue))
        telling: WorkQueue[Key] = WorkQueue()
        limit = self._settings.history_limit
        view = memory.give(queue.add, self._metrics.erasure_recorded)
        reconciler = Reconciler(
            kube, view, poster, self._metrics, history_limit=limit, tell_later=telling.add, look_at=queue.add
        )
        reconciler.begin()
        for key in view.tier_keys():
            queue.add(key, can_wait=True)
        feed = Feed(view, queue.add, self._metrics.erasure_recorded)
        work: list[Coroutine[Any, Any, None]] = [self._work(queue, reconciler) for _ in range(_WORKERS)]
        work += [self._tell(telling, reconciler) for _ in range(_TELLERS)]
        work += [self._relist_for_ever(kube, view, queue, keeping), self._canary(queue), _no_defect(keeping)]
        tasks = [asyncio.create_task(each) for each in work]
        watching = asyncio.create_task(self._kopf(feed, queue, keeping))
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
        """Run `work` until it ends, `stop` is called, or the fence closes after it was open."""
        task = asyncio.create_task(work)
        was_open = False
        while not task.done():
            await asyncio.wait({task}, timeout=0.2)
            is_open = self._fence.is_open
            was_open = was_open or is_open
            if self._stop.is_set() or (was_open and not is_open):
                task.cancel()
                break
        try:
            await task
        except asyncio.CancelledError:
            log.info("term stopped", leading=self._fence.is_open)

    async def _kopf(self, feed: Feed, queue: WorkQueue[Key], keeping: asyncio.Task[None]) -> None:
        """It lists everything first, which takes as long as the first look at all tiers: so it comes after that."""
        until = time.monotonic() + _FIRST_LOOK_S
        while queue.waiting and not keeping.done() and time.monotonic() < until:
            await asyncio.sleep(_LOOK_S)
        namespaces = self._settings.watched_namespaces
        await kopf.operator(
            # Else kopf asks for the user's name, and the uid of a container has none. It exports no type for it.
            identity=self._settings.identity,  # type: ignore[arg-type]
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
                queue.done(key, rest_s=_REST_S)
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
        """Events come after statuses: hands of their own, which give way, so that a burst of them delays none."""
        while True:
            key = await queue.take()
            again_in_s = await reconciler.tell(key)
            queue.done(key)
            if again_in_s is not None:
                queue.add_after(key, again_in_s)

    async def _relist_for_ever(
        self, kube: Kube, view: View, queue: WorkQueue[Key], keeping: asyncio.Task[None]
    ) -> None:
        """The first one soon: a watch of the time before may have been silent. After it kopf's watches are enough."""
        wait_s = min(self._settings.resync_s, _FIRST_LOOK_S)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._settings.resync_s
            started = time.monotonic()
            try:
                concerned, differing = await relist(kube, view, self._settings)
            except ApiProblem as error:
                log.warning("resync failed", error=str(error))
                self._metrics.resynced(type(error).__name__, 0)
                continue
            await _cancelled(keeping)
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


async def _until_idle(queue: WorkQueue[Key]) -> None:
    """Or for as long as an event may wait."""
    until = time.monotonic() + _WAY_S
    while queue.busy and time.monotonic() < until:
        await asyncio.sleep(_WAY_S / 5)


async def _no_defect(keeping: asyncio.Task[None]) -> None:
    """Raises what `keeping` ended with, for it should end by a gap, or be ended, alone."""
    await asyncio.wait({keeping})
    if not keeping.cancelled():
        keeping.result()
    await asyncio.Event().wait()


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
