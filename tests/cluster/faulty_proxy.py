"""A proxy between one controller and a real API server, which does on request what networks and API servers do.

The controller speaks plain HTTP to it, it speaks TLS to the API server with the controller's certificate, so the audit log
still tells who wrote. Nothing is made up: what is not refused, held or cut goes to the API server and its answer comes back.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml
from aiohttp import web
from controllers import Controller
from controlplane import ControlPlane, free_ports

__all__ = ["GONE", "Behind", "Fault", "FaultyProxy", "Request"]

T = TypeVar("T")
_OF_ONE_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding", "upgrade"})


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    """As the API server says what went wrong."""
    fixed = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**fixed, "message": message, "reason": reason, "code": code}


GONE = (
    json.dumps({"type": "ERROR", "object": status(410, "Expired", "too old resource version: 1 (2)")}).encode() + b"\n"
)
"""The event inside a stream that says that the watch is too old."""
_REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass(frozen=True)
class Request:
    """One request that came, when it came (CLOCK_MONOTONIC seconds), and what was answered (0: nothing)."""

    at_s: float
    method: str
    path: str
    code: int


@dataclass
class Fault:
    """What happens to requests of `method` whose path and query match `path`, `times` times or until `over`."""

    method: str
    path: re.Pattern[str]
    act: str
    """`answer`, `hold` (not sent before `over`), `cut` (done by the API server, but the answer is lost), `mute` (a watch)."""
    code: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    left: int | None = None
    hits: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    """Set when a request is held."""
    ended: threading.Event = field(default_factory=threading.Event)

    def over(self) -> None:
        self.ended.set()

    def takes(self, request: web.BaseRequest) -> bool:
        """Whether it is this request's turn; then it is counted."""
        if not self.concerns(request) or self.left == 0:
            return False
        self.hits += 1
        if self.left is not None:
            self.left -= 1
        return True

    def concerns(self, request: web.BaseRequest) -> bool:
        return (
            not self.ended.is_set()
            and self.method in ("*", request.method)
            and self.path.search(request.path_qs) is not None
        )


@dataclass
class _Stream:
    """A watch that runs. `end` is what it says last before it closes."""

    request: web.BaseRequest
    end: asyncio.Future[bytes]


