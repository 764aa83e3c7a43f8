"""Volumes: provisioning time, and death → erased, at two sizes. Needs root (loop devices, fscrypt).

The tiers lie on a sparse ext4 image in a loop device, so that 100 GiB can be preallocated on a machine that has not got them:
preallocation and erasure touch extents, not blocks. What a real disk adds to a discard is not in these figures.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtier_api.erasure import Trigger
from kvtier_api.tier import KVCacheTier
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import Death, erase
from kvtier_node.node import Node
from kvtier_node.provisioning import provision, start

GIB = 1 << 30


@contextmanager
def sparse_filesystem(directory: str, size_bytes: int) -> Iterator[str]:
    """An ext4 of `size_bytes` on a sparse file, mounted; everything is taken away again."""
    image = os.path.join(directory, "bench.img")
    with open(image, "wb") as file:
        os.truncate(file.fileno(), size_bytes)
    mount = os.path.join(directory, "fs")
    os.mkdir(mount, 0o755)
    subprocess.run(
        ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", image], check=True
    )
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)
        os.unlink(image)


def tier(path: str, backend: str, size: str, ranks: int) -> KVCacheTier:
    return KVCacheTier.model_validate(
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": "bench", "namespace": "default"},
            "spec": {"sizePerRank": size, "ranks": ranks, "path": path, "encryption": {"backend": backend}},
        }
    )


def one_life(node: Node, declared: KVCacheTier, used_bytes: int) -> tuple[float, float, float]:
    """(provisioning, death → key verified gone, death → Erased on record) in seconds. The consumer is killed by SIGKILL."""
    clock = time.monotonic()
    live = provision(node, declared, uid=os.geteuid(), gid=os.getegid())
    provisioned = time.monotonic() - clock
    fill = (
        "import os,sys\nfd=os.open(sys.argv[1],os.O_RDWR)\nblock=os.urandom(1<<20)\n"
        "for i in range(int(sys.argv[2])>>20): os.pwrite(fd,block,i<<20)\nprint('full',flush=True)\nimport time; time.sleep(3600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", fill, f"{live.slots_path}/slot.rank_0", str(used_bytes)], stdout=subprocess.PIPE
    )
    start(node, live, ProcessConsumer.of(process.pid))
    if process.stdout is None or process.stdout.readline() != b"full\n":
        raise RuntimeError("the consumer did not fill its slots")
    process.send_signal(signal.SIGKILL)
    death = Death.now()
    process.wait()
    receipt = erase(node, live, Trigger.CRASH, death=death)
    return provisioned, float(receipt.duration_s or 0), time.monotonic() - death.monotonic


def measure(directory: str | None = None, rounds: int = 5) -> list[dict[str, Any]]:
    """Rows: backend, size in GiB, medians and maxima in seconds. Sizes take turns, so that drift hits all alike."""
    rows: dict[tuple[str, int, int], list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=directory) as work, sparse_filesystem(work, 1536 * GIB) as root:
        node = Node.open(os.path.join(work, "state"), [root])
        for _ in range(rounds):
            for backend, size, ranks in (
                ("Fscrypt", 1, 1),
                ("Fscrypt", 50, 1),
                ("Fscrypt", 100, 1),
                ("Fscrypt", 100, 8),
                ("SealOnly", 1, 1),
                ("SealOnly", 50, 1),
            ):
                declared = tier(f"{root}/{backend.lower()}", backend, f"{size}Gi", ranks)
                used = 0 if backend == "SealOnly" else 64 << 20
                rows.setdefault((backend, size, ranks), []).append(one_life(node, declared, used))
        node.ledger.close()
    return [
        {
            "backend": backend,
            "gib_per_rank": size,
            "ranks": ranks,
            "provisioning_s": statistics.median(life[0] for life in lives),
            "death_to_key_gone_s": statistics.median(life[1] for life in lives),
            "death_to_erased_s": statistics.median(life[2] for life in lives),
            "death_to_erased_max_s": max(life[2] for life in lives),
        }
        for (backend, size, ranks), lives in rows.items()
    ]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="volumes: seconds, medians; an erasure must not grow with the size")
    for column in (
        "backend",
        "GiB per rank",
        "ranks",
        "provisioning",
        "death → key gone",
        "death → erased",
        "the slowest",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["backend"],
            str(row["gib_per_rank"]),
            str(row["ranks"]),
            *(
                f"{row[name]:.2f}"
                for name in ("provisioning_s", "death_to_key_gone_s", "death_to_erased_s", "death_to_erased_max_s")
            ),
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for backend in dict.fromkeys(row["backend"] for row in rows):
        small, large = (
            next(row for row in rows if (row["backend"], row["gib_per_rank"]) == (backend, size)) for size in (1, 50)
        )
        ratio = large["death_to_erased_s"] / small["death_to_erased_s"]
        console.print(f"{backend}: death → erased, 50 GiB to 1 GiB: {ratio:.2f}")
