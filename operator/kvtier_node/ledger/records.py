"""Rows of the ledger's tables, read and written inside the caller's transaction.

A volume's row carries a digest of its own values, so that a flipped bit on the disk is an error and not another state.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Set as AbstractSet
from typing import Any, Final

from kvtier_api.errors import LedgerError, NotFound
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.ledger.rows import EraseRequest, Event, Head, LedgerDamaged, Transition, VolumeRow
from kvtier_node.receipts.encoding import ZERO_HASH, canonical_json, hash_of
from kvtier_node.receipts.receipt import Receipt

__all__: list[str] = []

_COLUMNS: Final = tuple(item.name for item in dataclasses.fields(VolumeRow) if item.name != "sequence")
_JSON: Final = frozenset({"consumer", "spec", "facts"})
_SELECT: Final = (
    "SELECT *, (SELECT MIN(seq) FROM transitions WHERE transitions.volume_id = volumes.volume_id) AS sequence"
    " FROM volumes"
)
_AFTER: Final = "request-after:"
"""Before a request's id: key in `meta` of the number of the last arrow when it was made. Removed with its end."""
_PLACEHOLDERS: Final = ", ".join(f":{name}" for name in _COLUMNS)
_INSERT: Final = f"INSERT INTO volumes ({', '.join(_COLUMNS)}, digest) VALUES ({_PLACEHOLDERS}, :digest)"  # noqa: S608
_UPDATE: Final = (
    f"UPDATE volumes SET {', '.join(f'{name} = :{name}' for name in _COLUMNS)}, digest = :digest "  # noqa: S608
    "WHERE volume_id = :volume_id"
)


# -- volumes


def insert_volume(connection: sqlite3.Connection, row: VolumeRow) -> None:
    """Raises LedgerError for an id that exists, or a place that a volume which has not ended uses."""
    if connection.execute("SELECT 1 FROM volumes WHERE volume_id = ?", (row.volume_id,)).fetchone():
        raise LedgerError("a volume of this id is on record already", obj=row.volume_id)
    holder = connection.execute(
        "SELECT volume_id, state FROM volumes WHERE place = ? AND state NOT IN ('Erased', 'Abandoned')", (row.place,)
    ).fetchone()
    if holder is not None:
        raise LedgerError(f"the place belongs to {holder[0]} ({holder[1]})", obj=f"place={row.place}")
    connection.execute(_INSERT, _values(row))


def update_volume(connection: sqlite3.Connection, row: VolumeRow) -> None:
    connection.execute(_UPDATE, _values(row))


def get_volume(connection: sqlite3.Connection, volume_id: str) -> VolumeRow:
    found = connection.execute(f"{_SELECT} WHERE volume_id = ?", (volume_id,)).fetchone()
    if found is None:
        raise NotFound("no such volume in the ledger", obj=volume_id, remedy="see 'kvtier status'")
    return _volume(found)


def list_volumes(
    connection: sqlite3.Connection, states: AbstractSet[VolumeState] | None, tier_uid: str | None
) -> list[VolumeRow]:
    query, values = f"{_SELECT} WHERE 1", list[str]()
    if states is not None:
        query += f" AND state IN ({', '.join('?' * len(states))})"
        values += sorted(states)
    if tier_uid is not None:
        query += " AND tier_uid = ?"
        values.append(tier_uid)
    return [_volume(found) for found in connection.execute(query + " ORDER BY sequence, volume_id", values)]


def _values(row: VolumeRow) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _COLUMNS:
        value = getattr(row, name)
        if name in _JSON:
            value = None if value is None else canonical_json(value).decode()
        elif name in ("state", "backend"):
            value = str(value)
        values[name] = value
    return values | {"digest": hash_of(canonical_json(values))}


def _volume(found: sqlite3.Row) -> VolumeRow:
    values = {name: found[name] for name in _COLUMNS}
    try:
        if found["digest"] != hash_of(canonical_json(values)):
            raise LedgerDamaged("a volume's row does not match its digest", obj=str(found["volume_id"]))
        for name in _JSON:
            values[name] = None if values[name] is None else json.loads(values[name])
        values |= {"state": VolumeState(values["state"]), "backend": BackendName(values["backend"])}
    except (ValueError, TypeError) as error:
        raise LedgerDamaged(f"a volume's row cannot be read: {error}", obj=str(found["volume_id"])) from error
    return VolumeRow(**values, sequence=found["sequence"] or 0)


# -- transitions


def insert_transition(
    connection: sqlite3.Connection, row: VolumeRow, *, before: VolumeState | None, adopted: bool
) -> Transition:
    cursor = connection.execute(
        "INSERT INTO transitions (volume_id, before, after, reason, at, adopted) VALUES (?, ?, ?, ?, ?, ?)",
        (row.volume_id, before, row.state, row.reason, row.updated_at, int(adopted)),
    )
    seq = cursor.lastrowid or 0
    return Transition(seq, row.volume_id, before, row.state, row.reason, row.updated_at, adopted)


