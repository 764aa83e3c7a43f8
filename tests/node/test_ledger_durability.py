"""An arrow is on the disk before its call returns; a killed process leaves neither half an arrow nor half an end."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ledger_samples
from kvtier_api.errors import KvtierError, LedgerError
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import ARROWS, Ledger
from kvtier_node.receipts import export_chain, verify_chain
from ledger_samples import S, live
from requirements import need_tool

CHILD = [sys.executable, "-B", ledger_samples.__file__]


def check_invariants(state_dir: Path, acknowledged: list[tuple[str, str]]) -> None:
    """What must hold however the last process ended."""
    identity = NodeIdentity.load_or_create(state_dir)
    with Ledger.open(state_dir, create=not acknowledged) as ledger:
        arrows = {(item.volume_id, str(item.after)) for item in ledger.transitions()}
        assert set(acknowledged) <= arrows, "an acknowledged arrow is lost"
        ended = {item.volume_id for item in ledger.volumes(states=[S.ERASED])}
        assert ended == {item.volume_id for item in ledger.receipts()}, "an end without a receipt, or the other way"
        for volume in ledger.volumes():
            path = [item.after for item in ledger.transitions(volume.volume_id)]
            assert path[-1] is volume.state
            assert all(after in ARROWS[before] for before, after in itertools.pairwise(path))
        assert ledger.mirror_problem is None
        found = verify_chain(export_chain(ledger, identity), public_key=identity.public_key)
        assert found.ok, found.problems
        mirror = state_dir / "receipts.jsonl"
        lines = mirror.read_bytes().splitlines() if mirror.exists() else []
        assert lines == ledger.receipt_lines(), "the mirror is not caught up"
        # And it goes on.
        live(ledger, identity)


def said(output: bytes) -> list[tuple[str, str]]:
    whole = output[: output.rfind(b"\n") + 1].decode().splitlines()
    return [(line.split()[0], line.split()[1]) for line in whole]


@pytest.mark.slow
def test_sigkill_in_a_loop_loses_no_acknowledged_arrow_and_splits_no_end(tmp_path: Path) -> None:
    chance = random.Random(4)
    acknowledged: list[tuple[str, str]] = []
    for _ in range(25):
        with subprocess.Popen([*CHILD, str(tmp_path / "s"), "0"], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            output = b""
            for _line in range(chance.randint(1, 40)):
                output += child.stdout.readline()
            child.send_signal(signal.SIGKILL)
            output += child.stdout.read()
        acknowledged += said(output)
        check_invariants(tmp_path / "s", acknowledged)


def last_wal_sync_is_before(trace: str, mark: str) -> bool:
    """Between the last write to the log before `mark` and `mark` itself there is a sync of the log."""
    before = trace[: trace.index(mark)]
    written = before.rfind("ledger.db-wal>, ", 0, len(before))
    writes = [found.start() for found in re.finditer(r"pwrite64\(\d+<[^>]*ledger\.db-wal>", before)]
    syncs = [found.start() for found in re.finditer(r"(?:fdatasync|fsync)\(\d+<[^>]*ledger\.db-wal>\) += 0", before)]
    return bool(written and writes and syncs) and syncs[-1] > writes[-1]


def test_every_arrow_is_synced_before_its_call_returns(tmp_path: Path) -> None:
    strace = need_tool("strace")
    log = tmp_path / "trace"
    trace = ["-f", "-y", "-s", "64", "-e", "trace=write,pwrite64,fsync,fdatasync", "-o", str(log)]
    done = subprocess.run([strace, *trace, *CHILD, str(tmp_path / "s"), "2"], capture_output=True, check=True)
    text = log.read_text()
    arrows = said(done.stdout)
    assert len(arrows) == 14
    previous = 0
    for volume_id, state in arrows:
        mark = f'"{volume_id} {state}\\n"'
        window = text[previous : text.index(mark) + len(mark)]
        assert last_wal_sync_is_before(window, mark), f"{state}: acknowledged before the log was synced\n{window}"
        if state == "Erased":
            assert re.search(r"(fdatasync|fsync)\(\d+<[^>]*/receipts\.jsonl>\) += 0", window), "mirror not synced"
        previous = text.index(mark)


CHANGES = [
    *("pwrite64", "fdatasync", "fsync", "ftruncate", "fallocate", "fchmod", "mkdirat"),
    *("rename", "renameat", "unlink", "unlinkat", "write"),
]
PR_SET_PTRACER, PTRACER_ANY = 0x59616D61, -1


def run_injected(state_dir: Path, inject: str, log: Path) -> tuple[int, bytes, str]:
    """One life in a forked child under strace's `inject`: exit code, acknowledged arrows, the error it ended with.

    Forked, not started: there are hundreds of points, and Python's start would be most of the time.
    """
    go, out, err = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PTRACER, PTRACER_ANY, 0, 0, 0)
            for fd in (go[1], out[0], err[0]):
                os.close(fd)
            os.read(go[0], 1)
            ledger_samples.serve(str(state_dir), 1, out[1])
            code = 0
        except KvtierError as error:
            os.write(err[1], str(error).encode())
            code = 3
        except BaseException as error:
            os.write(err[1], repr(error).encode())
        finally:
            os._exit(code)
    for fd in (go[0], out[1], err[1]):
        os.close(fd)
    command = [
        need_tool("strace"),
        "-f",
        "-p",
        str(pid),
        "-e",
        f"trace={inject.split(':', maxsplit=1)[0]}",
        "-e",
        f"inject={inject}",
    ]
    with subprocess.Popen([*command, "-o", str(log)], stderr=subprocess.PIPE) as strace:
        assert strace.stderr is not None
        first = strace.stderr.readline()
        assert b"attached" in first, first
        os.write(go[1], b"x")
        with os.fdopen(out[0], "rb") as output, os.fdopen(err[0], "rb") as error:
            acknowledged, text = output.read(), error.read().decode()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        strace.stderr.read()
    os.close(go[1])
    return status, acknowledged, text


@pytest.mark.slow
@pytest.mark.parametrize("call", CHANGES)
def test_sigkill_at_every_change_from_the_first_start_to_the_first_receipt(tmp_path: Path, call: str) -> None:
    for number in range(1, 300):
        state_dir = tmp_path / f"s{number}"
        status, output, error = run_injected(state_dir, f"{call}:signal=KILL:when={number}", tmp_path / "log")
        check_invariants(state_dir, said(output))
        if status == 0:
            print(f"{call}: {number - 1} kill points")
            return
        assert status == -signal.SIGKILL, error
    pytest.fail("no end of kill points")


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    "call", ["pwrite64", "fdatasync", "fsync", "ftruncate", "fallocate", "renameat", "openat", "mkdirat"]
)
def test_an_error_at_every_change_is_reported_or_harmless(tmp_path: Path, call: str, error: str) -> None:
    log = tmp_path / "log"
    for number in range(1, 300):
        state_dir = tmp_path / f"s{number}"
        status, output, text = run_injected(state_dir, f"{call}:error={error}:when={number}", log)
        # 3: an error of kvtier's own tree; anything else that ended the child is a fault of the ledger.
        assert status in (0, 3), f"{call} number {number}: {text}"
        check_invariants(state_dir, said(output))
        if "INJECTED" not in log.read_text():
            print(f"{call}: {number - 1} points for {error}")
            return
    pytest.fail("no end of fault points")


def test_a_forked_child_cannot_use_the_parents_ledger(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "s") as ledger:
        pid = os.fork()
        if pid == 0:
            try:
                ledger.volumes()
            except LedgerError as error:
                os._exit(7 if "before a fork" in str(error) else 1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert ledger.volumes() == []
