"""Throughput of the slot store beside fio: same file, same region, same block sizes, same depth, O_DIRECT, one run.

    python -m bench --only store [--dir DIRECTORY] [-o table|json]

Rounds are interleaved (fio, AES, sealed, unsealed, fio, …), because a disk wanders; medians and the ratio of medians are
printed. fio runs with io_uring and with psync threads; the better of its two medians is the one compared with. The
store's depth is its number of I/O threads. The store moves adjacent blocks of a job with one system call (up to 4 MiB
in a write, 1 MiB in a read), which is its design; fio moves one block with each, and the column `fio 1 MiB` shows fio
(io_uring) with longer requests. The store's memory asks for huge pages, which fio 3.33 cannot without a hugetlbfs.

CPU seconds are user and system time per 10**9 bytes: of the whole process for the store, the caller's thread included;
fio's are its own report's, which leave out its start (within a tenth of what the kernel counts for its process). `AES`
is the cipher alone on one thread, from and to the same memory: what no sealed store on this library can go below.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table

from kvtier_engine import SlotStore, StoreConfig
from kvtier_engine.staging import aligned_memory

MIB: Final = 1 << 20
DEPTHS: Final = {64 << 10: 8, MIB: 4, 4 * MIB: 4}
OPERATIONS: Final = ("write", "read")
_SOURCE_BYTES: Final = 64 * MIB
_JOB_BYTES: Final = 4 * MIB
_TENANT: Final = b"bench"


@dataclass
class Samples:
    """Rates in MiB/s and CPU seconds per 10**9 bytes, one of each per round."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(self, rate: float, cpu: float) -> None:
        self.rates.append(rate)
        self.cpu.append(cpu)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(self.cpu)


