"""What a power cut does to a disk. If these do not hold, no other test in this folder proves anything."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vm


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_cut_keeps_what_was_fsynced_and_loses_what_was_not(boot, make_disk, kind):
    disk = make_disk(400 if kind == "xfs" else 64)
    machine = boot("disk_truths.py", disks=[disk], args={"kind": kind, "device": "plain", "seen": "write"})
    written = machine.wait_for("written")
    assert written["here"] == ["before", "durable", "loose"]  # before the cut all three can be read
    machine.cut()

    machine = boot("disk_truths.py", disks=[disk], args={"kind": kind, "seen": "read"})
    files = machine.wait_for("found")["files"]
    machine.wait_off()
    assert files.get("durable") == "fsynced"
    # The name may have come with the journal; the bytes cannot have.
    assert files.get("loose", "") == ""


def test_a_disk_that_lies_about_flushes_loses_even_what_was_fsynced(boot, make_disk):
    disk = make_disk(64)
    machine = boot("disk_truths.py", disks=[disk], args={"kind": "ext4", "device": "lying", "seen": "write"})
    written = machine.wait_for("written")
    assert written["here"] == ["before", "durable", "loose"]
    machine.cut()

    machine = boot("disk_truths.py", disks=[disk], args={"kind": "ext4", "seen": "read"})
    files = machine.wait_for("found")["files"]
    machine.wait_off()
    assert files == {"before": "before the lie"}
