"""A full disk under the state directory: no new volume, but every erasure can still be recorded."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import InsufficientSpace, KvtierError, LedgerError
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger
from kvtier_node.receipts import export_chain, verify_chain
from ledger_samples import S, draft, live, row
from requirements import need_root, need_tool

pytestmark = pytest.mark.root


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """An 8 MiB ext4 of its own."""
    need_root()
    image, mount = tmp_path / "image", tmp_path / "mnt"
    image.write_bytes(b"")
    with image.open("r+b") as file:
        file.truncate(8 << 20)
    subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", "^has_journal", "-m", "0", image], check=True)
    mount.mkdir()
    subprocess.run([need_tool("mount"), "-o", "loop", image, mount], check=True)
    try:
        mount.chmod(0o755)
        yield mount
    finally:
        subprocess.run([need_tool("umount"), "-l", mount], check=True)


def fill(mount: Path) -> Path:
    ballast = mount / "ballast"
    with ballast.open("ab", buffering=0) as file:
        size = 1 << 16
        while size >= 512:
            try:
                file.write(b"\xff" * size)
            except OSError:
                size //= 2
    return ballast


def test_an_erasure_is_recorded_on_a_full_disk_and_a_new_volume_refused(small: Path) -> None:
    identity = NodeIdentity.load_or_create(small / "s")
    with Ledger.open(small / "s") as ledger:
        volumes = [ledger.adopt(row(state=S.IN_USE, reason="found")).volume_id for _ in range(5)]
        ballast = fill(small)
        # Until nothing that is not essential can be written any more.
        with pytest.raises(LedgerError, match="the disk under the state directory is full"):
            for _ in range(20_000):
                ledger.add_event("Normal", "Fill", "x", "y" * 4000)
        for volume_id in volumes:
            ledger.advance(volume_id, S.DYING, reason="killed")
            ledger.advance(volume_id, S.ERASING)
            ledger.finish(volume_id, draft(volume_id), identity)
        fill(small)
        with pytest.raises(InsufficientSpace, match="no room to record an erasure"):
            ledger.plan(row())
        ballast.unlink()
        live(ledger, identity)
        assert ledger.mirror_problem is None
        ledger.check()
        assert verify_chain(export_chain(ledger, identity)).count == 6


def test_a_ledger_opens_on_a_full_disk_to_record_what_recovery_erases(small: Path) -> None:
    identity = NodeIdentity.load_or_create(small / "s")
    with Ledger.open(small / "s") as ledger:
        volume_id = ledger.adopt(row(state=S.IN_USE, reason="found")).volume_id
    fill(small)
    with Ledger.open(small / "s") as ledger:
        ledger.advance(volume_id, S.ERASING)
        ledger.finish(volume_id, draft(volume_id), identity)
        assert ledger.get(volume_id).state is S.ERASED


def test_a_first_start_on_a_full_disk_leaves_nothing_half_made(small: Path) -> None:
    (small / "s").mkdir(mode=0o700)
    ballast = fill(small)
    with pytest.raises(KvtierError):
        NodeIdentity.load_or_create(small / "s")
    with pytest.raises(KvtierError):
        Ledger.open(small / "s")
    ballast.unlink()
    identity = NodeIdentity.load_or_create(small / "s")
    with Ledger.open(small / "s") as ledger:
        live(ledger, identity)