class FaultyProxy:
    """`with FaultyProxy(plane, user) as proxy:`; `kubeconfig` leads to it. Runs in a thread and loop of its own."""

    def __init__(self, plane: ControlPlane, user: str) -> None:
        plane.kubeconfig(user, ("system:masters",))
        self._upstream = plane.server
        self._ssl = ssl.create_default_context(cafile=str(plane.ca))
        self._ssl.load_cert_chain(plane.ca.parent / f"{user}.crt", plane.ca.parent / f"{user}.key")
        (self.port,) = free_ports(1)
        self.kubeconfig = self._kubeconfig(plane.folder / f"{user}-proxied.kubeconfig")
        self.requests: list[Request] = []
        self._faults: list[Fault] = []
        self._streams: list[_Stream] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), daemon=True)
        self._ready = threading.Event()

    def _kubeconfig(self, path: Path) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "p", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "p", "context": {"cluster": "p", "user": "u", "namespace": "default"}}],
            "current-context": "p",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.heal()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    def heal(self) -> None:
        """No fault any more. Watches that were silenced are closed."""
        mutes = [it for it in self._faults if it.act == "mute"]
        for fault in self._faults:
            fault.over()
        self._faults.clear()
        for fault in mutes:
            self.end_watches(fault.path.pattern)

    # -- faults

    def answer(self, method: str, path: str, code: int, *, times: int | None = None, **headers: str) -> Fault:
        """The API server's own kind of refusal; it never sees the request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._add(Fault(method, re.compile(path), "answer", code, named, times))

    def cut(self, method: str, path: str, *, times: int | None = 1) -> Fault:
        """The API server does it, and the connection is reset before its answer."""
        return self._add(Fault(method, re.compile(path), "cut", left=times))

    def hold(self, method: str, path: str) -> Fault:
        """One request that is still on its way, until `over`."""
        return self._add(Fault(method, re.compile(path), "hold", left=1))

    def mute(self, path: str) -> Fault:
        """Watches that stay open and say nothing any more. What they missed is not told later."""
        return self._add(Fault("GET", re.compile(path), "mute"))

    def end_watches(self, path: str, last: bytes = b"") -> int:
        """Close the watches that run, after a last line. How many there were."""
        pattern = re.compile(path)

        async def end() -> int:
            found = [it for it in self._streams if pattern.search(it.request.path_qs) and not it.end.done()]
            for stream in found:
                stream.end.set_result(last)
            return len(found)

        return self._run(end())

    def watches(self, path: str) -> int:
        """How many run."""
        return sum(1 for it in list(self._streams) if re.search(path, it.request.path_qs))

    def _add(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    # -- serving

    async def _serve(self) -> None:
        runner = web.ServerRunner(
            web.Server(self._handle, access_log=None, handler_cancellation=True), shutdown_timeout=0.1
        )  # type: ignore[no-untyped-call]
        await runner.setup()
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self._ready.set()
            await self._stop.wait()
            for stream in self._streams:
                if not stream.end.done():
                    stream.end.set_result(b"")
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        at_s = time.monotonic()
        code = 0
        try:
            response = await self._answer(request)
            code = response.status
            return response
        except aiohttp.ClientConnectionResetError:  # the controller has gone from a watch
            return web.Response()
        finally:
            self.requests.append(Request(at_s, request.method, request.path_qs, code))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        fault = next((it for it in list(self._faults) if it.act != "mute" and it.takes(request)), None)
        if fault is not None and fault.act == "answer":
            text = status(fault.code, _REASONS.get(fault.code, "Unknown"), "made by the test")
            return web.json_response(text, status=fault.code, headers=fault.headers)
        if fault is not None and fault.act == "hold":
            fault.held.set()
            await asyncio.to_thread(fault.ended.wait)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_HOP}
        try:
            async with self._session.request(
                request.method,
                self._upstream + request.path_qs,
                data=body or None,
                headers=headers,
                allow_redirects=False,
            ) as answer:
                return await self._pass_on(request, answer, lost=fault is not None and fault.act == "cut")
        except aiohttp.ClientError:  # the API server is away: so is the proxy
            _reset(request)
            raise

    async def _pass_on(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, *, lost: bool
    ) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_HOP}
        if request.query.get("watch") and answer.status == 200:
            return await self._stream(request, answer, headers)
        body = await answer.read()
        if lost:
            _reset(request)
        return web.Response(body=body, status=answer.status, headers=headers)

    async def _stream(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        stream = _Stream(request, self._loop.create_future())
        self._streams.append(stream)
        try:
            while True:
                reading = asyncio.ensure_future(answer.content.readany())
                await asyncio.wait({reading, stream.end}, return_when=asyncio.FIRST_COMPLETED)
                if stream.end.done():
                    reading.cancel()
                    await response.write(stream.end.result())
                    break
                data = reading.result()
                if not data:
                    break
                if self._is_mute(request):
                    await stream.end  # it stays open, and what comes is lost
                    await response.write(stream.end.result())
                    break
                await response.write(data)
        finally:
            self._streams.remove(stream)
        await response.write_eof()
        return response

    def _is_mute(self, request: web.BaseRequest) -> bool:
        mutes = [it for it in list(self._faults) if it.act == "mute" and it.concerns(request)]
        for fault in mutes:
            fault.hits += 1
        return bool(mutes)


def _reset(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


class Behind(Controller):
    """A controller whose way to the API server leads through a proxy of its own."""

    def __init__(self, plane: ControlPlane, name: str, proxy: FaultyProxy, **options: Any) -> None:
        super().__init__(plane, name, **options)
        self.proxy = proxy
        self.namespace: str = options["lease_namespace"]
        direct, proxied = str(self.kubeconfig), str(proxy.kubeconfig)
        self._arguments = [proxied if argument == direct else argument for argument in self._arguments]
