"""Opens the ledger in every disk that a cut could have left while `ledger_recorder` ran, as the next boot would.

/dev/ubdb holds the log. args: disk_bytes. Reports one `state` per barrier after the mark `created`.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from umlguest import channel, replay


def rows(volume: Path) -> tuple[str, list[int]]:
    ledger = sqlite3.connect(volume / "ledger.db", isolation_level=None)
    try:
        check = str(ledger.execute("PRAGMA integrity_check").fetchone()[0])
        found = [number for (number,) in ledger.execute("SELECT number FROM arrow ORDER BY number")]
    finally:
        ledger.close()
    return check, found


for state in replay.states("/dev/ubdb", channel.args["disk_bytes"], first_mark="created"):
    with state.mounted() as volume:
        check, found = rows(volume)
    acknowledged = sum(mark.startswith("committed-") for mark in state.marks)
    channel.report("state", entry=state.entry.number, acknowledged=acknowledged, check=check, rows=found)
channel.report("replayed")
