"""What must be true after any crash and the recovery that follows it. One function, used by every crash test."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from scenario import CANARY, below, tier

from kvtier_api.erasure import Trigger
from kvtier_api.volume import VolumeState
from kvtier_node.erasing import erase
from kvtier_node.ledger import TERMINAL
from kvtier_node.provisioning import provision
from kvtier_node.receipts import export_chain, verify_chain
from kvtier_node.recovery import open_node, recover

LIMIT_S = 120.0


def raw_hits(base: Path) -> int:
    """Canaries in every file below `base` that is not inside a mounted volume: images, slot files, ledger, records."""
    hits = 0
    device = base.stat().st_dev
    for folder, folders, names in os.walk(base):
        folders[:] = [name for name in folders if os.lstat(os.path.join(folder, name)).st_dev == device]
        for name in names:
            path = Path(folder, name)
            if path.is_file() and not path.is_symlink():
                hits += path.read_bytes().count(CANARY)
    return hits


def end_consumer(base: Path) -> None:
    """End what the scenario started, and wait for its end. By its arguments: the agent may have died before it noted the pid."""
    until = time.monotonic() + LIMIT_S
    while left := _consumers(base):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < until, f"consumers do not end: {left}"
        time.sleep(0.005)


def _consumers(base: Path) -> list[int]:
    """Processes that have not ended: a zombie has no arguments any more."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            arguments = Path("/proc", name, "cmdline").read_bytes()
            if CANARY in arguments and f"{base}/".encode() in arguments:
                found.append(int(name))
    return found


def nothing_is_attached(base: Path) -> None:
    """A child of the killed agent (mkfs, say) dies with it, and may take a moment to let go of its device."""
    until = time.monotonic() + LIMIT_S
    while left := list(below(base)):
        assert time.monotonic() < until, left
        time.sleep(0.01)


def nothing_is_left_after_recovery(base: Path, backend: str, *, encrypted: bool = True) -> None:
    """Recover in this process as a new agent would, and check every guarantee that a crash could break."""
    recorded_before_written(base)
    if encrypted:
        assert raw_hits(base) == 0, "plaintext on the disk after the crash"
    end_consumer(base)
    node = open_node(f"{base}/state", [f"{base}/tiers"], name="crash-node")
    try:
        until = time.monotonic() + LIMIT_S
        while True:
            found = recover(node)
            assert not found.failed, f"recovery failed: {[str(error) for _, error in found.failed]}"
            for volume in found.adopted:
                volume.close_watch()
                volume.guardian.close()
            if not found.adopted and not found.guarded_elsewhere:
                break
            assert time.monotonic() < until, f"still in use: {found}"
            time.sleep(0.05)
        rows = node.ledger.volumes()
        assert all(row.state in TERMINAL for row in rows), [(row.volume_id, row.state) for row in rows]
        receipts = node.ledger.receipts()
        for row in rows:
            assert [receipt for receipt in receipts if receipt.volume_id == row.volume_id], (
                f"{row.volume_id}: no receipt"
            )
        verdict = verify_chain(list(export_chain(node.ledger, node.identity)), public_key=node.identity.public_key)
        assert verdict.ok, verdict.problems
        tiers = base / "tiers" / "crash"
        assert not tiers.exists() or list(tiers.iterdir()) == [], "something of a volume is left"
        nothing_is_attached(base)
        assert raw_hits(base) == 0
        again = provision(node, tier(base, backend), uid=os.geteuid(), gid=os.getegid())
        assert not any(Path(again.slots_path, "slot.rank_0").read_bytes()), "a new consumer would read old bytes"
        erase(node, again, Trigger.EXIT)
        nothing_is_attached(base)
    finally:
        node.ledger.close()


def recorded_before_written(base: Path) -> None:
    """Record-before-write: every place on the disk is in the ledger, and not as something already over."""
    folder = base / "tiers" / "crash"
    places = [entry.name for entry in folder.iterdir()] if folder.exists() else []
    if not places:
        return
    node = open_node(f"{base}/state", [f"{base}/tiers"], name="crash-node")
    try:
        assert node.ledger.rebuilt is None, "the ledger did not survive the crash"
        for name in places:
            row = node.ledger.get(name)
            content = set(os.listdir(folder / name))
            if row.state is VolumeState.PLANNED or row.state in TERMINAL:
                assert content <= {"place.json", "consumer.json"}, (row.state, content)
            if content - {"place.json"} and not any(entry.endswith(".tmp") for entry in content):
                assert "place.json" in content, "bytes before the place record"
    finally:
        node.ledger.close()
