"""One virtual machine: boots in about half a second, talks by lines, and loses its power when told to.

    with Machine(work, script, kernel, disks=[work / "disk.img"], args={"n": 3}) as machine:
        event = machine.wait_for("committed", timeout_s=20)
        machine.cut()

`script` is a Python file that runs as root inside; it sees the host's file tree read-only, `disks` as /dev/ubdb,
/dev/ubdc, …, and reports with `umlguest.channel`. `serials`: serial numbers by the disks' file names, where a test wants
them. `cut()` returns when no process of the machine is left: what it
had issued to a disk is in the image, its memory is gone. Several machines may run at once, each with a work folder
of its own; a work folder holds the images and nothing precious, since the guest can write there.
Leaves namespaces and the killing to `launcher`, what is inside to `umlguest`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from uml.kernel import Kernel

_HARNESS = Path(__file__).resolve().parents[1]
_CONSOLE_LIMIT_BYTES = 1 << 20
LIMIT_S = 180.0
"""How long a test waits for a report. Not what is claimed of speed: several machines may share two processors with a compiler."""
_LINE_MARK = b"@@ "


class MachineError(AssertionError):
    """The machine did not do what the test waited for. The message ends with the console's last lines."""


class MachineEnded(MachineError):
    """The machine went off (or its script failed) before the event came."""


class MachineTimeout(MachineError):
    """The event did not come in time."""


