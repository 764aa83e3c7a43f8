"""One life of a volume, as `kvtier run` and a recovery live it: the subject of the crash tests.

Runs in a forked process that a tracer may kill at any system call. Everything happens under `base`; a consumer
is a process of its own that writes canaries into its slots and waits to be killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtier_api.erasure import Trigger
from kvtier_api.tier import KVCacheTier
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import Death, erase
from kvtier_node.kernel import loop
from kvtier_node.provisioning import provision, start
from kvtier_node.recovery import open_node, recover

INTERPRETER = sys.executable
"""The real one: a test may put a stand-in in sys.executable for the agent's children."""
CANARY = b"kvtier-crash-canary-7f3a9c51"
_CONSUMER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
os.pwrite(fd, sys.argv[2].encode() * 20000, 0)
os.fsync(fd)
print("written", flush=True)
sys.stdin.read()
"""


def tier(base: Path, backend: str) -> KVCacheTier:
    return KVCacheTier.model_validate(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": "crash", "namespace": "default"},
            "spec": {
                "sizePerRank": "1Mi",
                "slotSize": "64Ki",
                "ranks": 2,
                "path": f"{base}/tiers/crash",
                "encryption": {"backend": backend},
            },
        }
    )


def consumer(slot_file: str) -> subprocess.Popen[bytes]:
    """A process that has written canaries into its slot file and keeps it open until its standard input closes."""
    process = subprocess.Popen(
        [INTERPRETER, "-S", "-c", _CONSUMER, slot_file, CANARY.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    return process


def live(base: Path, backend: str) -> None:
    """Recover, provision, serve a consumer that is killed, erase. What a fault makes it raise reaches the caller."""
    node = open_node(f"{base}/state", [f"{base}/tiers"], name="crash-node")
    recover(node)
    volume = provision(node, tier(base, backend), uid=os.geteuid(), gid=os.getegid())
    process = consumer(f"{volume.slots_path}/slot.rank_0")
    try:
        (base / "consumer.pid").write_text(str(process.pid))
        start(node, volume, ProcessConsumer.of(process.pid))
        process.send_signal(signal.SIGKILL)
        process.wait()
        erase(node, volume, Trigger.CRASH, death=Death.now())
    finally:
        process.kill()
        process.wait()
    node.ledger.close()


def below(base: Path) -> Iterator[str]:
    """Mounts and loop devices that still belong to `base`."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if str(base) in line:
            yield f"mount: {line}"
    for device, backing in loop.backing_paths().items():
        if str(base) in backing:
            yield f"loop device: {device}"
