"""The namespaces of a test node, and their first process: `python node_namespaces.py BASE`.

A node has a PID, mount and network namespace of its own. All of it ends with the first process, which ends when its stdin does:
when the test run dies, nothing is left. `/run`, `/var/lib` and `/var/log` are folders of BASE, so a node has its usual paths and
writes nowhere else. Whoever starts it sends JSON lines and gets JSON lines back:

    {"start": NAME, "argv": [...], "log": FILE}    ->  {"started": NAME, "pid": PID}, in the node's own PID namespace
    {"kill": PID, "signal": NUMBER}                ->  {"killed": PID, "error": ""}
                                                   <-  {"ended": NAME, "status": STATUS}, whenever a started one ends

It needs nothing but Python's own library.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

FOLDERS = {"run": "/run", "lib": "/var/lib", "log": "/var/log"}
"""Folders of BASE, and where the node has them."""
SYSCTLS = (
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
"""What kubelet would set for the whole machine: it sets files of BASE instead."""
SERVICE_ADDRESS = "10.96.0.1"
"""The `kubernetes` Service, an address of the node's own loopback: no kube-proxy runs here."""

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x20000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_SHARED = 4096, 16384, 1 << 18, 1 << 20
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), None), f"mount {target}")


def _make_mounts(base: Path) -> None:
    """Nothing of the node's mounts is ever seen outside; inside, all are shared, as a node's are."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", 0)
    for name in SYSCTLS:
        copy = base / "sysctl" / name.replace("/", ".")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(Path(f"/proc/sys/{name}").read_text())
        _mount(str(copy), f"/proc/sys/{name}", None, _MS_BIND)
    for name, where in FOLDERS.items():
        (base / name).mkdir(mode=0o755, exist_ok=True)
        _mount(str(base / name), where, None, _MS_BIND)
    _mount("none", "/", None, _MS_REC | _MS_SHARED)


def _make_network() -> None:
    for arguments in (("link", "set", "lo", "up"), ("addr", "add", f"{SERVICE_ADDRESS}/32", "dev", "lo")):
        subprocess.run(["ip", *arguments], check=True)


class _First:
    """Process 1: starts, kills, reaps."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(self._wake_r, selectors.EVENT_READ)
        pending = b""
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
                self._reap()
            if sys.stdin.fileno() in ready:
                content = os.read(sys.stdin.fileno(), 1 << 16)
                if not content:
                    return
                *lines, pending = (pending + content).split(b"\n")
                for line in lines:
                    self._do(json.loads(line))

    def _do(self, order: dict[str, object]) -> None:
        if "start" in order:
            self._start(str(order["start"]), [str(part) for part in order["argv"]], str(order["log"]))  # type: ignore[attr-defined]
        else:
            error = ""
            try:
                os.kill(int(str(order["kill"])), int(str(order["signal"])))
            except OSError as found:
                error = str(found.strerror)
            _say(killed=order["kill"], error=error)

    def _start(self, name: str, argv: list[str], log: str) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.execv(argv[0], argv)
            finally:
                os._exit(127)
        self._names[pid] = name
        _say(started=name, pid=pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._names.pop(pid, None)
            if name is not None:
                _say(ended=name, status=os.waitstatus_to_exitcode(status))


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    base = Path(sys.argv[1])
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET), "unshare")
    ready_r, ready_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Its stdin is what keeps it: PR_SET_PDEATHSIG would be one more thread of its starter's to depend on.
        os.close(ready_r)
        _make_mounts(base)
        _make_network()
        os.close(ready_w)
        _First().run()
        os._exit(0)  # with the first process, the kernel ends all others of the namespace
    os.close(ready_w)
    os.close(0)
    os.read(ready_r, 1)  # until it is set up, or has failed
    print(json.dumps({"first": pid}), flush=True)
    _, status = os.waitpid(pid, 0)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
