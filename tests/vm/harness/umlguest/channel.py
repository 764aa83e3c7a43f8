"""How a guest script talks with the harness: one serial line, `@@ tag {json}` up, single words down.

    from umlguest import channel
    channel.args["count"]              # what the test passed
    channel.report("committed", n=3)   # the host saw it => it happened before
    channel.barrier("arrow", n=4)      # as report, then stands still until the host says go

The line is not the console, so kernel messages cannot tear a report. Safe from threads and from forked children.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import termios
import threading
import tty
from typing import Any

DEVICE = "/dev/ttyS0"

#: The test's arguments; filled by init before the script runs.
args: dict[str, Any] = {}

_lock = threading.Lock()
_fd = -1
_pending = b""


def open_line() -> int:
    """Open the line, raw (no echo, no translation). Other processes of the guest call this by themselves, once."""
    global _fd
    if _fd < 0:
        _fd = os.open(DEVICE, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        tty.setraw(_fd, termios.TCSANOW)
    return _fd


def report(tag: str, **fields: Any) -> None:
    """Send one event. It is out of the machine when this returns."""
    line = f"@@ {tag} {json.dumps(fields)}\n".encode()
    fd = open_line()
    with _lock:
        # Several processes share the line, forked ones even its descriptor: a lock of the process keeps lines whole.
        fcntl.lockf(fd, fcntl.LOCK_EX)
        try:
            while line:
                line = line[os.write(fd, line) :]
            termios.tcdrain(fd)
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)


def listen() -> str:
    """The next word from the host. The word `off` ends the script (SystemExit)."""
    global _pending
    fd = open_line()
    while b"\n" not in _pending:
        chunk = os.read(fd, 4096)
        if not chunk:
            sys.exit(0)
        _pending += chunk
    line, _, _pending = _pending.partition(b"\n")
    word = line.decode()
    if word == "off":
        sys.exit(0)
    return word


def barrier(tag: str, **fields: Any) -> str:
    """Report, then wait for the host's word (`Machine.tell`): the moment in which a test cuts the power."""
    report(tag, **fields)
    return listen()
