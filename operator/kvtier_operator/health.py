"""/healthz, /readyz and /metrics, for kubelet and Prometheus.

Alive means: a reconcile, or a standby's look at the Lease, was completed not long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import generate_latest

from kvtier_operator.metrics import Metrics

__all__ = ["serving"]


@asynccontextmanager
async def serving(metrics: Metrics, host: str, port: int, *, stalled_s: float) -> AsyncIterator[int]:
    """Serve until the block ends. Yields the port, which the kernel chose where `port` is 0."""

    async def healthz(_: web.Request) -> web.Response:
        age_s = metrics.reconcile_age_s()
        alive = age_s < stalled_s
        text = f"last completed reconcile {age_s:.1f} s ago, limit {stalled_s:g} s\n"
        return web.Response(text=text, status=200 if alive else 503)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def scrape(_: web.Request) -> web.Response:
        # Beside the loop: of thousands of tiers it takes seconds, and the Lease is renewed here.
        text = await asyncio.to_thread(generate_latest, metrics.registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(client_max_size=1024)
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", scrape)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        sockets = runner.addresses
        yield int(sockets[0][1])
    finally:
        await runner.cleanup()
