"""What a stderr that takes nothing did to the fence and to the node, once: each was an exploit that worked."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from standalone import KVTIER, Host, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        it.declare("chat", **SEALED)
        yield it


def state_of(host: Host) -> str:
    volumes = host.json("status", "--all")["volumes"]
    return volumes[0]["state"] if volumes else ""


@pytest.mark.parametrize("how", ["full", "reader gone", "closed"])
def test_crash_erase_a_stderr_that_takes_nothing_does_not_end_the_fence(host: Host, how: str) -> None:
    argv = [*KVTIER, "run", "--tier", "chat", "--", "sh", "-c", "sleep 1; exit 7"]
    if how == "closed":
        argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv]
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(
            argv, env=host.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, check=False,
            stderr={"full": full, "reader gone": writer, "closed": None}[how],
        )  # fmt: skip
    finally:
        os.close(writer)
        os.close(full)
    assert done.returncode == 7
    assert state_of(host) == "Erased"


def test_crash_erase_a_log_that_takes_nothing_does_not_end_the_node(host: Host) -> None:
    with open("/dev/full", "wb") as full:
        node = subprocess.Popen(
            [*KVTIER, "node", "--listen", "off"], env=host.env, stdin=subprocess.DEVNULL, stdout=full, stderr=full
        )
    try:
        wait_for(lambda: node.poll() is not None or host.status_file("chat").exists(), "the node's first status")
        process, told, pid = host.run("chat", "sleep 600")
        process.sigkill()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(told["KVTIER_SLOT_DIR"]).exists(), "the erasure by the node")
        host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")
        assert node.poll() is None
        node.terminate()
        assert node.wait(60) == 0
    finally:
        node.kill()
        node.wait()
