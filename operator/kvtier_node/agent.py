"""`kvtier node`: the process that guards what nobody else guards, and says how the tiers of this host are.

Order: lock, ledger, recovery (every unfinished arrow is finished), and only then ready. After that, three things run side
by side: a patrol that takes over volumes whose guardian died and passes requests on; one watch for each guarded volume; and
the reconcile, which reads manifests and writes status and metrics. Blocking work is in threads. Stopping erases nothing
that is in use: the next start adopts it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvtier_api.errors import KvtierError
from kvtier_api.volume import VolumeState
from kvtier_node import guarding
from kvtier_node.endpoints import Listen, Verdict, serve
from kvtier_node.event_log import Log, log_of_transitions
from kvtier_node.hardening import HostFacts
from kvtier_node.ledger import TERMINAL, EraseRequest, Transition, VolumeRow
from kvtier_node.live import LiveVolume
from kvtier_node.manifests import ManifestDirectory
from kvtier_node.measuring import VolumeMeasurement, measure_volume
from kvtier_node.node import Node
from kvtier_node.node_lock import NodeLock
from kvtier_node.reconciling import Reconciler
from kvtier_node.recovery import guard, open_node, recover
from kvtier_node.systemd import tell_systemd
from kvtier_node.threads import Threads
from kvtier_node.volume_watch import VolumeWatch

__all__ = ["Agent", "AgentOptions", "PodPart", "run_agent"]

_PATROL_S: Final = 0.4
_RECONCILE_S: Final = 2.0
_MEASURE_S: Final = 30.0
_MEASURE_AGAIN_S: Final = 4.0
_STALE_S: Final = 60.0
_STOP_GRACE_S: Final = 20.0
_LIVING: Final = frozenset(VolumeState) - TERMINAL
_USABLE: Final = frozenset({VolumeState.READY, VolumeState.IN_USE})


class PodPart(Protocol):
    """Lives beside the agent's own work, which never waits for it."""

    def observe(self, arrow: Transition) -> None:
        """Of the ledger, in whatever thread, from its opening on."""

    def open(self, node: Node, agent: Agent, threads: Threads) -> None:
        """Before recovery: nothing is served yet."""

    def serve(self) -> None:
        """Recovery has finished."""

    async def close(self) -> None:
        """Serve no more; volumes stay as they are. May be called twice."""


@dataclass(frozen=True)
class AgentOptions:
    """`listen` None serves nothing. Paths are absolute."""

    state_dir: str
    roots: Sequence[str]
    manifests: str
    listen: Listen | None = None
    node_name: str | None = None
    pods: PodPart | None = None
    """What serves pods (`csi.part.PodService`), on a node of a cluster."""


