"""What the gate before a pod's files costs: opens of one file by one process, with it and without it, in turn. Needs root.

The opener is in a cgroup that is called like a pod's, and the file on a file system of its own. Reads and writes pass no gate.
"""

from __future__ import annotations

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtier_node.kernel import libc
from kvtier_node.pods.gate import Gate
from kvtier_node.pods.members import PodMembers

_SECONDS = 1.0
_OPENER = """
import os, sys, time
procs, path, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
with open(procs, "w") as file:
    file.write(str(os.getpid()))
opens, until = 0, time.monotonic() + seconds
while time.monotonic() < until:
    os.close(os.open(path, os.O_RDONLY))
    opens += 1
print(opens / seconds)
"""


@contextmanager
def _pod_cgroup(uid: str) -> Iterator[Path]:
    """Where process ids are written to."""
    tops = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
    top = next((path for path in tops if (path / "cgroup.procs").exists()), None)
    if top is None:
        raise SystemExit("the gate's figures need a cgroup file system that can be written: --only store, or volumes")
    folder = top / f"kvtier-bench-{secrets.token_hex(4)}" / f"pod{uid}"
    folder.mkdir(parents=True)
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()
        folder.parent.rmdir()


@contextmanager
def _file_system(directory: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as folder:
        libc.mount("tmpfs", folder, "tmpfs", 0, None)
        try:
            Path(folder, "slot.rank_0").touch()
            yield Path(folder)
        finally:
            libc.umount2(folder, 0)


def measure(directory: str | None, rounds: int) -> dict[str, Any]:
    """Opens a second without and with a gate (medians), and the agent's CPU time for one of the latter."""
    uid = "00000000-0000-4000-8000-000000000000"
    free, gated, cpu_us = [], [], []
    with _pod_cgroup(uid) as procs, _file_system(directory) as folder:

        def opens() -> float:
            command = [sys.executable, "-c", _OPENER, str(procs), str(folder / "slot.rank_0"), str(_SECONDS)]
            return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

        for _ in range(rounds):
            free.append(opens())
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            gate = Gate.before(fd, PodMembers(uid))
            os.close(fd)
            try:
                gate.begin([], empty=True)
                before = time.process_time()
                gated.append(opens())
                cpu_us.append((time.process_time() - before) / (gated[-1] * _SECONDS) * 1e6)
            finally:
                gate.close()
    return {
        "opens_per_s": statistics.median(free),
        "gated_opens_per_s": statistics.median(gated),
        "agent_cpu_us_per_open": statistics.median(cpu_us),
    }


def show(found: dict[str, Any]) -> None:
    """The figures for a person."""
    free, gated = found["opens_per_s"], found["gated_opens_per_s"]
    Console().print(
        f"gate: {gated:,.0f} opens a second through it, {free:,.0f} without it ({gated / free:.2f});"
        f" {found['agent_cpu_us_per_open']:.0f} us of the agent for each"
    )