def list_transitions(connection: sqlite3.Connection, volume_id: str | None) -> list[Transition]:
    query = "SELECT seq, volume_id, before, after, reason, at, adopted FROM transitions"
    where = ("", ()) if volume_id is None else (" WHERE volume_id = ?", (volume_id,))
    return [_transition(row) for row in connection.execute(f"{query}{where[0]} ORDER BY seq", where[1])]


def _transition(row: sqlite3.Row) -> Transition:
    try:
        before = None if row["before"] is None else VolumeState(row["before"])
        after = VolumeState(row["after"])
    except ValueError as error:
        raise LedgerDamaged(f"transition {row['seq']} cannot be read: {error}", obj=str(row["volume_id"])) from error
    return Transition(row["seq"], row["volume_id"], before, after, row["reason"], row["at"], bool(row["adopted"]))


# -- receipts


def insert_receipt(connection: sqlite3.Connection, receipt: Receipt) -> None:
    body = receipt.canonical()
    connection.execute(
        "INSERT INTO receipts (seq, id, volume_id, body, hash) VALUES (?, ?, ?, ?, ?)",
        (receipt.seq, receipt.id, receipt.volume_id, body.decode(), hash_of(body)),
    )


def receipt_lines(connection: sqlite3.Connection, after_seq: int) -> list[bytes]:
    rows = connection.execute("SELECT body FROM receipts WHERE seq > ? ORDER BY seq", (after_seq,))
    return [row[0].encode() for row in rows]


def receipt_hash(connection: sqlite3.Connection, seq: int) -> str | None:
    row = connection.execute("SELECT body FROM receipts WHERE seq = ?", (seq,)).fetchone()
    return None if row is None else hash_of(row[0].encode())


def check_receipts(connection: sqlite3.Connection) -> None:
    """Raises LedgerDamaged unless every receipt has its hash and follows the one before it."""
    previous = ZERO_HASH
    for row in connection.execute("SELECT seq, body, hash FROM receipts ORDER BY seq"):
        body = row["body"].encode()
        if row["hash"] != hash_of(body) or f'"prev":"{previous}"' not in row["body"]:
            raise LedgerDamaged(f"receipt number {row['seq']} was changed, or the one before it")
        previous = row["hash"]


def head(connection: sqlite3.Connection) -> Head:
    """The end of the chain, computed from the last receipt itself. Raises LedgerDamaged for a gap or a changed body."""
    last = connection.execute("SELECT seq, body, hash FROM receipts ORDER BY seq DESC LIMIT 1").fetchone()
    if last is None:
        return Head(0, ZERO_HASH)
    count = connection.execute("SELECT COUNT(*) FROM receipts").fetchone()[0]
    digest = hash_of(last["body"].encode())
    if count != last["seq"] or digest != last["hash"]:
        raise LedgerDamaged(f"the receipts' chain is broken: {count} receipts, the last is number {last['seq']}")
    return Head(count, digest)


# -- requests and events


def insert_request(connection: sqlite3.Connection, request: EraseRequest) -> EraseRequest:
    """Put it on record, as the newest: after every arrow that is there."""
    last = connection.execute("SELECT MAX(seq) FROM transitions").fetchone()[0] or 0
    values = dataclasses.astuple(request)[:-1]
    connection.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    connection.execute("INSERT INTO meta VALUES (?, ?)", (f"{_AFTER}{request.id}", str(last)))
    return dataclasses.replace(request, after=last)


def update_request(connection: sqlite3.Connection, request: EraseRequest) -> None:
    connection.execute(
        "UPDATE requests SET state = ?, done_at = ?, result = ? WHERE id = ?",
        (request.state, request.done_at, request.result, request.id),
    )
    connection.execute("DELETE FROM meta WHERE key = ?", (f"{_AFTER}{request.id}",))


def list_requests(connection: sqlite3.Connection, *, only_open: bool) -> list[EraseRequest]:
    where = " WHERE state = 'Open'" if only_open else ""
    after = f"(SELECT CAST(value AS INTEGER) FROM meta WHERE key = '{_AFTER}' || id)"  # noqa: S608
    rows = connection.execute(f"SELECT *, {after} FROM requests{where} ORDER BY rowid")  # noqa: S608
    return [EraseRequest(*row) for row in rows]


def insert_event(connection: sqlite3.Connection, event: Event, limit: int) -> None:
    cursor = connection.execute(
        "INSERT INTO events (at, kind, reason, object, message) VALUES (?, ?, ?, ?, ?)",
        (event.at, event.kind, event.reason, event.object, event.message),
    )
    connection.execute("DELETE FROM events WHERE seq <= ?", ((cursor.lastrowid or 0) - limit,))


def list_events(connection: sqlite3.Connection, limit: int) -> list[Event]:
    rows = connection.execute("SELECT * FROM events ORDER BY seq DESC LIMIT ?", (limit,)).fetchall()
    return [Event(*row) for row in reversed(rows)]
