"""A damaged, missing or old ledger is an error, never an empty one and never another truth; a rebuild says so."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ledger_samples
from kvtier_api.errors import InvalidResource, KvtierError, LedgerError, VerificationFailed
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger, LedgerDamaged, LedgerMissing
from kvtier_node.receipts import Technique, export_chain, verify_chain
from ledger_samples import S, draft, live, row


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A state directory with a closed ledger: three ended volumes, one in use."""
    state_dir = tmp_path / "state"
    identity = NodeIdentity.load_or_create(state_dir)
    with Ledger.open(state_dir) as ledger:
        for _ in range(3):
            live(ledger, identity)
        ledger.plan(row("kvv-" + "a" * 20))
        ledger.advance("kvv-" + "a" * 20, S.PROVISIONING)
    return state_dir


def killed(state_dir: Path) -> None:
    """Use the ledger in a process that is killed after one life and two arrows of another: its log stays behind."""
    command = [sys.executable, "-B", ledger_samples.__file__, str(state_dir), "0", "9"]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def sql(*statements: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        for statement in statements:
            connection.execute(statement)
        connection.close()

    return apply


def garbage_in(table: str) -> Callable[[Path], None]:
    """The first page of a table that opening itself reads no row of."""

    def apply(path: Path) -> None:
        connection = sqlite3.connect(path)
        (page,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
        connection.close()
        with path.open("r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(b"\xa5" * 4096)

    return apply


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": rewrite(lambda _: b""),
    "one byte": rewrite(lambda content: content[:1]),
    "half": rewrite(lambda content: content[: len(content) // 2]),
    "first page only": rewrite(lambda content: content[:4096]),
    "garbage header": rewrite(lambda content: os.urandom(100) + content[100:]),
    "garbage": rewrite(lambda content: os.urandom(len(content))),
    "zeros": rewrite(lambda content: bytes(len(content))),
    "text": rewrite(lambda _: b"not a database\n" * 1000),
    "a page of the transitions": garbage_in("transitions"),
    "a page of the requests": garbage_in("requests"),
    "a page of an index": garbage_in("live_places"),
    "another application": sql("PRAGMA application_id = 1"),
    "newer version": sql("PRAGMA user_version = 2"),
    "a table is gone": sql("DROP TABLE requests"),
    "a table too many": sql("CREATE TABLE extra (x)"),
    "the place index is gone": sql("DROP INDEX live_places"),
    "the commits are gone": sql("DELETE FROM meta WHERE key = 'commits'"),
    "a trigger that rewrites": sql(
        "CREATE TRIGGER t AFTER UPDATE ON volumes BEGIN UPDATE volumes SET state = 'Ready'; END"
    ),
    "an older copy": sql("UPDATE meta SET value = '3' WHERE key = 'commits'"),
    "the last receipt is gone": sql("DELETE FROM receipts WHERE seq = 3"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("create", [True, False])
def test_a_damaged_ledger_is_named_and_never_replaced_by_opening(used: Path, name: str, create: bool) -> None:
    DAMAGE[name](used / "ledger.db")
    content = (used / "ledger.db").read_bytes()
    with pytest.raises(LedgerDamaged):
        Ledger.open(used, create=create)
    assert (used / "ledger.db").read_bytes() == content


@pytest.mark.parametrize("name", DAMAGE)
def test_a_rebuild_says_so_keeps_the_evidence_and_the_chain(used: Path, name: str) -> None:
    DAMAGE[name](used / "ledger.db")
    content = (used / "ledger.db").read_bytes()
    identity = NodeIdentity.load_or_create(used)
    with Ledger.create_fresh(used, f"damaged: {name}", public_key=identity.public_key) as ledger:
        rebuilt = ledger.rebuilt
        assert rebuilt is not None
        assert rebuilt[1] == f"damaged: {name}"
        assert ledger.volumes() == []
        assert ledger.head().count == 3
        ledger.adopt(row("kvv-" + "a" * 20, state=S.ERASING, reason="found on the node"))
        ledger.finish("kvv-" + "a" * 20, draft("kvv-" + "a" * 20), identity)
        assert verify_chain(export_chain(ledger, identity), public_key=identity.public_key).ok
    kept = list(used.glob("ledger.db.damaged-*"))
    assert content in [path.read_bytes() for path in kept]
    with Ledger.open(used, create=False) as ledger:
        assert ledger.rebuilt == rebuilt
        assert ledger.head().count == 4


ROW_DAMAGE = {
    "a state": "UPDATE volumes SET state = 'Planned' WHERE state = 'Provisioning'",
    "no state at all": "UPDATE volumes SET state = 'Nonsense' WHERE state = 'Provisioning'",
    "a place": "UPDATE volumes SET place = '/etc' WHERE state = 'Provisioning'",
    "facts": "UPDATE volumes SET facts = '{' WHERE state = 'Provisioning'",
    "a transition": "UPDATE transitions SET after = 'Nonsense' WHERE seq = 2",
    "a receipt": "UPDATE receipts SET body = replace(body, 'Crash', 'Exit') WHERE seq = 2",
    "a receipt and its hash": "UPDATE receipts SET body = replace(body, 'Crash', 'Exit'), hash = '00' WHERE seq = 1",
    "a receipt in the middle": "DELETE FROM receipts WHERE seq = 2",
}


@pytest.mark.parametrize("name", ROW_DAMAGE)
def test_a_changed_row_is_damage_and_not_another_state(used: Path, name: str) -> None:
    sql(ROW_DAMAGE[name])(used / "ledger.db")

    def use() -> None:
        with Ledger.open(used, create=False) as ledger:
            ledger.check()

    with pytest.raises(LedgerDamaged):
        use()
    with Ledger.create_fresh(used, "rows") as ledger:
        ledger.check()
        assert ledger.rebuilt is not None
        assert ledger.head().count == 3


def test_no_flipped_page_changes_what_the_ledger_says(used: Path) -> None:
    with Ledger.open(used, create=False) as ledger:
        truth = (ledger.volumes(), ledger.transitions(), ledger.receipts())
    content = (used / "ledger.db").read_bytes()
    seen = 0
    for page in range(len(content) // 4096):
        for offset in (0, 3, 9, 700, 2900, 3500, 3900, 4095):
            position = page * 4096 + offset
            changed = bytearray(content)
            changed[position] ^= 0xFF
            (used / "ledger.db").write_bytes(changed)
            try:
                with Ledger.open(used, create=False) as ledger:
                    ledger.check()
                    volumes, _, receipts = ledger.volumes(), ledger.transitions(), ledger.receipts()
            except LedgerError:
                seen += 1
                continue
            assert (volumes, receipts) == (truth[0], truth[2]), f"byte {position}"
    assert seen > 20


def test_a_create_fresh_beside_a_sound_ledger_changes_nothing(used: Path) -> None:
    # Two processes see the damage; the slower one must not throw away what the faster one adopted.
    (used / "ledger.db").write_bytes(b"")
    with Ledger.create_fresh(used, "first") as first:
        first.adopt(row("kvv-" + "a" * 20, state=S.IN_USE, reason="found"))
        with Ledger.create_fresh(used, "second") as second:
            assert second.rebuilt == first.rebuilt
            assert second.get("kvv-" + "a" * 20).state is S.IN_USE


def test_an_open_ledger_goes_on_in_the_rebuilt_one(used: Path) -> None:
    with Ledger.open(used, create=False) as before:
        other = sqlite3.connect(used / "ledger.db", isolation_level=None)
        other.execute("UPDATE volumes SET digest = 'x'")
        other.close()
        with pytest.raises(LedgerDamaged):
            before.volumes()
        with Ledger.create_fresh(used, "digest") as after:
            after.adopt(row("kvv-" + "b" * 20, state=S.READY, reason="found"))
        assert before.rebuilt is not None
        before.advance("kvv-" + "b" * 20, S.IN_USE)
        with Ledger.open(used, create=False) as after:
            assert after.get("kvv-" + "b" * 20).state is S.IN_USE


def test_missing_is_not_damaged_and_only_a_first_start_creates(tmp_path: Path) -> None:
    with pytest.raises(KvtierError, match="does not exist"):
        Ledger.open(tmp_path / "none", create=False)
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(LedgerMissing):
        Ledger.open(tmp_path / "empty", create=False)
    with Ledger.open(tmp_path / "empty") as ledger:
        assert ledger.rebuilt is None


@pytest.mark.parametrize("traces", [["ledger.mark"], ["receipts.jsonl"], ["ledger.db-wal"], ["ledger.db.damaged-x"]])
def test_a_ledger_that_was_removed_is_not_made_anew_by_opening(tmp_path: Path, traces: list[str]) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    for name in traces:
        (tmp_path / "s" / name).touch(mode=0o600)
        (tmp_path / "s" / name).write_bytes(b"x")
    with pytest.raises(LedgerMissing, match=traces[0]):
        Ledger.open(tmp_path / "s")
    assert not (tmp_path / "s" / "ledger.db").exists()
    with Ledger.create_fresh(tmp_path / "s", "removed") as ledger:
        assert ledger.rebuilt is not None


def test_a_log_lost_after_a_kill_is_noticed(used: Path) -> None:
    killed(used)
    (used / "ledger.db-wal").unlink()
    (used / "ledger.db-shm").unlink()
    with pytest.raises(LedgerDamaged, match="has lost commits"):
        Ledger.open(used)
    with Ledger.create_fresh(used, "the log is gone") as ledger:
        assert ledger.head().count == 4
        assert ledger.mirror_problem is None


def test_an_old_copy_put_back_is_noticed_by_the_mirror_alone(used: Path, tmp_path: Path) -> None:
    shutil.copy(used / "ledger.db", tmp_path / "old")
    with Ledger.open(used) as ledger:
        live(ledger, NodeIdentity.load_or_create(used))
    shutil.copy(tmp_path / "old", used / "ledger.db")
    (used / "ledger.mark").unlink()
    with pytest.raises(LedgerDamaged, match="has lost commits: 3 receipts are here, 4 were written"):
        Ledger.open(used)


@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "ledger.db-shm"])
def test_a_file_removed_under_an_open_ledger_stops_it(used: Path, name: str) -> None:
    with Ledger.open(used) as ledger:
        (used / name).unlink()
        with pytest.raises((LedgerMissing, LedgerDamaged)):
            ledger.plan(row())
        with pytest.raises((LedgerMissing, LedgerDamaged)):
            ledger.volumes()


@pytest.mark.parametrize("torn", [b"{", b'{"backend":"Fscrypt"', b"\x00" * 512])
def test_a_torn_line_at_the_mirrors_end_is_cut_off(used: Path, torn: bytes) -> None:
    whole = (used / "receipts.jsonl").read_bytes()
    (used / "receipts.jsonl").write_bytes(whole + torn)
    with Ledger.open(used) as ledger:
        assert (used / "receipts.jsonl").read_bytes() == whole
        live(ledger, NodeIdentity.load_or_create(used))
        assert (used / "receipts.jsonl").read_bytes().splitlines() == ledger.receipt_lines()


@pytest.mark.parametrize("lines", [0, 1, 2])
def test_lines_that_the_mirror_lacks_are_appended_at_open(used: Path, lines: int) -> None:
    whole = (used / "receipts.jsonl").read_bytes()
    (used / "receipts.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))
    Ledger.open(used).close()
    assert (used / "receipts.jsonl").read_bytes() == whole


def test_a_mirror_of_another_chain_is_kept_aside_and_written_anew(used: Path, tmp_path: Path) -> None:
    whole = (used / "receipts.jsonl").read_bytes()
    with Ledger.open(tmp_path / "other") as other:
        live(other, NodeIdentity.load_or_create(tmp_path / "other"))
    shutil.copy(tmp_path / "other" / "receipts.jsonl", used / "receipts.jsonl")
    with Ledger.open(used) as ledger:
        assert "another chain" in str(ledger.mirror_problem)
    assert (used / "receipts.jsonl").read_bytes() == whole
    assert len(list(used.glob("receipts.jsonl.damaged-*"))) == 1


def test_a_rebuild_restores_only_what_verifies_and_names_the_rest(used: Path) -> None:
    lines = (used / "receipts.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"size_bytes":1073741824', b'"size_bytes":1073741825')
    (used / "receipts.jsonl").write_bytes(b"".join(lines))
    (used / "ledger.db").unlink()
    with Ledger.create_fresh(used, "removed") as ledger:
        assert ledger.head().count == 1
        assert "receipts after 1 lost" in str(ledger.rebuilt)
        assert b"".join(path.read_bytes() for path in used.glob("receipts.jsonl.damaged-*")) == b"".join(lines)


def test_a_mirror_signed_by_another_key_is_not_restored_under_a_pinned_one(used: Path, tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "other") as other:
        live(other, NodeIdentity.load_or_create(tmp_path / "other"))
    shutil.copy(tmp_path / "other" / "receipts.jsonl", used / "receipts.jsonl")
    (used / "ledger.db").unlink()
    with Ledger.create_fresh(used, "removed", public_key=NodeIdentity.load(used).public_key) as ledger:
        assert ledger.head().count == 0


def test_restore_receipts_takes_a_verified_chain_into_an_empty_ledger_only(used: Path, tmp_path: Path) -> None:
    lines = (used / "receipts.jsonl").read_bytes().splitlines(keepends=True)
    with Ledger.open(tmp_path / "new") as ledger:
        with pytest.raises(VerificationFailed):
            ledger.restore_receipts(lines[1:])
        assert ledger.restore_receipts(lines) == 3
        with pytest.raises(LedgerError, match="has receipts already"):
            ledger.restore_receipts(lines)


def test_a_chain_is_not_continued_under_another_key(used: Path, tmp_path: Path) -> None:
    stranger = NodeIdentity.load_or_create(tmp_path / "other")
    about_the_ledger = draft(None, technique=Technique.NOTHING, tier=None, place=None, backend=None)
    with Ledger.open(used) as ledger:
        with pytest.raises(LedgerError, match="the chain is signed by node"):
            ledger.append_receipt(about_the_ledger, stranger)
        ledger.append_receipt(about_the_ledger, NodeIdentity.load(used))
        assert ledger.head().count == 4


def test_adopting_needs_a_reason_and_is_marked(used: Path) -> None:
    with Ledger.open(used) as ledger:
        with pytest.raises(InvalidResource, match="reason"):
            ledger.adopt(row(state=S.IN_USE))
        adopted = ledger.adopt(row(state=S.IN_USE, reason="found by its place record"))
        (transition,) = ledger.transitions(adopted.volume_id)
        assert (transition.before, transition.after, transition.adopted) == (None, S.IN_USE, True)
