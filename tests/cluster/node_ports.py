"""TCP between a test node's network namespace and the one outside: `python node_ports.py NETNS RULE...`.

A RULE is `out:ADDRESS:PORT=ADDRESS:PORT` (the node connects to the first, and reaches the second outside) or `in:...` (the
other way round). A socket belongs to the namespace in which it was made, so one process has both ends. Ready when it closes
stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import sys
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)

Address = tuple[str, int]


@contextlib.contextmanager
def _inside(namespace: int) -> Iterator[None]:
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        _enter(namespace)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _socket(namespace: int | None) -> socket.socket:
    with _inside(namespace) if namespace is not None else contextlib.nullcontext():
        made = socket.socket()
    made.setblocking(False)
    return made


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(1 << 16):
            writer.write(content)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: Address, namespace: int | None
) -> None:
    try:
        other = _socket(namespace)
        try:
            await asyncio.get_running_loop().sock_connect(other, address)
            far_reader, far_writer = await asyncio.open_connection(sock=other)
        except OSError:
            other.close()
            return
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.close()
    finally:
        writer.close()


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def _serve(namespace: int, rules: list[str]) -> None:
    servers = []
    for rule in rules:
        direction, _, rest = rule.partition(":")
        listen, _, connect = rest.partition("=")
        here, there = (namespace, None) if direction == "out" else (None, namespace)
        bound = _socket(here)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(_address(listen))

        accepted = functools.partial(_forward, address=_address(connect), namespace=there)
        servers.append(await asyncio.start_server(accepted, sock=bound))
    os.close(1)  # sys.stdout would leave it open
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    asyncio.run(_serve(os.open(sys.argv[1], os.O_RDONLY), sys.argv[2:]))


if __name__ == "__main__":
    main()
