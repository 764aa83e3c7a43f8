"""The agent's HTTP: three pages, and an answer to whatever else is sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from kvtier_api.errors import Busy, UsageError
from kvtier_node.endpoints import Listen, Verdict, parse_listen, serve


def exchange(*requests: bytes, metrics: Callable[[], bytes] = lambda: b"figures 1\n", ok: bool = True) -> list[bytes]:
    """The whole answer to each request, on a connection of its own."""

    async def run() -> list[bytes]:
        found = []
        verdict = Verdict(ok, "as seen")
        async with serve(
            Listen("127.0.0.1", 0), metrics=metrics, healthy=lambda: verdict, ready=lambda: verdict
        ) as port:
            for request in requests:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                await writer.drain()
                found.append(await reader.read())
                writer.close()
        return found

    return asyncio.run(run())


def test_each_page_is_served_with_its_type_and_length() -> None:
    metrics, healthy, head = exchange(
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"HEAD /readyz HTTP/1.1\r\nHost: a\r\n\r\n",
    )
    lines, _, body = metrics.partition(b"\r\n\r\n")
    assert lines.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in lines.split(b"\r\n")
    assert b"Content-Length: 10" in lines.split(b"\r\n")
    assert body == b"figures 1\n"
    assert healthy.endswith(b"\r\n\r\nas seen\n")
    assert b"Content-Length: 8" in head and head.endswith(b"\r\n\r\n")


def test_what_is_not_well_is_503_and_a_defect_is_500() -> None:
    assert exchange(b"GET /readyz HTTP/1.1\r\n\r\n", ok=False)[0].startswith(b"HTTP/1.1 503 Service Unavailable")

    def broken() -> bytes:
        raise KeyError("secret detail")

    (answer,) = exchange(b"GET /metrics HTTP/1.1\r\n\r\n", metrics=broken)
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"secret detail" not in answer


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00 tls\r\n\r\n", b"400"),
        (b"\xff\xfe\r\n\r\n", b"400"),
    ],
)
def test_anything_else_gets_an_answer_that_says_what_it_is(request_: bytes, status: bytes) -> None:
    (answer,) = exchange(request_)
    assert answer.split(b" ")[1] == status
    assert (b"Allow: GET, HEAD" in answer) == (status == b"405")


def test_a_head_without_an_end_is_closed_and_costs_no_memory() -> None:
    assert exchange(b"GET /" + b"a" * 100_000) == [b""]


def test_a_taken_port_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Listen("127.0.0.1", taken.getsockname()[1])

        async def run() -> None:
            page = Verdict(True, "")
            async with serve(listen, metrics=lambda: b"", healthy=lambda: page, ready=lambda: page):
                raise AssertionError("it listens")

        with pytest.raises(Busy):
            asyncio.run(run())


def test_an_address_is_an_address_and_a_port() -> None:
    assert parse_listen("[::1]:9464") == Listen("::1", 9464)
    assert parse_listen("off") is None
    with pytest.raises(UsageError):
        parse_listen("localhost:9464")
