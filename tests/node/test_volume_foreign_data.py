"""Fence, second half: what kvtier did not put there is never adopted, never deleted, and blocks provisioning."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier_api.errors import ForeignData, KvtierError
from kvtier_node.places import Places
from kvtier_node.recovery import open_node
from node_host import Host, eventually

pytestmark = pytest.mark.root


def fingerprint(path: Path) -> dict[str, object]:
    """Names, kinds, owners, modes, times and contents of everything in a directory."""
    found: dict[str, object] = {}
    for base, directories, files in os.walk(path):
        for name in directories + files:
            full = Path(base, name)
            info = full.lstat()
            content = None
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(full.read_bytes()).hexdigest()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(full)
            found[str(full)] = (info.st_ino, info.st_mode, info.st_uid, info.st_mtime_ns, info.st_size, content)
    return found


def a_file(tier: Path, host: Host) -> None:
    (tier / "notes.txt").write_text("somebody's")


def a_hidden_file(tier: Path, host: Host) -> None:
    (tier / ".hidden").write_text("somebody's")


def a_directory(tier: Path, host: Host) -> None:
    (tier / "models").mkdir()
    (tier / "models" / "weights").write_bytes(os.urandom(100))


def a_symlink(tier: Path, host: Host) -> None:
    (host.base / "target").mkdir()
    (tier / "kvv-0123456789abcdef0123").symlink_to(host.base / "target")


def a_fifo(tier: Path, host: Host) -> None:
    os.mkfifo(tier / "kvv-0123456789abcdef0123")


def a_stock_slot_file(tier: Path, host: Host) -> None:
    (tier / "slot.rank_0").write_bytes(os.urandom(4096))


def an_unsigned_volume(tier: Path, host: Host) -> None:
    (tier / "kvv-0123456789abcdef0123" / "mnt" / "slots").mkdir(parents=True)
    (tier / "kvv-0123456789abcdef0123" / "place.json").write_text("{}\n")


def an_empty_directory_called_like_a_volume(tier: Path, host: Host) -> None:
    (tier / "kvv-0123456789abcdef0123").mkdir()


def another_nodes_volume(tier: Path, host: Host) -> None:
    other = open_node(str(host.base / "other-state"), [str(host.root)], name="node-b")
    mine, host.node = host.node, other
    live = host.provision(host.tier("SealOnly", name="other"))
    host.drop_guardians()
    host.node = mine
    other.ledger.close()
    shutil.move(live.row.place, tier / live.volume_id)
    # Now at the very path that its record names, too.
    text = (tier / live.volume_id / "place.json").read_bytes()
    (tier / live.volume_id / "place.json").write_bytes(text)


def a_copied_record(tier: Path, host: Host) -> None:
    live = host.provision(host.tier("SealOnly", name="first"))
    (tier / "kvv-0123456789abcdef0123").mkdir()
    shutil.copy(f"{live.row.place}/place.json", tier / "kvv-0123456789abcdef0123" / "place.json")
    host.erase(live)


def a_moved_place(tier: Path, host: Host) -> None:
    live = host.provision(host.tier("SealOnly", name="first"))
    host.drop_guardians()
    os.rename(live.row.place, tier / live.volume_id)


def a_record_with_one_byte_changed(tier: Path, host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    host.drop_guardians()
    record = Path(live.row.place, "place.json")
    record.write_bytes(record.read_bytes().replace(b'"ranks":2', b'"ranks":3'))


def content_in_lost_and_found(tier: Path, host: Host) -> None:
    (tier / "lost+found").mkdir()
    (tier / "lost+found" / "#12").write_text("somebody's")


KINDS: list[Callable[[Path, Host], None]] = [
    a_file, a_hidden_file, a_directory, a_symlink, a_fifo, a_stock_slot_file, an_unsigned_volume,
    an_empty_directory_called_like_a_volume, another_nodes_volume, a_copied_record, a_moved_place,
    a_record_with_one_byte_changed, content_in_lost_and_found,
]  # fmt: skip


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_foreign_data_blocks_provisioning_is_named_and_stays_byte_identical(
    host: Host, make: Callable[[Path, Host], None]
) -> None:
    directory = host.root / "demo"
    directory.mkdir()
    make(directory, host)
    before = fingerprint(directory)
    name = sorted(os.listdir(directory))[0]
    with pytest.raises(ForeignData) as caught:
        host.provision(host.tier("SealOnly"))
    assert name in caught.value.cause and caught.value.obj == str(directory)
    assert caught.value.remedy
    host.recover()
    with pytest.raises(ForeignData):
        host.provision(host.tier("SealOnly"))
    host.reopen()
    host.recover()
    assert fingerprint(directory) == before


def test_an_empty_lost_and_found_is_ext4s_own(host: Host) -> None:
    (host.root / "demo" / "lost+found").mkdir(parents=True)
    host.erase(host.provision(host.tier("SealOnly")))
    assert os.listdir(host.root / "demo") == ["lost+found"]


def test_a_foreign_directory_in_place_of_a_volume_is_not_erased_as_it(host: Host) -> None:
    """The place is moved away, and somebody's directory has its name: the erasure refuses, and touches neither."""
    live = host.provision(host.tier("SealOnly"))
    host.drop_guardians()
    place = Path(live.row.place)
    os.rename(place, host.base / "moved")
    (place / "mnt" / "slots").mkdir(parents=True)
    (place / "mnt" / "slots" / "slot.rank_0").write_bytes(b"somebody's data")
    (place / "volume.img").write_bytes(b"somebody's image")
    before = fingerprint(host.root) | fingerprint(host.base / "moved")
    [(failed, error)] = host.recover().failed
    assert failed.volume_id == live.volume_id
    assert "place.json" in str(error)
    assert fingerprint(host.root) | fingerprint(host.base / "moved") == before
    assert host.node.ledger.get(live.volume_id).state == "Erasing"


