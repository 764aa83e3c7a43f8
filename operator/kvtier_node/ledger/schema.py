"""The ledger's tables (docs/formats.md, "Ledger"), and the check that a file has exactly these."""

from __future__ import annotations

import sqlite3
from typing import Final

from kvtier_node.ledger.rows import LedgerDamaged

__all__ = ["APPLICATION_ID", "EVENT_LIMIT", "SCHEMA_VERSION", "check_schema", "create_schema"]

APPLICATION_ID: Final = 0x6B767431  # "kvt1", shown by file(1)
SCHEMA_VERSION: Final = 1
EVENT_LIMIT: Final = 10_000

_TABLES: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE volumes (
        volume_id TEXT PRIMARY KEY NOT NULL,
        tier_uid TEXT NOT NULL, tier_namespace TEXT NOT NULL, tier_name TEXT NOT NULL,
        node TEXT NOT NULL, boot_id TEXT NOT NULL, backend TEXT NOT NULL, cipher TEXT NOT NULL,
        place TEXT NOT NULL, device TEXT,
        size_bytes INTEGER NOT NULL, ranks INTEGER NOT NULL, bytes_per_rank INTEGER NOT NULL,
        key_id TEXT, consumer TEXT, state TEXT NOT NULL, reason TEXT NOT NULL,
        spec TEXT NOT NULL, facts TEXT NOT NULL,
        created_at TEXT NOT NULL, updated_at TEXT NOT NULL, state_since TEXT NOT NULL,
        digest TEXT NOT NULL) WITHOUT ROWID""",
    "CREATE UNIQUE INDEX live_places ON volumes(place) WHERE state NOT IN ('Erased', 'Abandoned')",
    "CREATE INDEX volumes_by_state ON volumes(state)",
    """CREATE TABLE transitions (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, volume_id TEXT NOT NULL REFERENCES volumes(volume_id),
        before TEXT, after TEXT NOT NULL, reason TEXT NOT NULL, at TEXT NOT NULL, adopted INTEGER NOT NULL)""",
    "CREATE INDEX transitions_by_volume ON transitions(volume_id)",
    """CREATE TABLE receipts (
        seq INTEGER PRIMARY KEY NOT NULL, id TEXT NOT NULL UNIQUE, volume_id TEXT,
        body TEXT NOT NULL, hash TEXT NOT NULL)""",
    "CREATE UNIQUE INDEX one_receipt_per_volume ON receipts(volume_id) WHERE volume_id IS NOT NULL",
    """CREATE TABLE requests (
        id TEXT PRIMARY KEY NOT NULL, tier TEXT NOT NULL, scope TEXT NOT NULL, argument TEXT,
        reason TEXT NOT NULL, state TEXT NOT NULL, created_at TEXT NOT NULL, done_at TEXT, result TEXT,
        trigger TEXT NOT NULL)""",
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, kind TEXT NOT NULL, reason TEXT NOT NULL,
        object TEXT NOT NULL, message TEXT NOT NULL)""",
)


def create_schema(connection: sqlite3.Connection, *, commits: int) -> None:
    """Make all tables, in the caller's transaction."""
    for statement in _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("INSERT INTO meta VALUES ('commits', ?)", (str(commits),))


def check_schema(connection: sqlite3.Connection, path: str) -> None:
    """Raise LedgerDamaged unless the file is a ledger of this version, sound in its pages and with these tables."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise LedgerDamaged("a SQLite file, but not a kvtier ledger", obj=path)
    if version != SCHEMA_VERSION:
        raise LedgerDamaged(f"written by another version (schema {version}, this is {SCHEMA_VERSION})", obj=path)
    found = {row[0] for row in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
    missing = [statement.split("(")[0].strip() for statement in _TABLES if statement not in found]
    # `sqlite_sequence` is SQLite's own, for AUTOINCREMENT.
    extra = [sql for sql in found - set(_TABLES) if "sqlite_sequence" not in sql]
    if missing or extra:
        raise LedgerDamaged(f"its tables differ (missing: {missing}, unknown: {extra})", obj=path)
    problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
    if problems != ["ok"]:
        raise LedgerDamaged(f"its pages are damaged: {problems[0]}", obj=path)
