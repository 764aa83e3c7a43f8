"""Run a function in a forked process under strace, with a fault at the Nth of the system calls that change state.

The fork happens after all imports, and strace attaches before the function begins: so N counts the function's own calls.
strace counts per thread; the subject here has one. Its children are traced by their own invocation (see `child_fault`).
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CHANGING = (
    "mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,symlinkat,fallocate,ftruncate,"
    "truncate,write,writev,pwrite64,pwritev,pwritev2,fsync,fdatasync,fchmod,fchmodat,fchown,fchownat,mount,umount2,"
    "ioctl,mknod,mknodat,sync_file_range,copy_file_range,sendfile"
)
"""Calls that change what outlives a process: a disk, a mount, a device, a key. Locks, leases and reads do not."""
_CHANGES_NOTHING = re.compile(r"TCGETS|FIONBIO|FIOCLEX|FS_IOC_FIEMAP|_GET_|LOOP_CTL_GET_FREE|GETFLAGS")


@dataclass(frozen=True)
class Point:
    """The `number`th call of `call` in one run: where a fault can be put (strace counts each call by itself)."""

    call: str
    number: int
    text: str

    def fault(self, what: str) -> str:
        return f"inject={self.call}:{what}:when={self.number}"


def points_of(log: Path) -> list[Point]:
    """Every call in a trace that changes something, in order."""
    counts: Counter[str] = Counter()
    found = []
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(?:\d+ +)?(\w+)\((.*)", line)
        if match is None:
            continue
        call, text = match.groups()
        counts[call] += 1
        if not _CHANGES_NOTHING.search(text):
            found.append(Point(call, counts[call], text[:100]))
    return found


@dataclass
class Ending:
    """How the subject ended: `killed` by the fault, or its exit code, and what it said last."""

    killed: bool
    code: int
    said: str


def run(subject: Callable[[], None], log: Path, fault: str | None, *, limit_s: float = 300.0) -> Ending:
    """Run `subject` traced, with `fault` (`Point.fault`) or without."""
    go_read, go_write = os.pipe()
    say_read, say_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        os.close(say_read)
        os.dup2(say_write, 2)
        code = 0
        try:
            os.read(go_read, 1)
            subject()
        except BaseException as error:  # the verdict is the parent's; the reason goes to it
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            code = 1
        finally:
            os._exit(code)
    os.close(go_read)
    os.close(say_write)
    strace = shutil.which("strace")
    assert strace is not None
    command = [strace, "-q", "-o", str(log), "-e", f"trace={CHANGING}", "-e", "signal=none"]
    if fault is not None:
        command += ["-e", fault]
    tracer = subprocess.Popen([*command, "-p", str(pid)], stderr=subprocess.PIPE)
    _wait_until_traced(pid)
    os.write(go_write, b"g")
    os.close(go_write)
    status = _wait(pid, limit_s)
    tracer.wait(120)
    said = _drain(say_read)
    return Ending(os.WIFSIGNALED(status), os.waitstatus_to_exitcode(status), said)


def _wait_until_traced(pid: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        text = Path(f"/proc/{pid}/status").read_text()
        if not re.search(r"^TracerPid:\t0$", text, re.M):
            return
        time.sleep(0.002)
    raise AssertionError("strace did not attach")


def _wait(pid: int, limit_s: float) -> int:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the subject did not end within {limit_s:g} s")


def _drain(fd: int) -> str:
    data = b""
    while select.select([fd], [], [], 0)[0]:
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        data += chunk
    os.close(fd)
    return data.decode(errors="replace")


def child_fault(folder: Path, *, invocation: int, fault: str | None) -> str:
    """A stand-in for the interpreter: its Kth start runs under strace with a fault, the others run as they are.

    The agent starts each child as `sys.executable -I -m ...`; the subject sets sys.executable to what this returns.
    The tracer is detached (-D), so that the child still is its starter's child.
    """
    counter = folder / "child.count"
    counter.write_text("")
    script = folder / "python-with-a-fault"
    log = folder / "child.trace"
    injection = f" -e {fault}" if fault else ""
    script.write_text(
        "#!/bin/sh\n"
        f'echo >>"{counter}"\n'
        f'if [ "$(wc -l <"{counter}")" -eq {invocation} ]; then\n'
        f'  exec "{shutil.which("strace")}" -D -f -q -o "{log}" -e trace={CHANGING} -e signal=none'
        f'{injection} "{sys.executable}" "$@"\n'
        f'fi\nexec "{sys.executable}" "$@"\n'
    )
    script.chmod(0o755)
    return str(script)
