"""Work that can hang in the kernel, in a child process with a time limit: a tool, or one function of kvtier.

The one place that starts subprocesses (a tier's consumer excepted). A child runs in a session of its own with a minimal
environment, gets only the descriptors that it is given, and dies with the thread that started it. At its limit its
process group is killed. One that cannot die (state D) is left behind and reaped later; the caller goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvtier_api import errors
from kvtier_api.errors import KernelError, KvtierError

__all__ = ["call", "run_tool", "unreaped"]

_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_UDEV: Final = "/run/udev/control"
_PACKAGES: Final = {
    "blkdiscard": "util-linux",
    "cryptsetup": "cryptsetup-bin",
    "dmsetup": "dmsetup",
    "e2fsck": "e2fsprogs",
    "losetup": "mount",
    "lvs": "lvm2",
    "mkfs.ext4": "e2fsprogs",
    "mkfs.xfs": "xfsprogs",
    "tune2fs": "e2fsprogs",
    "wipefs": "util-linux",
    "xfs_io": "xfsprogs",
}
_LAUNCHER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "launch.py")
_KILL_GRACE_S: Final = 2.0
_OUTPUT_LIMIT_BYTES: Final = 16 * 2**20
_CHUNK_BYTES: Final = 65536
_ERROR_LINES: Final = 5
_SECRET_BYTES: Final = 8  # shorter input is a word or a number that messages hold anyway

_left_behind: list[subprocess.Popen[bytes]] = []
_left_behind_lock: Final = threading.Lock()


def _environment() -> dict[str, str]:
    """What a child gets, and what it starts in turn. Where no udevd answers (a container, a small system), libdevmapper must
    be told so: it leaves the nodes in /dev/mapper to udevd otherwise, and then there are none.
    """
    return _ENVIRONMENT if os.path.exists(_UDEV) else _ENVIRONMENT | {"DM_DISABLE_UDEV": "1"}


def unreaped() -> list[int]:
    """Process ids of children that were killed at their limit and have not died yet. Reaps those that have."""
    with _left_behind_lock:
        _left_behind[:] = [process for process in _left_behind if process.poll() is None]
        return [process.pid for process in _left_behind]


class _Child:
    """A started process, and what it wrote to each descriptor that is read."""

    def __init__(self, argv: list[str], *, pass_fds: Sequence[int], reply: bool) -> None:
        unreaped()
        self.reply_read = self._reply_write = -1
        self.output: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "reply": bytearray()}
        if reply:
            self.reply_read, self._reply_write = os.pipe()
            argv = [*argv, str(self._reply_write), str(os.getpid())]
            pass_fds = [*pass_fds, self._reply_write]
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if reply else subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=_environment(),
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except BaseException:
            if reply:
                os.close(self.reply_read)
            raise
        finally:
            if reply:
                os.close(self._reply_write)

    def finish(self, stdin: bytes, timeout_s: float) -> bool:
        """Feed it and wait for its end; False: the limit came first, and its process group was killed."""
        try:
            ended = self._pump(memoryview(stdin), time.monotonic() + timeout_s)
        except BaseException:
            self._kill()
            raise
        if not ended:
            self._kill()
            return False
        self._kill_group()  # nothing that it started outlives it
        self.process.wait()
        self._close()
        return True

    def _pump(self, feed: memoryview, deadline: float) -> bool:
        assert self.process.stdin and self.process.stderr  # noqa: S101  both are pipes
        with selectors.DefaultSelector() as selector:
            sources = {"stderr": self.process.stderr.fileno()}
            if self.process.stdout:
                sources["stdout"] = self.process.stdout.fileno()
            if self.reply_read >= 0:
                sources["reply"] = self.reply_read
            for name, fd in sources.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, name)
            os.set_blocking(self.process.stdin.fileno(), False)
            selector.register(self.process.stdin, selectors.EVENT_WRITE, "stdin")
            end = os.pidfd_open(self.process.pid)
            try:
                selector.register(end, selectors.EVENT_READ, "end")
                while (left := deadline - time.monotonic()) > 0:
                    ended = False
                    for key, _ in selector.select(left):
                        if key.data == "end":
                            ended = True
                        elif key.data == "stdin":
                            feed = self._feed(feed)
                            if not feed:
                                selector.unregister(self.process.stdin)
                                self.process.stdin.close()
                        elif self._drain(key.data, key.fd):
                            selector.unregister(key.fd)
                    if ended:  # a grandchild may still hold the pipes: what is in them now is the output
                        for name, fd in sources.items():
                            self._drain(name, fd)
                        return True
            finally:
                os.close(end)
        return False

    def _feed(self, feed: memoryview) -> memoryview:
        assert self.process.stdin  # noqa: S101
        try:
            return feed[os.write(self.process.stdin.fileno(), feed[:_CHUNK_BYTES]) :] if feed else feed
        except BlockingIOError:
            return feed
        except BrokenPipeError:  # it does not want more: its exit status says whether that is an error
            return feed[:0]

    def _drain(self, name: str, fd: int) -> bool:
        """Read what is there; True at the end of the stream."""
        while True:
            try:
                chunk = os.read(fd, _CHUNK_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self.output[name] += chunk
            if name == "stderr":
                del self.output[name][:-_CHUNK_BYTES]
            elif len(self.output[name]) > _OUTPUT_LIMIT_BYTES:
                raise KernelError(f"more than {_OUTPUT_LIMIT_BYTES} bytes of output", obj=f"process {self.process.pid}")

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # not reaped, so the number is still its own
        except ProcessLookupError:
            pass

    def _kill(self) -> None:
        self._kill_group()
        self._close()
        try:
            self.process.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            with _left_behind_lock:
                _left_behind.append(self.process)

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass
        if self.reply_read >= 0:
            os.close(self.reply_read)
            self.reply_read = -1

    def last_words(self, told: Iterable[bytes]) -> str:
        """The last lines of stderr, unless they repeat a line of what the child was told: that may be a key."""
        raw = bytes(self.output["stderr"])
        secrets = [line for text in told for line in (text, *text.splitlines()) if len(line) >= _SECRET_BYTES]
        if any(form in raw for line in secrets for form in (line, line.hex().encode())):
            return "its messages repeat its input and are withheld"
        lines = raw.decode(errors="replace").split("\n")
        printable = ("".join(char if char.isprintable() else " " for char in line).strip() for line in lines)
        return " | ".join([line for line in printable if line][-_ERROR_LINES:])


def _texts(value: object) -> Iterator[bytes]:
    """Every string in the arguments of a call."""
    if isinstance(value, str):
        yield value.encode(errors="surrogatepass")
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _isolated(*arguments: str) -> list[str]:
    """This interpreter without PYTHON* variables, user site or current directory; it writes no .pyc if we do not."""
    return [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else []), *arguments]


def run_tool(argv: Sequence[str], *, timeout_s: float, pass_fds: Sequence[int] = (), stdin: bytes | None = None) -> str:
    """Run a tool to its end; its stdout. `argv[0]` is a name looked up in /usr/sbin:/usr/bin:/sbin:/bin, or a path.

    Raises KernelError if it is missing, exits other than 0, or takes longer than `timeout_s` seconds.
    """
    tool = shutil.which(argv[0], path=_ENVIRONMENT["PATH"])
    if tool is None:
        package = _PACKAGES.get(os.path.basename(argv[0]))
        remedy = f"apt-get install {package}" if package else "install it"
        raise KernelError("the program is missing", obj=argv[0], remedy=remedy)
    feed = stdin or b""
    child = _Child(_isolated("-S", _LAUNCHER, str(os.getpid()), tool, *argv[1:]), pass_fds=pass_fds, reply=False)
    if not child.finish(feed, timeout_s):
        raise KernelError(
            f"timed out after {timeout_s:g} s: {child.last_words([feed])}".removesuffix(": "),
            obj=argv[0],
            remedy="look at the kernel log for a device that hangs",
        )
    if child.process.returncode != 0:
        raise KernelError(
            f"{_ending(child.process.returncode)}: {child.last_words([feed])}".removesuffix(": "), obj=argv[0]
        )
    return child.output["stdout"].decode(errors="surrogateescape")


def call(function: str, *, timeout_s: float, fds: Mapping[str, int] | None = None, **json_args: Any) -> dict[str, Any]:
    """Call `"kvtier_node.module:name"` in a fresh interpreter, as `name(fds={...}, **json_args)`; the dict it returns.

    `fds` are inherited; what the function gets holds the child's numbers of them. The rest travels as JSON on pipes.
    An OSError or a KvtierError of the function is raised here again as the same class; anything else, a kill and the
    limit (`timeout_s`, seconds) as KernelError.
    """
    # Copies, from 3 on: 0, 1 and 2 are the child's own streams, and nobody else closes a copy under us.
    copies = {name: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for name, fd in (fds or {}).items()}
    try:
        request = json.dumps({"function": function, "fds": copies, "args": json_args}).encode()
        child = _Child(_isolated("-m", "kvtier_node.kernel.child"), pass_fds=list(copies.values()), reply=True)
    finally:
        for fd in copies.values():
            os.close(fd)
    if not child.finish(request, timeout_s):
        raise KernelError(
            f"timed out after {timeout_s:g} s: it may hang in the kernel",
            obj=function,
            remedy="look at the kernel log for a device that hangs",
        )
    raw = bytes(child.output["reply"])
    if child.process.returncode != 0 or not raw:
        words = child.last_words(_texts(json_args))
        raise KernelError(f"{_ending(child.process.returncode)}: {words}".removesuffix(": "), obj=function)
    return _result(function, json.loads(raw))


def _result(function: str, reply: dict[str, Any]) -> dict[str, Any]:
    if "result" in reply:
        result: dict[str, Any] = reply["result"]
        return result
    if "os_error" in reply:
        told = reply["os_error"]
        raise OSError(told["errno"], told["strerror"], told["filename"])
    if "kvtier_error" in reply:
        told = reply["kvtier_error"]
        kind = getattr(errors, told["class"], KvtierError)
        raise kind(told["cause"], obj=told["obj"], remedy=told["remedy"])
    raise KernelError(reply["failure"], obj=function, remedy="this is a defect of kvtier: please report it")
