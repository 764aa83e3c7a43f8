"""The ledger: what this node has made, where, in which state, and every receipt; each arrow before its effect.

`Ledger` is the one thing that others use. Its file and locks are left to `database`, the second copy of the receipts to
`mirror`; whether an arrow is right to take now, to the life cycle above.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self, TypeAlias

from kvtier_api.erasure import ErasureScope, Trigger
from kvtier_api.errors import InsufficientSpace, InvalidResource, LedgerError, NotFound, VerificationFailed
from kvtier_api.volume import VolumeState
from kvtier_node.identity import Signer
from kvtier_node.ledger import mirror, records
from kvtier_node.ledger.database import LEDGER_NAME, Database, translated
from kvtier_node.ledger.rows import (
    ABANDON,
    ARROWS,
    TERMINAL,
    ArrowRefused,
    EraseRequest,
    Event,
    Head,
    LedgerDamaged,
    LedgerMissing,
    Transition,
    VolumeRow,
)
from kvtier_node.ledger.schema import EVENT_LIMIT
from kvtier_node.receipts.encoding import utc_now
from kvtier_node.receipts.receipt import Receipt, ReceiptDraft, read_receipt, sign_receipt
from kvtier_node.state_dir import StateDirectory

__all__ = ["Ledger", "Observer"]

Observer: TypeAlias = Callable[[Transition], None]
_NOTABLE: Final = frozenset(
    {"consumer", "key_id", "device", "facts", "cipher", "backend", "boot_id", "size_bytes", "bytes_per_rank", "reason"}
)
_TOWARDS_ERASURE: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})


class Ledger:
    """An open ledger; safe for threads and beside other processes.

    Observers are called, in order, after an arrow is durable and before the call that made it returns. What they raise
    reaches the caller; the arrow stays recorded. `mirror_problem` says why the mirror is behind, or is None.
    """

    def __init__(self, state: StateDirectory, observers: Sequence[Observer]) -> None:
        self._state = state
        self._observers = tuple(observers)
        self._database = Database(state)
        self.mirror_problem: str | None = None

    # -- opening

    @classmethod
    def open(
        cls, state_dir: str | os.PathLike[str], *, create: bool = True, observers: Sequence[Observer] = ()
    ) -> Self:
        """Open the ledger; with `create`, make one where there never was one.

        Raises LedgerMissing (none is here; or, with `create`, one was here: its log or receipts still are),
        LedgerDamaged, UnsafePath, NotFound (no state directory), Busy. A damaged ledger is never replaced here.
        """
        state = StateDirectory.open(state_dir, create=create)
        try:
            if create and not Database.exists(state):
                with state.lock(exclusive=True), translated(state.path_of(LEDGER_NAME)):
                    cls._create_first(state)
            ledger = cls(state, observers)
        except BaseException:
            state.close()
            raise
        try:
            ledger._catch_up_mirror()
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def create_fresh(
        cls,
        state_dir: str | os.PathLike[str],
        reason: str,
        *,
        observers: Sequence[Observer] = (),
        public_key: bytes | None = None,
    ) -> Self:
        """Put a new ledger in the place of a damaged or missing one, which is moved aside; say so in `rebuilt`.

        A ledger that is sound after all is opened as it is: another process was first, and may have adopted volumes.
        The receipts' chain is restored from the mirror as far as it verifies (under the raw `public_key`, if given); a
        mirror that does not verify to its end is moved aside too. Volumes are the caller's to `adopt`.
        """
        state = StateDirectory.open(state_dir)
        try:
            with state.lock(exclusive=True), translated(state.path_of(LEDGER_NAME)):
                if not Database.is_sound(state, lambda connection: _check_rows(state, connection)):
                    _rebuild(state, reason, public_key)
        finally:
            state.close()
        return cls.open(state_dir, create=False, observers=observers)

    @staticmethod
    def _create_first(state: StateDirectory) -> None:
        if Database.exists(state):
            return
        traces = Database.leftovers(state)
        status = state.file_status(mirror.MIRROR_NAME)
        if status is not None and status.st_size:
            traces.append(mirror.MIRROR_NAME)
        if traces:
            raise LedgerMissing(
                f"the ledger is gone; its {', '.join(traces)} remained",
                obj=state.path_of(LEDGER_NAME),
                remedy="start 'kvtier node': it rebuilds the ledger from what is on this node, and says so",
            )
        Database.prepare(state, lambda _connection: None)
        Database.install(state)

    def close(self) -> None:
        self._database.close()
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def rebuilt(self) -> tuple[str, str] | None:
        """When (UTC) and why this ledger was rebuilt, or None if it never was."""
        values = self._database.read(
            lambda connection: dict(connection.execute("SELECT key, value FROM meta WHERE key LIKE 'rebuilt%'"))
        )
        return (values["rebuilt_at"], values["rebuilt_reason"]) if "rebuilt_at" in values else None

    def check(self) -> None:
        """Read every row; recovery does this before it serves. Raises LedgerDamaged for what opening does not see."""
        with self._database.exclusive() as connection:
            _check_rows(self._state, connection)

    # -- arrows

    def plan(self, row: VolumeRow) -> VolumeRow:
        """Record a new volume as Planned. Raises LedgerError for an id or a place in use, InsufficientSpace when the
        disk has no room left to record its erasure."""
        if row.state is not VolumeState.PLANNED:
            raise ArrowRefused(f"a volume begins as Planned, not {row.state}", obj=row.volume_id)
        if not self._database.fill_reserve():
            raise InsufficientSpace(
                "no room to record an erasure when the disk is full: 1 MiB more is needed",
                obj=self._state.path,
                remedy="free space under the state directory",
            )
        return self._insert(row, adopted=False)

    def adopt(self, row: VolumeRow) -> VolumeRow:
        """Record a volume that was found on the node, in the state that it was found in, with a reason (rebuild)."""
        if not row.reason:
            raise InvalidResource("an adopted volume needs a reason", obj=row.volume_id)
        if row.state in TERMINAL:
            raise ArrowRefused(f"{row.state} is reached with a receipt only", obj=row.volume_id)
        return self._insert(row, adopted=True)

    def _insert(self, row: VolumeRow, *, adopted: bool) -> VolumeRow:
        now = utc_now()
        stored = dataclasses.replace(row, created_at=row.created_at or now, updated_at=now, state_since=now)

        def change(connection: sqlite3.Connection) -> Transition:
            records.insert_volume(connection, stored)
            return records.insert_transition(connection, stored, before=None, adopted=adopted)

        first = self._database.write(change, essential=adopted)
        self._announce(first)
        return dataclasses.replace(stored, sequence=first.seq)

    def advance(
        self,
        volume_id: str,
        to: VolumeState,
        *,
        reason: str = "",
        consumer: dict[str, Any] | None = None,
        key_id: str | None = None,
        device: str | None = None,
        facts: dict[str, Any] | None = None,
    ) -> VolumeRow:
        """Record one arrow; fields that are given are set with it, `facts` are merged. Durable on return.

        Raises NotFound; ArrowRefused for an arrow that is not in ARROWS, and for Erased and Abandoned (use `finish`).
        """
        if to in TERMINAL:
            raise ArrowRefused(f"{to} is reached with a receipt only", obj=volume_id, remedy="use finish()")
        fields = {"consumer": consumer, "key_id": key_id, "device": device, "facts": facts}
        given = {name: value for name, value in fields.items() if value is not None}

        def change(connection: sqlite3.Connection) -> tuple[VolumeRow, Transition]:
            return _take_arrow(connection, volume_id, to, reason, given)

        row, transition = self._database.write(change, essential=to in _TOWARDS_ERASURE)
        self._announce(transition)
        return row

    def note(self, volume_id: str, **fields: Any) -> VolumeRow:
        """Set fields without an arrow (`facts` are merged). Raises NotFound, InvalidResource, ArrowRefused (ended)."""
        unknown = sorted(set(fields) - _NOTABLE)
        if unknown:
            raise InvalidResource(f"cannot be noted: {', '.join(unknown)}", obj=volume_id)

        def change(connection: sqlite3.Connection) -> VolumeRow:
            row = records.get_volume(connection, volume_id)
            if row.is_terminal:
                raise ArrowRefused(f"the volume has ended ({row.state})", obj=volume_id)
            row = _with_fields(row, fields, utc_now())
            records.update_volume(connection, row)
            return row

        return self._database.write(change, essential=True)

    def finish(
        self,
        volume_id: str,
        draft: ReceiptDraft,
        signer: Signer,
        *,
        to: VolumeState = VolumeState.ERASED,
        reason: str = "",
    ) -> Receipt:
        """End a volume: state, receipt and chain head in one transaction; durable on return.

        Erased is reached from Erasing only; Abandoned from any state that is not an end, with a `reason`.
        Raises NotFound, ArrowRefused, InvalidResource (the draft is another volume's).
        """
        if to not in TERMINAL:
            raise ArrowRefused(f"{to} is no end of a volume", obj=volume_id, remedy="use advance()")
        if draft.volume_id != volume_id:
            raise InvalidResource(f"the receipt is of {draft.volume_id}", obj=volume_id)
        if to is VolumeState.ABANDONED and not reason:
            raise InvalidResource("an abandoned volume needs a reason", obj=volume_id)

        def change(connection: sqlite3.Connection) -> tuple[Transition, Receipt]:
            transition = _take_arrow(connection, volume_id, to, reason, {})[1]
            return transition, _append(connection, draft, signer)

        transition, receipt = self._database.write(change, essential=True)
        self._catch_up_mirror()
        self._announce(transition)
        return receipt

    def append_receipt(self, draft: ReceiptDraft, signer: Signer) -> Receipt:
        """Record a receipt that ends no volume (`volume_id` None), such as "the ledger was rebuilt"."""
        if draft.volume_id is not None:
            raise InvalidResource("a volume's receipt is recorded by finish()", obj=draft.volume_id)
        receipt = self._database.write(lambda connection: _append(connection, draft, signer), essential=True)
        self._catch_up_mirror()
        return receipt

    def _announce(self, transition: Transition) -> None:
        for observer in self._observers:
            observer(transition)

    # -- reading

    def get(self, volume_id: str) -> VolumeRow:
        """Raises NotFound."""
        return self._database.read(lambda connection: records.get_volume(connection, volume_id))

    def volumes(self, states: Iterable[VolumeState] | None = None, tier_uid: str | None = None) -> list[VolumeRow]:
        """Volumes in the order of their first records, of these states (None: all) and this tier (None: any)."""
        wanted = None if states is None else frozenset(states)
        return self._database.read(lambda connection: records.list_volumes(connection, wanted, tier_uid))

    def transitions(self, volume_id: str | None = None) -> list[Transition]:
        """The arrows of a volume (None: of all), in order."""
        return self._database.read(lambda connection: records.list_transitions(connection, volume_id))

    def receipts(self, after_seq: int = 0) -> list[Receipt]:
        try:
            return [read_receipt(line) for line in self.receipt_lines(after_seq)]
        except VerificationFailed as error:
            raise LedgerDamaged(f"a receipt in the ledger: {error.cause}", obj=self._database.path) from error

    def receipt_lines(self, after_seq: int = 0) -> list[bytes]:
        """The canonical bytes of each receipt, in order, without newlines."""
        return self._database.read(lambda connection: records.receipt_lines(connection, after_seq))

    def head(self) -> Head:
        return self._database.read(records.head)

    # -- the mirror

    def restore_receipts(self, lines: Iterable[bytes], *, public_key: bytes | None = None) -> int:
        """Put a verified chain (a mirror's lines) into a ledger that has no receipts; return how many.

        `create_fresh` does this by itself from the mirror file. Raises VerificationFailed; LedgerError if the ledger
        has receipts already.
        """
        receipts, problems = mirror.restorable(list(lines), public_key)
        if problems:
            raise VerificationFailed(problems[0], obj=mirror.MIRROR_NAME)

        def change(connection: sqlite3.Connection) -> int:
            if records.head(connection).count:
                raise LedgerError("the ledger has receipts already; a chain is not merged", obj=self._database.path)
            for receipt in receipts:
                records.insert_receipt(connection, receipt)
            return len(receipts)

        count = self._database.write(change)
        self._catch_up_mirror()
        return count

    def _catch_up_mirror(self) -> None:
        """Append to the mirror what it lacks. A mirror that cannot be written is said in `mirror_problem`, not raised:
        the receipt itself is durable in the ledger. Raises LedgerDamaged when the mirror shows lost commits."""
        with self._database.exclusive() as connection:
            try:
                self.mirror_problem = _catch_up(self._state, connection)
            except OSError as error:
                self.mirror_problem = f"{self._state.path_of(mirror.MIRROR_NAME)}: {error.strerror}"

    # -- requests and events

    def add_request(
        self,
        tier: str,
        scope: str,
        reason: str,
        *,
        argument: str | None = None,
        trigger: Trigger = Trigger.REQUEST,
    ) -> EraseRequest:
        """Record a wish to erase. `argument`: the tenant's hash, the age in seconds, the volume to abandon; None for All.

        Raises InvalidResource for a scope that is none, or an argument that does not go with it.
        """
        if scope not in {*ErasureScope, ABANDON} or (argument is None) != (scope == ErasureScope.ALL):
            raise InvalidResource(
                "a scope is All, or Tenant, OlderThan or Abandon with an argument",
                obj=f"scope={scope} argument={argument}",
            )
        request = EraseRequest(
            f"kvq-{secrets.token_hex(10)}", tier, scope, argument, reason, "Open", utc_now(), None, None, trigger.value
        )

        return self._database.write(lambda connection: records.insert_request(connection, request), essential=True)

    def open_requests(self) -> list[EraseRequest]:
        return self._database.read(lambda connection: records.list_requests(connection, only_open=True))

    def requests(self) -> list[EraseRequest]:
        return self._database.read(lambda connection: records.list_requests(connection, only_open=False))

    def close_request(self, request_id: str, result: str, *, done: bool = True) -> EraseRequest:
        """Close an open request as Complete or, with `done` false, Failed. Raises NotFound, ArrowRefused (closed)."""

        def change(connection: sqlite3.Connection) -> EraseRequest:
            found = [item for item in records.list_requests(connection, only_open=False) if item.id == request_id]
            if not found:
                raise NotFound("no such request", obj=request_id)
            if found[0].state != "Open":
                raise ArrowRefused(f"the request is {found[0].state}", obj=request_id)
            closed = dataclasses.replace(
                found[0], state="Complete" if done else "Failed", done_at=utc_now(), result=result
            )
            records.update_request(connection, closed)
            return closed

        return self._database.write(change, essential=True)

    def add_event(self, kind: str, reason: str, object: str, message: str) -> None:  # noqa: A002 (Kubernetes' word)
        """Record an event for display; the newest 10,000 are kept."""
        event = Event(0, utc_now(), kind, reason, object, message)
        self._database.write(lambda connection: records.insert_event(connection, event, EVENT_LIMIT))

    def events(self, limit: int = 100) -> list[Event]:
        """The newest `limit` events, oldest first."""
        return self._database.read(lambda connection: records.list_events(connection, limit))


def _rebuild(state: StateDirectory, reason: str, public_key: bytes | None) -> None:
    receipts, problems = mirror.restorable(_mirror_lines(state), public_key)
    text = reason if not problems else f"{reason}; receipts after {len(receipts)} lost: {problems[0]}"

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO meta VALUES ('rebuilt_at', ?)", (utc_now(),))
        connection.execute("INSERT INTO meta VALUES ('rebuilt_reason', ?)", (text,))
        for receipt in receipts:
            records.insert_receipt(connection, receipt)

    Database.prepare(state, fill)
    Database.set_aside(state)
    if problems:
        mirror.set_aside(state)
    Database.install(state)


def _check_rows(state: StateDirectory, connection: sqlite3.Connection) -> None:
    """Read every row that recovery relies on, and compare indexes with tables. Raises LedgerDamaged."""
    problem = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if problem != "ok":
        raise LedgerDamaged(f"its pages are damaged: {problem}", obj=state.path_of(LEDGER_NAME))
    records.list_volumes(connection, None, None)
    records.list_transitions(connection, None)
    records.check_receipts(connection)
    head = records.head(connection)
    try:
        end = mirror.read_end(state)
    except VerificationFailed:
        return  # the mirror's damage, not the ledger's
    _refuse_lost_receipts(state, head, end)


def _refuse_lost_receipts(state: StateDirectory, head: Head, end: mirror.MirrorEnd) -> None:
    if end.seq > head.count:
        raise LedgerDamaged(
            f"it has lost commits: {head.count} receipts are here, {end.seq} were written to {mirror.MIRROR_NAME}",
            obj=state.path_of(LEDGER_NAME),
            remedy="start 'kvtier node': it rebuilds the ledger from what is on this node, and says so",
        )


def _catch_up(state: StateDirectory, connection: sqlite3.Connection) -> str | None:
    """Bring the mirror up to the ledger; return what was wrong with it, if anything. The exclusive lock is held."""
    problem = None
    head = records.head(connection)
    try:
        end = mirror.read_end(state)
    except VerificationFailed as error:
        problem = f"its end was damaged ({error.cause}); kept as {mirror.set_aside(state)}, written anew"
        end = mirror.NO_MIRROR
    _refuse_lost_receipts(state, head, end)
    if end.seq and records.receipt_hash(connection, end.seq) != end.hash:
        problem = f"it was of another chain; kept as {mirror.set_aside(state)}, written anew"
        end = mirror.NO_MIRROR
    lines = records.receipt_lines(connection, end.seq)
    if lines or end.torn:
        mirror.append(state, end, lines)
    return problem


def _mirror_lines(state: StateDirectory) -> list[bytes]:
    if state.file_status(mirror.MIRROR_NAME) is None:
        return []
    fd = state.open_file(mirror.MIRROR_NAME, os.O_RDONLY)
    with os.fdopen(fd, "rb") as file:
        # A last line without its newline is an append that was cut short, not a receipt.
        return [line for line in file.read().split(b"\n")[:-1] if line]


def _with_fields(row: VolumeRow, fields: dict[str, Any], now: str) -> VolumeRow:
    changed = dict(fields)
    if "facts" in changed:
        changed["facts"] = row.facts | (changed["facts"] or {})
    return dataclasses.replace(row, **changed, updated_at=now)


def _take_arrow(
    connection: sqlite3.Connection, volume_id: str, to: VolumeState, reason: str, fields: dict[str, Any]
) -> tuple[VolumeRow, Transition]:
    before = records.get_volume(connection, volume_id)
    if to not in ARROWS[before.state]:
        raise ArrowRefused(f"no arrow from {before.state} to {to}", obj=volume_id)
    now = utc_now()
    since = before.state_since if to is before.state else now
    row = dataclasses.replace(_with_fields(before, fields, now), state=to, reason=reason, state_since=since)
    records.update_volume(connection, row)
    return row, records.insert_transition(connection, row, before=before.state, adopted=False)


def _append(connection: sqlite3.Connection, draft: ReceiptDraft, signer: Signer) -> Receipt:
    head = records.head(connection)
    if head.count:
        last = read_receipt(records.receipt_lines(connection, head.count - 1)[0])
        if last.node_id != signer.node_id:
            raise LedgerError(
                f"the chain is signed by node {last.node_id}, not {signer.node_id}",
                obj="receipts",
                remedy="restore node.key; or archive ledger.db* and receipts.jsonl and let 'kvtier node' rebuild",
            )
    receipt = sign_receipt(draft, seq=head.count + 1, prev=head.hash, signer=signer)
    records.insert_receipt(connection, receipt)
    return receipt
