"""A lost or damaged ledger never leads to data in use being erased, or to leftovers being served. It is rebuilt, and says so."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_api.volume import VolumeState
from kvtier_node.guarding import look
from kvtier_node.receipts import Technique, verify_chain
from kvtier_node.recovery import open_node
from node_host import Host, eventually

pytestmark = pytest.mark.root


def deleted(state: Path) -> None:
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (state / name).unlink(missing_ok=True)


def truncated(state: Path) -> None:
    checkpoint(state)
    os.truncate(state / "ledger.db", 5000)


def empty(state: Path) -> None:
    checkpoint(state)
    os.truncate(state / "ledger.db", 0)


def garbage(state: Path) -> None:
    checkpoint(state)
    (state / "ledger.db").write_bytes(os.urandom(40_000))


def a_flipped_bit_in_a_row(state: Path) -> None:
    """SQLite finds nothing wrong with it; the row's own digest does."""
    connection = sqlite3.connect(state / "ledger.db")
    connection.execute("UPDATE volumes SET place = place || 'x'")
    connection.commit()
    connection.close()
    checkpoint(state)


def checkpoint(state: Path) -> None:
    connection = sqlite3.connect(state / "ledger.db")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


DAMAGES: list[Callable[[Path], None]] = [deleted, truncated, empty, garbage, a_flipped_bit_in_a_row]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_in_use_stays_in_use_and_left_over_is_erased_and_it_is_said(host: Host, damage: Callable[[Path], None]) -> None:
    backend = "Fscrypt" if damage in (deleted, garbage) else "SealOnly"
    used, consumer = host.in_use(host.tier(backend, name="used"))
    consumer.do("fd = os.open(f'{slots}/slot.rank_0', os.O_RDWR); os.pwrite(fd, os.urandom(4096), 0)")
    before = consumer.do("answer = os.pread(fd, 64, 0)")
    left, dead = host.in_use(host.tier(backend, name="left"))
    dead.kill()
    erased_before = host.erase(host.provision(host.tier("SealOnly", name="earlier")))
    host.drop_guardians()
    host.node.ledger.close()
    damage(Path(host.state))
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert host.node.ledger.rebuilt is not None
    assert any(event.reason == "LedgerRebuilt" for event in host.node.ledger.events())
    found = host.recover()
    assert [live.volume_id for live in found.adopted] == [used.volume_id]
    assert [receipt.volume_id for receipt in found.erased] == [left.volume_id]
    assert found.failed == []
    assert consumer.do("answer = os.pread(fd, 64, 0)") == before, "the data in use was touched"
    assert not os.path.lexists(left.row.place)
    assert erased_before.id in [receipt.id for receipt in host.node.ledger.receipts()], "the chain was restored"
    check = verify_chain(host.node.ledger.receipt_lines(), public_key=host.node.identity.public_key, require_head=False)
    assert check.ok, check.problems
    consumer.kill()
    receipt = look(host.node, found.adopted[0]).receipt
    assert receipt is not None
    if backend == "Fscrypt":
        assert receipt.technique is Technique.KEY_DESTROYED
    host.assert_nothing_left()