def test_the_record_of_another_volume_in_the_place_is_refused(host: Host) -> None:
    first, second = host.provision(host.tier("SealOnly")), host.provision(host.tier("SealOnly"))
    shutil.copy(f"{first.row.place}/place.json", f"{second.row.place}/place.json")
    before = fingerprint(Path(second.row.place))
    with pytest.raises(KvtierError, match="moved or copied"):
        host.erase(second)
    assert fingerprint(Path(second.row.place)) == before


@pytest.mark.parametrize("steps", [1, 2, 3], ids=["filled", "filled-and-emptied", "filled-emptied-and-gone"])
def test_a_volume_that_is_made_or_removed_between_two_looks_is_no_foreign_data(
    host: Host, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Another process takes its volume one step on after each of our looks. At the first it was half made."""
    live = host.provision(host.tier("SealOnly", size="1Mi", ranks=1))
    place, record = Path(live.row.place), Path(live.row.place, "place.json").read_bytes()
    host.erase(live)
    place.mkdir()
    entries = {"place.json": record, "volume.img": b"a slot's bytes"}
    left: list[Callable[[], object]] = [
        lambda: [(place / name).write_bytes(content) for name, content in entries.items()],
        lambda: [(place / name).unlink() for name in entries],
        place.rmdir,
    ]
    del left[steps:]
    half_made = Places._is_half_made

    def a_look_and_a_step(*args: Any) -> bool:
        found = half_made(*args)
        if left:
            left.pop(0)()
        return found

    def known() -> set[str]:
        left.pop(0)()
        return {live.volume_id}

    monkeypatch.setattr(Places, "_is_half_made", a_look_and_a_step)
    with host.node.places.tier_directory(str(place.parent), create=False) as tier:
        host.node.places.refuse_foreign(tier, known)
    assert not left


def test_volumes_of_one_tier_are_made_and_erased_side_by_side(host: Host) -> None:
    """Another process is between any two of its steps all the time: none of them looks like foreign data."""
    code = """
    import sys
    from kvtier_api.documents import load_documents
    from kvtier_api.erasure import Trigger
    from kvtier_node.erasing import erase
    from kvtier_node.provisioning import provision
    from kvtier_node.recovery import open_node
    node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
    tier = load_documents(sys.argv[3])[0]
    for _ in range(12):
        erase(node, provision(node, tier, uid=0, gid=0), Trigger.EXIT)
    """
    import subprocess
    import sys
    import textwrap

    manifest = host.tier("SealOnly", size="1Mi", ranks=1).model_dump_json(by_alias=True, exclude_none=True)
    workers = [
        host.popen(
            [sys.executable, "-c", textwrap.dedent(code), host.state, str(host.root), manifest],
            stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    eventually("all three done", lambda: all(worker.poll() is not None for worker in workers), 400)
    assert [(worker.returncode, worker.communicate()[1]) for worker in workers] == [(0, "")] * 3
    assert len(host.node.ledger.receipts()) == 36
    assert os.listdir(host.root / "demo") == []
