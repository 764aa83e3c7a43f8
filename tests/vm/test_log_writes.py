"""A SQLite ledger (WAL, synchronous=FULL) survives a cut at every FLUSH and FUA that the disk ever saw."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vm


def test_the_ledger_opens_with_every_acknowledged_row_at_each_barrier(boot, make_disk):
    rows = 40
    disk, log = make_disk(32), make_disk(128, "log.img")
    machine = boot("ledger_recorder.py", disks=[disk, log], args={"rows": rows})
    machine.wait_for("recorded")
    machine.wait_off()

    machine = boot("ledger_replayer.py", disks=[log], args={"disk_bytes": disk.stat().st_size})
    machine.wait_for("replayed", timeout_s=500)
    machine.wait_off()
    states = [event.fields for event in machine.events if event.tag == "state"]
    print(f"{len(states)} barriers replayed")
    assert len(states) > rows
    assert states[-1]["acknowledged"] == rows
    for state in states:
        assert state["check"] == "ok"
        assert state["rows"] == list(range(len(state["rows"])))  # none is missing in between
        assert state["acknowledged"] <= len(state["rows"]) <= state["acknowledged"] + 1
