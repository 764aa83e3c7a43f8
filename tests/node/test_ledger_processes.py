"""Several processes share one ledger: `kvtier node` and any number of `kvtier run`."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import ledger_samples
from kvtier_api.errors import LedgerError
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import ArrowRefused, Ledger, mirror
from kvtier_node.receipts import export_chain, verify_chain
from ledger_samples import S, draft, live, row

PROCESSES, LIVES = 4, 15


def start(state_dir: Path, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-B", ledger_samples.__file__, str(state_dir), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_processes_that_start_at_once_share_one_key_one_ledger_and_one_chain(tmp_path: Path) -> None:
    children = [start(tmp_path / "s", LIVES) for _ in range(PROCESSES)]
    for child in children:
        _, errors = child.communicate(timeout=400)
        assert child.returncode == 0, errors.decode()
    identity = NodeIdentity.load(tmp_path / "s")
    mirror = (tmp_path / "s" / "receipts.jsonl").read_bytes()
    with Ledger.open(tmp_path / "s", create=False) as ledger:
        ledger.check()
        assert len(ledger.volumes(states=[S.ERASED])) == PROCESSES * LIVES
        assert len(ledger.transitions()) == PROCESSES * LIVES * 7
        found = verify_chain(export_chain(ledger, identity), public_key=identity.public_key)
        assert (found.ok, found.count) == (True, PROCESSES * LIVES), found.problems
        assert mirror.splitlines() == ledger.receipt_lines()


def test_processes_that_are_killed_stop_no_other(tmp_path: Path) -> None:
    steady = start(tmp_path / "s", LIVES)
    for _ in range(4):
        with start(tmp_path / "s", 0) as doomed:
            assert doomed.stdout is not None
            for _ in range(20):
                doomed.stdout.readline()
            doomed.send_signal(signal.SIGKILL)
    _, errors = steady.communicate(timeout=400)
    assert steady.returncode == 0, errors.decode()
    with Ledger.open(tmp_path / "s", create=False) as ledger:
        ledger.check()
        found = verify_chain(export_chain(ledger, NodeIdentity.load(tmp_path / "s")))
        assert found.ok, found.problems
        assert found.count == len(ledger.volumes(states=[S.ERASED])) >= LIVES


def at_once(*works: object) -> list[object]:
    """Call all of them together, each in a thread; what each returned or raised."""
    gate = threading.Barrier(len(works))
    results: list[object] = [None] * len(works)

    def call(number: int, work: object) -> None:
        gate.wait()
        try:
            results[number] = work()  # type: ignore[operator]
        except LedgerError as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=item) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("shared", [True, False], ids=["one ledger", "a ledger each"])
def test_one_of_many_gets_a_place_and_one_ends_a_volume(tmp_path: Path, shared: bool) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    first = Ledger.open(tmp_path / "s")
    ledgers = [first, *(first if shared else Ledger.open(tmp_path / "s") for _ in range(5))]
    results = at_once(*(lambda ledger=ledger: ledger.plan(row(place="/srv/kv/one")) for ledger in ledgers))
    assert len([item for item in results if not isinstance(item, LedgerError)]) == 1
    (volume,) = first.volumes()
    first.advance(volume.volume_id, S.ERASING)
    ends = at_once(
        *(
            lambda ledger=ledger: ledger.finish(volume.volume_id, draft(volume.volume_id), identity)
            for ledger in ledgers
        )
    )
    assert len([item for item in ends if isinstance(item, ArrowRefused)]) == len(ledgers) - 1
    assert first.head().count == 1
    for ledger in ledgers:
        ledger.close()


def test_threads_share_one_ledger(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:

        def work() -> None:
            for _ in range(5):
                live(ledger, identity)

        assert at_once(*[work] * 6) == [None] * 6
        ledger.check()
        assert ledger.head().count == 30
        assert verify_chain(export_chain(ledger, identity)).ok


def test_the_mirror_is_written_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    append = mirror.append

    def watched(*arguments: Any) -> None:
        other = os.open(tmp_path / "s", os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            held.append(False)
        except BlockingIOError:
            held.append(True)
        finally:
            os.close(other)
        append(*arguments)

    monkeypatch.setattr(mirror, "append", watched)
    with Ledger.open(tmp_path / "s") as ledger:
        live(ledger, NodeIdentity.load_or_create(tmp_path / "s"))
    assert held == [True]
