"""Commits rows to a SQLite database (WAL, synchronous=FULL) on ext4 over dm-log-writes, with a mark after each commit.

/dev/ubdb is the disk, /dev/ubdc takes the log. args: rows. The log is complete when `recorded` is reported.
"""

from __future__ import annotations

import sqlite3

from umlguest import blockdev, channel

DISK, LOG = "/dev/ubdb", "/dev/ubdc"

blockdev.load("dm-log-writes")
device = blockdev.dm_create("logged", f"log-writes {DISK} {LOG}", blockdev.sectors(DISK))
blockdev.make_file_system("ext4", device)
blockdev.run("dmsetup", "message", "logged", "0", "mark", "formatted")
with blockdev.mounted(device) as volume:
    ledger = sqlite3.connect(volume / "ledger.db", isolation_level=None)
    ledger.execute("PRAGMA journal_mode=WAL")
    ledger.execute("PRAGMA synchronous=FULL")
    ledger.execute("CREATE TABLE arrow (number INTEGER PRIMARY KEY, text TEXT NOT NULL)")
    blockdev.run("dmsetup", "message", "logged", "0", "mark", "created")
    for number in range(channel.args["rows"]):
        ledger.execute("INSERT INTO arrow VALUES (?, ?)", (number, f"arrow {number} " + "x" * 300))
        blockdev.run("dmsetup", "message", "logged", "0", "mark", f"committed-{number}")
    ledger.close()
blockdev.run("dmsetup", "remove", "logged")
channel.report("recorded")