@dataclass(frozen=True)
class Event:
    """One report of the guest: `@@ tag {json}` on its serial line. `at_s`: host clock (monotonic) at arrival."""

    tag: str
    fields: dict[str, Any]
    at_s: float

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass
class Machine:
    """A machine that is on between `__enter__` and `__exit__`, or until it is cut or goes off by itself."""

    work: Path
    script: Path
    kernel: Kernel
    disks: Sequence[Path] = ()
    serials: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    memory_mib: int = 384
    kernel_args: Sequence[str] = ()

    events: list[Event] = field(default_factory=list, init=False)
    _seen: int = field(default=0, init=False)
    _console: bytearray = field(default_factory=bytearray, init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _down_fd: int = field(default=-1, init=False)
    _line_closed: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        self._boot()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.cut()

    # -- talking ------------------------------------------------------------------------------------------------

    def wait_for(self, tag: str, timeout_s: float = LIMIT_S, *, where: Callable[[Event], bool] | None = None) -> Event:
        """The next event `tag` (for which `where` holds) after the last one waited for; those between stay in `events`.

        Raises MachineEnded if the machine goes off first, MachineTimeout after `timeout_s`.
        """
        return self._wait_for({tag}, timeout_s, where)

    def wait_for_any(self, *tags: str, timeout_s: float = LIMIT_S) -> Event:
        """As `wait_for`, for the first event of any of these tags."""
        return self._wait_for(set(tags), timeout_s, None)

    def _wait_for(self, tags: set[str], timeout_s: float, where: Callable[[Event], bool] | None) -> Event:
        deadline = time.monotonic() + timeout_s
        tag = " or ".join(sorted(tags))
        with self._changed:
            while True:
                while self._seen < len(self.events):
                    event = self.events[self._seen]
                    self._seen += 1
                    if event.tag in tags and (where is None or where(event)):
                        return event
                    if event.tag == "exit" and "exit" not in tags:
                        raise MachineEnded(self._story(f"ended with {event.fields} before {tag!r}"))
                if self._line_closed:
                    raise MachineEnded(self._story(f"went off before {tag!r}"))
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise MachineTimeout(self._story(f"no {tag!r} within {timeout_s} s"))

    def tell(self, word: str = "go") -> None:
        """Send one line to the guest (`channel.barrier` and `channel.listen` wait for it)."""
        os.write(self._down_fd, word.encode() + b"\n")

    # -- ends ---------------------------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def cut(self) -> float:
        """Cut the power now: SIGKILL to every process of the machine. Seconds until none was left; 0.0 if it was off."""
        process = self._process
        if process is None:
            return 0.0
        began_s = time.monotonic()
        was_on = process.poll() is None
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()  # the first process of the namespace dies with it, and all others with that one
            process.wait()
            raise MachineTimeout(self._story("the launcher did not end within 30 s of the cut")) from None
        took_s = time.monotonic() - began_s
        for thread in self._threads:
            thread.join()
        if self._down_fd >= 0:
            os.close(self._down_fd)
            self._down_fd = -1
        return took_s if was_on else 0.0

    def cut_after(self, delay_s: float) -> bool:
        """Let it run for `delay_s`, then cut. False if it had gone off by itself before."""
        deadline = time.monotonic() + delay_s
        with self._changed:
            while not self._line_closed and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(left_s)
            ended = self._line_closed
        self.cut()
        return not ended

    def wait_off(self, timeout_s: float = LIMIT_S) -> None:
        """Wait until the script has ended and the machine went off cleanly.

        Raises MachineEnded if the script failed or the kernel died, MachineTimeout (and cuts) if it stays on.
        """
        event = self.wait_for("exit", timeout_s)
        assert self._process is not None
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            story = self._story(f"did not go off within {timeout_s} s of its script's end")
            self.cut()
            raise MachineTimeout(story) from None
        code = self._process.returncode
        self.cut()
        if event["status"] != 0 or code != 0:
            raise MachineEnded(self._story(f"script ended with {event['status']}, kernel with {code}"))

    def power_off(self, timeout_s: float = LIMIT_S) -> None:
        """Ask a script that waits in `channel.listen` or `channel.barrier` to end, and wait for a clean power-off."""
        self.tell("off")
        self.wait_off(timeout_s)

    @property
    def console(self) -> str:
        """What the kernel and the script printed (the last MiB)."""
        with self._changed:
            return self._console.decode(errors="replace").replace("\r\n", "\n")

    # -- inside -------------------------------------------------------------------------------------------------

    def _boot(self) -> None:
        self.work = self.work.resolve()
        boot = self.work / "boot.json"
        site = [path for path in sys.path if path and Path(path).is_dir() and Path(path) != _HARNESS]
        boot.write_text(
            json.dumps(
                {
                    "script": str(self.script.resolve()),
                    "args": dict(self.args),
                    "env": dict(self.env),
                    "path": [str(_HARNESS), *site],
                    "modprobe": str(self.kernel.modprobe),
                    "keep": sorted({str(path) for path in (self.work, self.script.resolve().parent, *self._trees())}),
                }
            )
        )
        down_read, self._down_fd = os.pipe()
        up_read, up_write = os.pipe()
        console_read, console_write = os.pipe()
        try:
            config = self._launch_config(boot, (down_read, up_write))
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_HARNESS / "uml/launcher.py"), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=console_write,
                stderr=console_write,
                pass_fds=(down_read, up_write),
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "")},
            )
        finally:
            for fd in (down_read, up_write, console_write):
                os.close(fd)
        for reader, fd in ((self._read_line, up_read), (self._read_console, console_read)):
            thread = threading.Thread(target=reader, args=(fd,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _trees(self) -> list[Path]:
        """Folders of the host that a guest reads: the harness, Python, what it imports, the kernel's modules."""
        places = [_HARNESS, Path(sys.prefix), Path(sys.base_prefix), self.kernel.modprobe.parent, *map(Path, sys.path)]
        return [place for place in places if place.is_dir()]

    def _launch_config(self, boot: Path, guest_fds: tuple[int, int]) -> dict[str, Any]:
        disks = []
        for letter, disk in zip("bcdefgh", self.disks, strict=False):
            path = disk.resolve()
            if not path.is_relative_to(self.work):
                raise ValueError(f"disk {path} is outside the work folder {self.work}, the only place it may write")
            # `ubd<n>=<file>,<backing file>,<serial>`: what sysfs then shows as /sys/block/ubd<n>/serial
            disks.append(f"ubd{letter}={path}" + (f",,{serial}" if (serial := self.serials.get(path.name)) else ""))
        argv = [
            str(self.kernel.linux),
            f"mem={self.memory_mib}M",
            "root=none",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            f"init={sys.executable}",
            *disks,
            "con=null",
            "con0=null,fd:1",
            "ssl=null",
            "ssl0=fd:10,fd:11",
            "uml_dir=/dev/shm/",
            "quiet",
            "panic=-1",
            # System calls by seccomp instead of ptrace, where the host can: half the time.
            "seccomp=auto",
            # These two only measure the processor's speed at boot, for nearly a second.
            "initcall_blacklist=raid6_init",
            "lpj=20000000",
            *self.kernel_args,
            "--",
            "-I",
            "-S",
            "-B",
            str(_HARNESS / "umlguest/init.py"),
            str(boot),
        ]
        for word in argv:
            if any(char.isspace() or char in "\"'" for char in word):
                raise ValueError(f"{word!r} cannot be passed to the kernel: it splits its arguments at spaces")
        return {
            "work": str(self.work),
            "shm_mib": self.memory_mib + 64,
            "argv": argv,
            "guest_fds": guest_fds,
        }

    def _read_line(self, fd: int) -> None:
        with open(fd, "rb") as stream:
            for line in stream:
                head, mark, rest = line.partition(_LINE_MARK)
                tag, _, text = rest.decode(errors="replace").strip().partition(" ")
                with contextlib.suppress(ValueError):
                    # The last line of a machine that was cut may be torn: it was not reported, then.
                    if mark and not head.strip() and line.endswith(b"\n"):
                        event = Event(tag, json.loads(text or "{}"), time.monotonic())
                        with self._changed:
                            self.events.append(event)
                            self._changed.notify_all()
        with self._changed:
            self._line_closed = True
            self._changed.notify_all()

    def _read_console(self, fd: int) -> None:
        with open(fd, "rb", buffering=0) as stream:
            while chunk := stream.read(65536):
                with self._changed:
                    self._console += chunk
                    del self._console[:-_CONSOLE_LIMIT_BYTES]

    def _story(self, what: str) -> str:
        tail = self._console.decode(errors="replace").replace("\r\n", "\n")[-4000:]
        return f"{self.script.name}: {what}\n--- console\n{tail}"