def fio(path: str, operation: str, *, block: int, depth: int, total: int, engine: str) -> tuple[float, float]:
    """(MiB/s, CPU seconds per GB) of one fio job over the first `total` bytes of the file."""
    if engine == "psync":
        part = total // depth // block * block
        load = [f"--numjobs={depth}", "--thread", "--iodepth=1", f"--size={part}", f"--offset_increment={part}"]
    else:
        load = [f"--iodepth={depth}", f"--size={total}"]
    command = ["fio", "--name=bench", f"--filename={path}", f"--rw={operation}", f"--bs={block}", "--direct=1"]
    command += [f"--ioengine={engine}", *load, "--group_reporting", "--output-format=json", "--fallocate=none"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    job = json.loads(done.stdout)["jobs"][0]
    figures = job[operation]
    # usr_cpu and sys_cpu are percentages of the time of all threads of the group together.
    threads = depth if engine == "psync" else 1
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * figures["runtime"] / 1000 * threads
    return figures["bw_bytes"] / MIB, cpu_s / (figures["io_bytes"] / 1e9)


class StoreUnderTest:
    """A store over the file, and a pool of page-aligned blocks that stands for pinned memory."""

    def __init__(self, path: str, *, block: int, depth: int, total: int, sealed: bool, source: mmap.mmap) -> None:
        self.blocks = total // block
        self.block = block
        whole = memoryview(source)
        pool = [whole[start : start + block] for start in range(0, len(whole), block)]
        per_job = max(1, _JOB_BYTES // block)
        # Keys and buffers are the caller's own, made before the clock runs, as fio's one buffer is.
        items = [(number.to_bytes(32, "big"), [pool[number % len(pool)]]) for number in range(self.blocks)]
        self.jobs = [items[first : first + per_job] for first in range(0, self.blocks, per_job)]
        self.window = max(2, 2 * depth * MIB // _JOB_BYTES) if block < MIB else 3 * depth
        # Jobs finish in any order: the caller sleeps until one more has, and spends nothing on asking which.
        self.finished: SimpleQueue[None] = SimpleQueue()
        self.store = SlotStore(
            StoreConfig(
                files=(path,),
                ranks=(0,),
                slot_size_bytes=block,
                slots=self.blocks,
                tier_uid="bench",
                volume_id="bench",
                salt_policy="Required",
                max_age_s=24 * 3600,
                seal_slots=sealed,
                io_depth=depth,
                harden_process=False,
                on_finished=functools.partial(self.finished.put, None),
            )
        )

    def run(self, operation: str) -> tuple[float, float]:
        """Move every block once, in jobs, at most `window` of them under way."""
        store = self.store
        if operation == "write":
            store.erase(_TENANT)
        submit = store.submit_store if operation == "write" else store.submit_load
        cpu, begin, moved = time.process_time(), time.perf_counter(), 0
        for job, items in enumerate(self.jobs):
            if job >= self.window:
                self.finished.get()
            submit(job, items, tenant=_TENANT)
        for _ in self.jobs[-self.window :]:
            self.finished.get()
        for result in store.finished():
            moved += result.transferred_bytes
            if not result.success:
                raise SystemExit(f"a job failed: {result}")
        elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
        if moved != self.blocks * self.block:
            raise SystemExit(f"{moved} bytes were moved of {self.blocks * self.block}")
        return moved / elapsed / MIB, cpu / (moved / 1e9)


def cipher_alone(operation: str, *, block: int, total: int, source: mmap.mmap) -> tuple[float, float]:
    """(MiB/s, CPU seconds per GB) of AES-256-GCM over `total` bytes of the same memory, in calls of one block."""
    whole, sealed = memoryview(source), memoryview(aligned_memory(block + 4096))[: block + 16]
    pool = [whole[start : start + block] for start in range(0, len(whole), block)]
    key = AESGCM(os.urandom(32))
    nonces = [number.to_bytes(12, "big") for number in range(total // block)]
    key.encrypt_into(nonces[0], pool[0], b"", sealed)
    cpu, begin = time.process_time(), time.perf_counter()
    for number, nonce in enumerate(nonces):
        if operation == "write":
            key.encrypt_into(nonce, pool[number % len(pool)], b"", sealed)
        else:
            key.decrypt_into(nonces[0], sealed, b"", pool[number % len(pool)])
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return total / elapsed / MIB, cpu / (total / 1e9)


_FULL_INDEX: Final = """
import os, sys
from kvtier_engine.index import SlotIndex
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
policy, ranks, slots = sys.argv[1], int(sys.argv[2]), 200_000
tags, before = [[bytes(16)]] * ranks, resident()
index = SlotIndex(slots=slots, ranks=ranks, policy=policy)
for first in range(0, (2 if policy == "arc" else 1) * slots, 1000):
    for slot in index.allocate(1000):
        index.describe(slot, 1, key_number=1, counter=first)
        index.commit(slot, [os.urandom(16)], tags)
print((resident() - before) / slots)
"""


def index_bytes_per_slot(policy: str, ranks: int) -> float:
    """Resident memory of a full index (with ARC: and full ghost lists) in a process of its own, divided by its slots."""
    command = [sys.executable, "-c", _FULL_INDEX, policy, str(ranks)]
    return float(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def _row(operation: str, block: int, depth: int, samples: dict[tuple[str, str], Samples]) -> dict[str, Any]:
    engine = max(("io_uring", "psync"), key=lambda name: samples[operation, name].rate)
    best = samples[operation, engine]
    row: dict[str, Any] = {
        "operation": {"write": "store", "read": "load"}[operation],
        "block_bytes": block,
        "depth": depth,
        "fio_engine": engine,
        "fio_mib_s": best.rate,
        "fio_cpu_s_per_gb": best.cpu_s_per_gb,
        "aes_cpu_s_per_gb": samples[operation, "AES"].cpu_s_per_gb,
    }
    if block < MIB:
        row["fio_same_size_mib_s"] = samples[operation, "io_uring 1 MiB"].rate
    for name in ("sealed", "unsealed"):
        mine = samples[operation, name]
        row |= {
            f"{name}_mib_s": mine.rate,
            f"{name}_ratio": mine.rate / best.rate,
            f"{name}_cpu_s_per_gb": mine.cpu_s_per_gb,
        }
    row["rounds"] = {
        name: [round(rate) for rate in some.rates] for (what, name), some in samples.items() if what == operation
    }
    return row


def measure(path: str, *, total: int, rounds: int, say: Any) -> list[dict[str, Any]]:
    source = aligned_memory(_SOURCE_BYTES)
    for start in range(0, _SOURCE_BYTES, MIB):
        source[start : start + MIB] = os.urandom(MIB)
    fio(path, "write", block=4 * MIB, depth=4, total=total, engine="io_uring")  # no unwritten extents in what follows
    rows = []
    for block, depth in DEPTHS.items():
        samples: dict[tuple[str, str], Samples] = {}
        stores = {
            name: StoreUnderTest(path, block=block, depth=depth, total=total, sealed=name == "sealed", source=source)
            for name in ("sealed", "unsealed")
        }
        for number in range(rounds):
            say(f"block {block >> 10} KiB, round {number + 1} of {rounds}")
            for engine in ("io_uring", "psync"):
                for operation in OPERATIONS:
                    figure = fio(path, operation, block=block, depth=depth, total=total, engine=engine)
                    samples.setdefault((operation, engine), Samples()).add(*figure)
                    if block < MIB and engine == "io_uring":
                        figure = fio(path, operation, block=MIB, depth=depth, total=total, engine=engine)
                        samples.setdefault((operation, f"{engine} 1 MiB"), Samples()).add(*figure)
            for operation in OPERATIONS:
                figure = cipher_alone(operation, block=block, total=total, source=source)
                samples.setdefault((operation, "AES"), Samples()).add(*figure)
            for name, under_test in stores.items():
                # Both stores use the file's first bytes, so each reads what it has just written.
                for operation in OPERATIONS:
                    samples.setdefault((operation, name), Samples()).add(*under_test.run(operation))
        for under_test in stores.values():
            under_test.store.close()
        rows += [_row(operation, block, depth, samples) for operation in OPERATIONS]
    return rows


def show(report: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="slot store and fio, O_DIRECT, one file: MiB/s, medians of interleaved rounds; CPU in s per GB")
    for column in (
        "",
        "KiB",
        "depth",
        "fio",
        "fio 1 MiB",
        "sealed",
        "ratio",
        "plain",
        "ratio",
        "CPU fio",
        "AES",
        "sealed",
        "plain",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["throughput"]:
        table.add_row(
            row["operation"],
            f"{row['block_bytes'] >> 10}",
            str(row["depth"]),
            f"{row['fio_mib_s']:.0f} {row['fio_engine']}",
            f"{row['fio_same_size_mib_s']:.0f}" if "fio_same_size_mib_s" in row else "",
            f"{row['sealed_mib_s']:.0f}",
            f"{row['sealed_ratio']:.2f}",
            f"{row['unsealed_mib_s']:.0f}",
            f"{row['unsealed_ratio']:.2f}",
            *(f"{row[f'{who}_cpu_s_per_gb']:.2f}" for who in ("fio", "aes", "sealed", "unsealed")),
        )
    console.print(table)
    for name, size in report["index_bytes_per_slot"].items():
        console.print(f"index, {name}: {size:.0f} bytes per slot, {size:.0f} MB per million slots")


def run(directory: str | None, *, size_mib: int, rounds: int) -> dict[str, Any]:
    """The whole measurement below `directory` (default: the system's temporary folder); a report as plain data."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed (Debian: apt-get install fio)")
    index = {
        f"{policy}, {ranks} rank{'s' if ranks > 1 else ''}": index_bytes_per_slot(policy, ranks)
        for ranks in (1, 8)
        for policy in ("lru", "arc")
    }
    total = size_mib * MIB
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvtier-bench-") as work:
        path = os.path.join(work, "slot.rank_0")
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, total)
        report: dict[str, Any] = {
            "size_bytes": total,
            "rounds": rounds,
            "throughput": measure(
                path, total=total, rounds=rounds, say=lambda text: print(text, file=sys.stderr, flush=True)
            ),
        }
    report["index_bytes_per_slot"] = index
    return report
