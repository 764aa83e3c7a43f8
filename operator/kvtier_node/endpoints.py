"""HTTP for whoever watches the agent: /metrics, /healthz, /readyz. Loopback by default; reads only, no secrets.

Whether the agent is healthy and ready is the agent's to say; this module only serves it.
"""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from kvtier_api.errors import Busy, KernelError, UsageError

__all__ = ["DEFAULT_LISTEN", "Listen", "Verdict", "parse_listen", "serve"]

DEFAULT_LISTEN: Final = "127.0.0.1:9464"
_EXPOSITION: Final = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}


@dataclass(frozen=True)
class Listen:
    host: str
    port: int


@dataclass(frozen=True)
class Verdict:
    """Healthy or ready, or not, and what says so."""

    ok: bool
    text: str


def parse_listen(text: str) -> Listen | None:
    """`ADDRESS:PORT` (an IPv6 address in brackets), or None for `off`. Raises UsageError."""
    if text == "off":
        return None
    host, _, port = text.rpartition(":")
    try:
        address = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        address = ""
    if not address or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            "not an address and a port",
            obj=f"--listen {text}",
            remedy="write ADDRESS:PORT such as 127.0.0.1:9464 or [::1]:9464, or off",
        )
    return Listen(address, int(port))


@asynccontextmanager
async def serve(
    listen: Listen, *, metrics: Callable[[], bytes], healthy: Callable[[], Verdict], ready: Callable[[], Verdict]
) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port (the chosen one for port 0). Raises Busy, KernelError."""

    def verdict(ask: Callable[[], Verdict]) -> Callable[[web.Request], object]:
        async def answer(_request: web.Request) -> web.Response:
            found = ask()
            return web.Response(status=200 if found.ok else 503, text=f"{found.text}\n")

        return answer

    async def show(_request: web.Request) -> web.Response:
        return web.Response(body=metrics(), headers=_EXPOSITION)

    application = web.Application()
    application.router.add_get("/metrics", show)
    application.router.add_get("/healthz", verdict(healthy))  # type: ignore[arg-type]  # aiohttp's Handler alias
    application.router.add_get("/readyz", verdict(ready))  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, listen.host, listen.port)
        try:
            await site.start()
        except OSError as error:
            raise _cannot_listen(error, listen) from error
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _cannot_listen(error: OSError, listen: Listen) -> Busy | KernelError:
    where = f"--listen {listen.host}:{listen.port}"
    if error.errno == errno.EADDRINUSE:
        return Busy("another process listens there", obj=where, remedy="choose another port, or off")
    return KernelError(f"cannot listen: {error.strerror}", obj=where, remedy="give an address of this host")
