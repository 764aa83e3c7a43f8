"""HTTP for whoever watches the agent: /metrics, /healthz, /readyz. Loopback by default; reads only, no secrets.

Whether the agent is healthy and ready is the agent's to say; this module only serves it, by hand: three pages are not worth the
memory of a web framework on every node.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from kvtier_api.errors import Busy, KernelError, UsageError

__all__ = ["DEFAULT_LISTEN", "Listen", "Verdict", "parse_listen", "serve"]

DEFAULT_LISTEN: Final = "127.0.0.1:9464"
_EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
_LIMIT_S: Final = 10.0
_HEAD_LIMIT_BYTES: Final = 16 * 1024


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

    def verdict(ask: Callable[[], Verdict]) -> Callable[[], _Page]:
        def page() -> _Page:
            found = ask()
            return _Page(200 if found.ok else 503, f"{found.text}\n".encode())

        return page

    pages: dict[str, Callable[[], _Page]] = {
        "/metrics": lambda: _Page(200, metrics(), _EXPOSITION),
        "/healthz": verdict(healthy),
        "/readyz": verdict(ready),
    }

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_LIMIT_S):
                writer.write(_answer(await reader.readuntil(b"\r\n\r\n"), pages))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, ConnectionError):
            pass  # it hung up, was too slow, or sent something else: nobody is left to be told
        finally:
            writer.close()

    try:
        server = await asyncio.start_server(connection, listen.host, listen.port, limit=_HEAD_LIMIT_BYTES)
    except OSError as error:
        raise _cannot_listen(error, listen) from error
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@dataclass(frozen=True)
class _Page:
    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


_NOT_FOUND: Final = _Page(404, b"not found: /metrics, /healthz and /readyz are here\n")
_NOT_ALLOWED: Final = _Page(405, b"only GET and HEAD\n")
_NOT_HTTP: Final = _Page(400, b"not a request of HTTP/1\n")


def _made(make: Callable[[], _Page]) -> _Page:
    try:
        return make()
    except Exception as error:  # noqa: BLE001  a defect in a figure must not look like an agent that is gone
        return _Page(500, f"{type(error).__name__}\n".encode())


def _answer(head: bytes, pages: Mapping[str, Callable[[], _Page]]) -> bytes:
    """The whole response to a request, of which the first line alone counts (RFC 9112). One request a connection."""
    words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
    method = words[0]
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        page = _NOT_HTTP
    elif method not in ("GET", "HEAD"):
        page = _NOT_ALLOWED
    else:
        make = pages.get(words[1].partition("?")[0])
        page = _NOT_FOUND if make is None else _made(make)
    fields = {
        "Content-Type": page.kind,
        "Content-Length": str(len(page.body)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **({"Allow": "GET, HEAD"} if page is _NOT_ALLOWED else {}),
    }
    lines = [f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else page.body)


def _cannot_listen(error: OSError, listen: Listen) -> Busy | KernelError:
    where = f"--listen {listen.host}:{listen.port}"
    if error.errno == errno.EADDRINUSE:
        return Busy("another process listens there", obj=where, remedy="choose another port, or off")
    return KernelError(f"cannot listen: {error.strerror}", obj=where, remedy="give an address of this host")
