"""The process: health and metrics all the time, the Lease when it is one's turn, and terms of office while it is held."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

import structlog
from lightkube import KubeConfig

from kvtier_operator.election import Election
from kvtier_operator.fence import Fence
from kvtier_operator.health import serving
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.settings import Settings
from kvtier_operator.term import Term

__all__ = ["run"]

log = structlog.get_logger(__name__)
_STOP_S: Final = 5.0
_STUCK: Final = 1


async def run(settings: Settings) -> int:
    """Until SIGTERM or SIGINT (0), or until a term does not end although its fence is closed (1)."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stopping.set)
    config = KubeConfig.from_file(settings.kubeconfig) if settings.kubeconfig else KubeConfig.from_env()
    metrics = Metrics()
    kube = Kube(config, metrics)
    election = Election(
        kube,
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        identity=settings.identity,
        looked=metrics.alive,
    )
    async with serving(metrics, settings.host, settings.port, stalled_s=settings.stalled_s) as port:
        log.info("started", identity=settings.identity, port=port, namespaces=settings.namespaces or "all")
        try:
            while not stopping.is_set():
                fence = Fence()
                term = Term(settings, config, metrics, fence)
                term.start()
                if not await _its_turn(election, fence, term, stopping):
                    term.stop()
                    await asyncio.to_thread(term.ended.wait, _STOP_S)
                    break
                metrics.leading(True)
                ended = await _serve_term(term, election, fence, stopping)
                metrics.leading(False)
                if not ended and not stopping.is_set():
                    log.critical("the term does not end; leaving, so that a new process can begin")
                    return _STUCK
        finally:
            await kube.close()
    return 0


async def _its_turn(election: Election, fence: Fence, term: Term, stopping: asyncio.Event) -> bool:
    """Once the Lease is held, and the fence open: True. False: it is time to stop."""
    acquiring = asyncio.create_task(election.acquire(fence, went_back=term.forget))
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({acquiring, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if acquiring.done():
        acquiring.result()
        return True
    acquiring.cancel()
    await asyncio.gather(acquiring, return_exceptions=True)
    return False


async def _serve_term(term: Term, election: Election, fence: Fence, stopping: asyncio.Event) -> bool:
    """Whether the term ended. The Lease is given back only when nothing is written any more, so that two never act."""
    holding = asyncio.create_task(election.hold(fence))
    while not (stopping.is_set() or holding.done() or term.ended.is_set()):
        await asyncio.sleep(0.1)
    term.stop()
    quiet = await asyncio.to_thread(term.quiet.wait, _STOP_S)
    lost = holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    fence.close()
    if quiet and not lost:
        await election.give_back()
    ended = await asyncio.to_thread(term.ended.wait, _STOP_S)
    if not stopping.is_set():
        await asyncio.sleep(1)  # a term that fails at once must not spin
    return ended