def run_agent(options: AgentOptions, log: Log) -> None:
    """Run until SIGTERM or SIGINT. Raises Busy while another runs with this state directory, and what `open_node` raises."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each slot file of each volume
    with NodeLock.acquire(options.state_dir):
        observers = [log_of_transitions(log), *([options.pods.observe] if options.pods is not None else [])]
        node = open_node(options.state_dir, options.roots, name=options.node_name, observers=observers)
        agent = Agent(node, options, log)
        try:
            asyncio.run(agent.run())
        finally:
            node.ledger.close()
            if agent.threads.busy:
                log.warning("stopped-with-work-in-the-kernel", threads=agent.threads.busy)
                # The interpreter would wait for threads that hang; the next start finishes their work.
                os._exit(0 if sys.exc_info()[0] is None else 1)


class Agent:
    """The state of one running agent. `run` once."""

    def __init__(self, node: Node, options: AgentOptions, log: Log) -> None:
        self.node = node
        self.threads = Threads()
        self._options = options
        self._log = log
        self._stopping = asyncio.Event()
        self._watches: dict[str, VolumeWatch] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: list[EraseRequest] = []
        self._measured: dict[str, VolumeMeasurement] = {}
        self._measuring: set[str] = set()
        self._ready = False
        self._started_at = time.monotonic()
        self.reconciler = Reconciler(node, ManifestDirectory(options.manifests), log)

    async def run(self) -> None:
        """Recover, serve, and stop on a signal. Raises KvtierError where recovery itself, or listening, fails."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with AsyncExitStack() as stack:
            if self._options.listen is not None:
                port = await stack.enter_async_context(
                    serve(
                        self._options.listen,
                        metrics=self.reconciler.metrics.text,
                        healthy=self.healthy,
                        ready=self.ready,
                    )
                )
                self._log.info("listening", host=self._options.listen.host, port=port)
            pods = self._options.pods
            if pods is not None:
                pods.open(self.node, self, self.threads)
                stack.push_async_callback(pods.close)
            await self._recover()
            self._ready = True
            await self.threads.run(self._reconcile)
            tell_systemd("READY=1")
            self._log.info("ready", node=self.node.name, node_id=self.node.identity.node_id)
            self._start(self._every("patrol", _PATROL_S, self._patrol))
            self._start(self._every("reconcile", _RECONCILE_S, self._reconcile_and_measure))
            if pods is not None:
                pods.serve()
            await self._stopping.wait()
            if pods is not None:
                await pods.close()
            await self._stop()

    def stop(self) -> None:
        self._stopping.set()

    # -- what the part that serves pods asks

    def take(self, live: LiveVolume) -> None:
        """Guard a volume that was made in this process."""
        self._watch(live)

    def watch_of(self, volume_id: str) -> VolumeWatch | None:
        return self._watches.get(volume_id)

    def measured(self, volume_id: str) -> VolumeMeasurement | None:
        return self._measured.get(volume_id)

    def host(self) -> HostFacts | None:
        return self.reconciler.host

    def foreign_data(self, tier: str, found: bool) -> None:
        self.reconciler.foreign_data(tier, found)

    # -- what the endpoints say

    def healthy(self) -> Verdict:
        last = self.reconciler.completed_at
        age_s = time.monotonic() - (last if last is not None else self._started_at)
        if not self._ready:  # a long recovery is work, not a hang: overwriting takes as long as it takes
            return Verdict(True, f"recovering for {age_s:.0f} s")
        return Verdict(age_s < _STALE_S, f"last reconcile {age_s:.1f} s ago")

    def ready(self) -> Verdict:
        return Verdict(self._ready, "ready" if self._ready else "recovering: nothing is served before it has finished")

    # -- the loops

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _every(self, name: str, seconds: float, work: Any) -> None:
        """Do it again and again. What fails is logged and tried again: the agent outlives a busy ledger or a full disk."""
        while not self._stopping.is_set():
            try:
                await work()
            except (KvtierError, OSError) as error:
                self._log.error(f"{name}-failed", error=str(error))
            except Exception:  # noqa: BLE001  a defect in one loop must not end the erasing of the others
                self._log.exception(f"{name}-failed")
            try:
                await asyncio.wait_for(self._stopping.wait(), seconds)
            except TimeoutError:
                pass

    async def _recover(self) -> None:
        began = time.monotonic()
        found = await self.threads.run(lambda: recover(self.node))
        self._log.info(
            "recovered",
            seconds=round(time.monotonic() - began, 3),
            erased=len(found.erased),
            adopted=[live.volume_id for live in found.adopted],
            failed={live.volume_id: str(error) for live, error in found.failed},
            guarded_elsewhere=found.guarded_elsewhere,
            unguarded={row.volume_id: str(error) for row, error in found.unguarded},
        )
        for live in (*found.adopted, *(live for live, _ in found.failed)):
            self._watch(live)

    def _watch(self, live: LiveVolume) -> None:
        watch = VolumeWatch(self.node, live, log=self._log, requests=lambda: self._requests, threads=self.threads)
        self._watches[live.volume_id] = watch
        self._start(self._guarded(watch))

    async def _guarded(self, watch: VolumeWatch) -> None:
        try:
            await watch.run(self._stopping)
        except Exception:  # noqa: BLE001  the patrol takes the volume over again, in the state it is in
            self._log.exception("watch-failed", volume=watch.live.volume_id)
        finally:
            self._watches.pop(watch.live.volume_id, None)

    async def _patrol(self) -> None:
        """Take over what nobody guards any more, and look for requests."""
        taken, self._requests = await self.threads.run(self._look_around)
        for live in taken:
            self._log.info("took-over", volume=live.volume_id, state=live.row.state.value)
            self._watch(live)

    def _look_around(self) -> tuple[list[LiveVolume], list[EraseRequest]]:
        taken = []
        for row in self.node.ledger.volumes(_LIVING):
            if row.volume_id in self._watches:
                continue
            try:
                live = guard(self.node, row)
            except (KvtierError, OSError) as error:
                self._log.warning("cannot-take-over", volume=row.volume_id, error=str(error))
                continue
            if live is not None:
                taken.append(live)
        requests = self.node.ledger.open_requests()
        return taken, [request for request in requests if not guarding.close_if_fulfilled(self.node, request)]

    async def _reconcile_and_measure(self) -> None:
        await self.threads.run(self._reconcile)
        for row in self.reconciler.rows:
            if self._is_due(row):
                self._start(self._measure(row))
        self.reconciler.start_checks(self._start, self.threads)

    def _reconcile(self) -> None:
        failures = {volume_id: watch.failure for volume_id, watch in list(self._watches.items())}
        self.reconciler.reconcile(measured=dict(self._measured), failures=failures, ready=self._ready)
        living = {row.volume_id for row in self.reconciler.rows}
        for volume_id in set(self._measured) - living:
            self._measured.pop(volume_id, None)

    def _is_due(self, row: VolumeRow) -> bool:
        if row.state not in _USABLE or row.volume_id in self._measuring or self._stopping.is_set():
            return False
        last = self._measured.get(row.volume_id)
        if last is None:
            return True
        unclear = bool(last.error) or last.slots is None or not last.slots.ciphertext
        age_s = (self.reconciler.now() - last.at).total_seconds()
        return age_s > (_MEASURE_AGAIN_S if unclear else _MEASURE_S)

    async def _measure(self, row: VolumeRow) -> None:
        self._measuring.add(row.volume_id)
        try:
            watch = self._watches.get(row.volume_id)
            if watch is None:
                found = await self.threads.run(lambda: measure_volume(self.node, row))
            else:
                async with watch.turn:
                    if watch.live.row.state not in _USABLE:
                        return
                    found = await self.threads.run(lambda: measure_volume(self.node, row))
            self._measured[row.volume_id] = found
        finally:
            self._measuring.discard(row.volume_id)

    # -- the end

    async def _stop(self) -> None:
        """Let what runs in threads come to its end, then release every volume as it is."""
        self._log.info("stopping", volumes=len(self._watches))
        tell_systemd("STOPPING=1")
        pending = list(self._tasks)
        if pending:
            await asyncio.wait(pending, timeout=_STOP_GRACE_S)
        for watch in list(self._watches.values()):
            watch.release()
        self.threads.close()
        self._log.info("stopped")