def test_a_kill_between_the_new_ledger_and_the_last_adoption_forgets_no_place(host: Host) -> None:
    for name in ("one", "two", "three"):
        _, consumer = host.in_use(host.tier("SealOnly", name=name))
        consumer.kill()
    host.drop_guardians()
    host.node.ledger.close()
    deleted(Path(host.state))
    done = host.python(
        """
        import os, signal, sys
        from kvtier_node.recovery import open_node
        seen = []
        def observer(transition):
            seen.append(transition)
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        open_node(sys.argv[1], [sys.argv[2]], name="node-a", observers=[observer])
        """,
        host.state,
        str(host.root),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert len(host.node.ledger.volumes()) == 2
    assert len(host.recover().erased) == 3
    assert {row.state for row in host.node.ledger.volumes()} == {VolumeState.ERASED}


def test_two_starts_at_once_on_a_lost_ledger_rebuild_it_once(host: Host) -> None:
    used, _consumer = host.in_use(host.tier("SealOnly"))
    host.drop_guardians()
    host.node.ledger.close()
    deleted(Path(host.state))
    code = """
import sys
from kvtier_node.recovery import open_node
node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
print(len(node.ledger.volumes()))
"""
    starts = [
        host.popen([sys.executable, "-c", code, host.state, str(host.root)], stdout=-1, stderr=-1, text=True)
        for _ in range(4)
    ]
    answers = [start.communicate(timeout=180) for start in starts]
    assert [start.returncode for start in starts] == [0] * 4, answers
    assert [answer[0] for answer in answers] == ["1\n"] * 4
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert [row.volume_id for row in host.node.ledger.volumes()] == [used.volume_id]
    assert len([event for event in host.node.ledger.events() if event.reason == "LedgerRebuilt"]) == 1
    host.recover()


def test_a_rebuild_waits_for_another_and_takes_what_that_one_made(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    host.drop_guardians()
    host.node.ledger.close()
    deleted(Path(host.state))
    lock = os.open(f"{host.state}/rebuild.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    start = host.popen(
        [sys.executable, "-c", "import sys; from kvtier_node.recovery import open_node; open_node(*sys.argv[1:2], sys.argv[2:])",
         host.state, str(host.root)]
    )  # fmt: skip
    waiting = re.compile(rf"-> FLOCK .* {start.pid} ")
    eventually("waits for the lock", lambda: waiting.search(Path("/proc/locks").read_text()))
    assert not os.path.exists(f"{host.state}/ledger.db")
    os.close(lock)
    assert start.wait(60) == 0
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert [row.volume_id for row in host.node.ledger.volumes()] == [live.volume_id]


def test_a_guardian_that_lives_through_the_rebuild_keeps_its_volume(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.node.ledger.close()
    deleted(Path(host.state))
    found = host.recover_elsewhere()
    assert found["elsewhere"] == [live.volume_id] and found["erased"] == [] and found["adopted"] == []
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    consumer.kill()
    receipt = eventually("erased", lambda: look(host.node, live).receipt)
    assert receipt.volume_id == live.volume_id


def test_a_place_that_is_not_in_a_sound_ledger_is_taken_in_hand(host: Host) -> None:
    """A state directory restored from a backup: the ledger is sound, and knows nothing of the newest volume."""
    host.erase(host.provision(host.tier("SealOnly", name="first")))
    host.node.ledger.close()
    checkpoint(Path(host.state))
    backup = {path: path.read_bytes() for path in Path(host.state).iterdir() if path.is_file()}
    host.reopen()
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.kill()
    host.drop_guardians()
    host.node.ledger.close()
    for path in Path(host.state).iterdir():
        if path.is_file():
            path.unlink()
    for path, content in backup.items():
        path.write_bytes(content)
        path.chmod(0o600)
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert [receipt.volume_id for receipt in host.recover().erased] == [live.volume_id]
    host.assert_nothing_left(live)


def test_copied_and_forged_records_are_not_adopted(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    host.drop_guardians()
    record = Path(live.row.place, "place.json").read_bytes()
    copy = host.root / "demo" / "kvv-0123456789abcdef0123"
    copy.mkdir()
    (copy / "place.json").write_bytes(record)
    forged = host.root / "demo" / "kvv-1123456789abcdef0123"
    forged.mkdir()
    (forged / "place.json").write_bytes(record.replace(live.volume_id.encode(), b"kvv-1123456789abcdef0123"))
    host.node.ledger.close()
    deleted(Path(host.state))
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert [row.volume_id for row in host.node.ledger.volumes()] == [live.volume_id]
    told = {event.object for event in host.node.ledger.events() if event.reason == "ForeignData"}
    assert told == {str(copy), str(forged)}
    host.recover()
    assert (copy / "place.json").exists() and (forged / "place.json").exists()
