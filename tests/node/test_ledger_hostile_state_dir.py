"""A state directory that another user could write to, swap or has prepared is refused, and nothing in it is touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_api.errors import KvtierError, NotPermitted, UnsafePath
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger
from ledger_samples import live
from requirements import need_root

OTHER = 65534


def symlink(state: Path) -> None:
    state.rename(state.with_name("real"))
    state.symlink_to("real")


def symlink_in_parents(state: Path) -> None:
    state.parent.rename(state.parent.with_name("real"))
    state.parent.symlink_to("real")


def regular_file(state: Path) -> None:
    state.rename(state.with_name("real"))
    state.write_bytes(b"")


def group_parent(state: Path) -> None:
    os.chown(state.parent, 0, OTHER)
    state.parent.chmod(0o770)


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "a symlink": symlink,
    "a symlink among its parents": symlink_in_parents,
    "a file": regular_file,
    "group-writable": lambda state: state.chmod(0o720),
    "other-writable": lambda state: state.chmod(0o702),
    "other-writable and sticky": lambda state: state.chmod(0o1777),
    "a parent that others can write": lambda state: state.parent.chmod(0o777),
}
OWNED: dict[str, Callable[[Path], None]] = {
    "another owner": lambda state: os.chown(state, OTHER, OTHER),
    "a parent of another owner": lambda state: os.chown(state.parent, OTHER, OTHER),
    "a parent that a foreign group can write": group_parent,
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "parent" / "state"
    identity = NodeIdentity.load_or_create(state)
    with Ledger.open(state) as ledger:
        live(ledger, identity)
    return state


def refuses(state: Path, error: type[KvtierError] = UnsafePath) -> None:
    real = state.resolve()
    before = {item.name: item.lstat() for item in real.iterdir()} if real.is_dir() else {}
    for work in (
        lambda: Ledger.open(state),
        lambda: Ledger.open(state, create=False),
        lambda: Ledger.create_fresh(state, "hostile"),
        lambda: NodeIdentity.load_or_create(state),
    ):
        with pytest.raises(error):
            work()
    after = {item.name: item.lstat() for item in real.iterdir()} if real.is_dir() else {}
    changed = [name for name in before if before[name][:7] != after[name][:7]]
    assert (before.keys(), changed) == (after.keys(), [])


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_directory_that_leads_elsewhere_or_is_open_to_others_is_refused(state: Path, name: str) -> None:
    DIRECTORIES[name](state)
    refuses(state)


@pytest.mark.root
@pytest.mark.parametrize("name", OWNED)
def test_a_directory_of_another_user_is_refused(state: Path, name: str) -> None:
    need_root()
    OWNED[name](state)
    refuses(state)


def replaced(name: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(state: Path) -> None:
        (state / name).unlink(missing_ok=True)
        make(state / name)

    return apply


def outside(path: Path) -> Path:
    target = path.parent.parent / "outside"
    target.write_bytes(b"precious")
    target.chmod(0o600)
    return target


FILES: dict[str, Callable[[Path], object]] = {
    "a symlink": lambda path: path.symlink_to(outside(path)),
    "a dangling symlink": lambda path: path.symlink_to("/nonexistent/x"),
    "a hard link": lambda path: path.hardlink_to(outside(path)),
    "a FIFO": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "readable by others": lambda path: (path.touch(), path.chmod(0o644)),
    "writable by others": lambda path: (path.touch(), path.chmod(0o606)),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("name", ["ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.mark", "receipts.jsonl"])
def test_a_prepared_file_in_the_ledgers_place_is_refused(state: Path, name: str, kind: str) -> None:
    replaced(name, FILES[kind])(state)
    with pytest.raises(UnsafePath):
        Ledger.open(state)
    if (state.parent / "outside").exists():
        assert (state.parent / "outside").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", FILES)
def test_a_prepared_file_in_the_keys_place_is_refused(state: Path, kind: str) -> None:
    replaced("node.key", FILES[kind])(state)
    with pytest.raises(UnsafePath):
        NodeIdentity.load_or_create(state)


@pytest.mark.root
@pytest.mark.parametrize("name", ["ledger.db", "receipts.jsonl", "node.key"])
def test_a_file_of_another_user_is_refused(state: Path, name: str) -> None:
    need_root()
    os.chown(state / name, OTHER, OTHER)
    with pytest.raises(UnsafePath, match="owned by uid 65534"):
        NodeIdentity.load_or_create(state) if name == "node.key" else Ledger.open(state)


def test_everything_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        identity = NodeIdentity.load_or_create(tmp_path / "a" / "s")
        with Ledger.open(tmp_path / "a" / "s") as ledger:
            live(ledger, identity)
            modes = {item.name: stat.S_IMODE(item.stat().st_mode) for item in (tmp_path / "a" / "s").iterdir()}
    finally:
        os.umask(before)
    assert set(modes.values()) == {0o600}, modes
    assert {"ledger.db", "ledger.db-wal", "ledger.db-shm", "receipts.jsonl", "node.key"} <= modes.keys()
    assert stat.S_IMODE((tmp_path / "a" / "s").stat().st_mode) == 0o700


def test_a_readable_directory_is_made_private(state: Path) -> None:
    state.chmod(0o755)
    Ledger.open(state).close()
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_the_root_directory_is_no_state_directory() -> None:
    with pytest.raises(NotPermitted):
        Ledger.open("/")
