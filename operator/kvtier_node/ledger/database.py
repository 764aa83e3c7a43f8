"""The SQLite file under the ledger: opened, checked, locked; one durable transaction at a time.

Several processes use the file at once. Each transaction holds the state directory's shared lock, and makes sure first
that the files it has open are still the ones in the directory, so that a rebuild by another process (which holds the
exclusive lock) is noticed and never written past. What the tables mean is left to `kvtier_node.ledger.book`.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from kvtier_api.errors import Busy, LedgerError
from kvtier_node.ledger.rows import LedgerDamaged, LedgerMissing
from kvtier_node.ledger.schema import check_schema, create_schema
from kvtier_node.receipts.encoding import utc_now
from kvtier_node.state_dir import StateDirectory

__all__ = ["LEDGER_NAME", "Database", "translated"]

LEDGER_NAME: Final = "ledger.db"
_WAL: Final = f"{LEDGER_NAME}-wal"
_SHM: Final = f"{LEDGER_NAME}-shm"
_MARK: Final = "ledger.mark"
_RESERVE: Final = "ledger.reserve"
_NEW: Final = f"{LEDGER_NAME}.new"
_RESERVE_SIZE_BYTES: Final = 1 << 20
_BUSY_TIMEOUT_S: Final = 30.0
_IOERR_SHORT_READ: Final = 522  # sqlite3.h: SQLITE_IOERR | 2 << 8
_IOERR_SHMSIZE: Final = 4874  # SQLITE_IOERR | 19 << 8: no room for the -shm file
_REBUILD: Final = "start 'kvtier node': it rebuilds the ledger from what is on this node, and says so"
_Result = TypeVar("_Result")


class Database:
    """An open ledger file. Safe for threads; not to be used in a forked child."""

    def __init__(self, state: StateDirectory) -> None:
        self.state = state
        self.path = state.path_of(LEDGER_NAME)
        self._mutex = threading.RLock()
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        self._inodes: dict[str, int] = {}
        self._mark_fd = -1
        try:
            with self.state.lock(exclusive=False), translated(self.path):
                self._connect()
        except _Full:
            # Recovery must be able to read the ledger on a full disk, or nothing would be erased.
            if not self._release_reserve():
                raise
            with self.state.lock(exclusive=False), translated(self.path):
                self._connect()
        else:
            self.fill_reserve()

    # -- making and replacing the file

    @staticmethod
    def exists(state: StateDirectory) -> bool:
        return state.file_status(LEDGER_NAME) is not None

    @staticmethod
    def leftovers(state: StateDirectory) -> list[str]:
        """Files that only a lost ledger leaves behind, or a rebuild that was cut short."""
        names = sorted(os.listdir(state.fd))
        return [name for name in names if name in (_WAL, _MARK) or name.startswith(f"{LEDGER_NAME}.damaged-")]

    @staticmethod
    def is_sound(state: StateDirectory, check: Callable[[sqlite3.Connection], object]) -> bool:
        """Whether a whole ledger is in place that `check` does not refuse. The caller holds the exclusive lock."""
        if not Database.exists(state):
            return False
        path = state.path_of(LEDGER_NAME)
        try:
            with translated(path):
                connection = _open_connection(path)
                try:
                    _check_whole(connection, state)
                    check(connection)
                finally:
                    connection.close()
        except LedgerDamaged:
            return False
        return True

    @staticmethod
    def prepare(state: StateDirectory, fill: Callable[[sqlite3.Connection], None]) -> None:
        """Write a new ledger beside the place for it. The caller holds the exclusive lock, here and for `install`."""
        for name in (_NEW, f"{_NEW}-wal", f"{_NEW}-shm", f"{_NEW}-journal"):
            state.remove(name)
        os.close(state.open_file(_NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        with translated(state.path_of(_NEW)):
            connection = _open_connection(state.path_of(_NEW), new=True)
            try:
                connection.execute("BEGIN IMMEDIATE")
                # The number of commits goes on from the mark, which is kept: a rebuild cut short is then noticed too.
                create_schema(connection, commits=_read_mark(state))
                fill(connection)
                connection.execute("COMMIT")
                # Closing would do this too, but says nothing when it fails, and the log would be left behind.
                busy, left, moved = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if busy or left != moved:
                    raise LedgerError("the new ledger cannot be written whole", obj=state.path_of(_NEW))
            finally:
                connection.close()
        fd = state.open_file(_NEW, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @staticmethod
    def install(state: StateDirectory) -> None:
        """Put the prepared ledger in its place, durably."""
        state.move(_NEW, LEDGER_NAME)
        state.sync()

    @staticmethod
    def set_aside(state: StateDirectory) -> str:
        """Move a damaged ledger's files away, for the evidence. The caller holds the exclusive lock."""
        stamp = utc_now().replace(":", "").replace("-", "")
        aside = f"{LEDGER_NAME}.damaged-{stamp}"
        # The log goes first: a crash in between must not leave a stale log beside a file that is still to be made.
        for name, suffix in ((_WAL, "-wal"), (_SHM, "-shm"), (LEDGER_NAME, "")):
            try:
                state.move(name, aside + suffix)
            except FileNotFoundError:
                pass
        state.sync()
        return aside

    # -- transactions

    def write(self, change: Callable[[sqlite3.Connection], _Result], *, essential: bool = False) -> _Result:
        """Run `change` in one transaction and return after it is durable.

        `essential`: an arrow towards erasure, which may use the reserve when the disk is full. Raises what `change`
        raises (nothing is then written); Busy after 30 s; LedgerDamaged, LedgerMissing, LedgerError.
        """
        try:
            return self._write(change)
        except _Full as error:
            if not essential or not self._release_reserve():
                raise LedgerError(
                    "the disk under the state directory is full; nothing was recorded",
                    obj=self.path,
                    remedy="free space there",
                ) from error
        try:
            return self._write(change)
        except _Full as error:
            raise LedgerError(
                "the disk under the state directory is full, and so is the reserve; nothing was recorded",
                obj=self.path,
                remedy="free space there",
            ) from error

    def _write(self, change: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with self._ready() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = change(connection)
                connection.execute("UPDATE meta SET value = CAST(value AS INTEGER) + 1 WHERE key = 'commits'")
                commits = _commits(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._write_mark(commits)
            return result

    def read(self, query: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run `query` on one consistent snapshot."""
        with self._ready() as connection:
            connection.execute("BEGIN")
            try:
                return query(connection)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def close(self) -> None:
        with self._mutex:
            if self._connection is not None and self._pid == os.getpid():
                self._connection.close()
            self._connection = None
            self._close_mark()

    @contextmanager
    def exclusive(self) -> Iterator[sqlite3.Connection]:
        """The connection, with the state directory to oneself: for reading, and for files beside the ledger."""
        with self._ready(exclusive=True) as connection:
            yield connection

    @contextmanager
    def _ready(self, *, exclusive: bool = False) -> Iterator[sqlite3.Connection]:
        if self._pid != os.getpid():
            raise LedgerError("the ledger was opened before a fork", obj=self.path, remedy="open it in the child")
        with self._mutex, self.state.lock(exclusive=exclusive), translated(self.path):
            if self._connection is None:
                raise LedgerError("the ledger is closed", obj=self.path)
            self._check_files()
            yield self._connection

    # -- what keeps the file the one it was

    def _connect(self) -> None:
        if not self.exists(self.state):
            raise LedgerMissing("there is no ledger", obj=self.path, remedy=_REBUILD)
        for name in (_WAL, _SHM):
            self.state.file_status(name)
        connection = _open_connection(self.path)
        try:
            _check_whole(connection, self.state)
            self._close_mark()
            self._mark_fd = self.state.open_file(_MARK, os.O_WRONLY | os.O_CREAT)
            self._inodes = self._current_inodes()
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _current_inodes(self) -> dict[str, int]:
        found = {name: self.state.file_status(name) for name in (LEDGER_NAME, _WAL, _SHM)}
        return {name: status.st_ino for name, status in found.items() if status is not None}

    def _check_files(self) -> None:
        now = self._current_inodes()
        if now == self._inodes:
            return
        if LEDGER_NAME not in now:
            raise LedgerMissing("the ledger file was removed while in use", obj=self.path, remedy=_REBUILD)
        if now[LEDGER_NAME] == self._inodes[LEDGER_NAME]:
            raise LedgerDamaged("the ledger's log was removed or replaced while in use", obj=self.path, remedy=_REBUILD)
        # Another process rebuilt the ledger: go on with the new file.
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._connect()

    # -- the mark: the number of commits, kept outside the file, so that lost ones are noticed

    def _write_mark(self, commits: int) -> None:
        # Not fsynced: after a power cut it may be behind, never ahead of what is durable in the ledger.
        try:
            os.pwrite(self._mark_fd, b"%020d\n" % commits, 0)
        except OSError:
            # The commit is durable and must not look failed. An old mark only weakens the detection of lost commits.
            pass

    def _close_mark(self) -> None:
        if self._mark_fd >= 0:
            os.close(self._mark_fd)
        self._mark_fd = -1

    # -- the reserve: space for the records of erasure when the disk is full

    def fill_reserve(self) -> bool:
        """Make the reserve if it is missing. False: there is no room for it."""
        status = self.state.file_status(_RESERVE)
        if status is not None and status.st_size >= _RESERVE_SIZE_BYTES:
            return True
        fd = -1
        try:
            fd = self.state.open_file(_RESERVE, os.O_WRONLY | os.O_CREAT)
            os.posix_fallocate(fd, 0, _RESERVE_SIZE_BYTES)
        except OSError:
            self.state.remove(_RESERVE)
            return False
        finally:
            if fd >= 0:
                os.close(fd)
        return True

    def _release_reserve(self) -> bool:
        if self.state.file_status(_RESERVE) is None:
            return False
        self.state.remove(_RESERVE)
        return True


def _check_whole(connection: sqlite3.Connection, state: StateDirectory) -> None:
    path = state.path_of(LEDGER_NAME)
    check_schema(connection, path)
    mark = _read_mark(state)  # first: others commit meanwhile, and then say so in the mark
    commits = _commits(connection)
    if mark > commits:
        raise LedgerDamaged(
            f"it has lost commits ({commits} are here, {mark} were made): its log is gone, or it is an old copy",
            obj=path,
            remedy=_REBUILD,
        )


def _read_mark(state: StateDirectory) -> int:
    if state.file_status(_MARK) is None:
        return 0
    fd = state.open_file(_MARK, os.O_RDONLY)
    try:
        text = os.read(fd, 32)
    finally:
        os.close(fd)
    return int(text) if len(text) == 21 and text[:20].isdigit() else 0


class _Full(LedgerError):
    """The disk is full; nothing was recorded."""


@contextmanager
def translated(path: str) -> Iterator[None]:
    """SQLite's and the kernel's errors as LedgerDamaged, Busy or LedgerError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise LedgerDamaged(f"the ledger is damaged: {error}", obj=path, remedy=_REBUILD) from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Busy(f"the ledger was locked for {_BUSY_TIMEOUT_S:g} s", obj=path) from error
        if code & 0xFF == sqlite3.SQLITE_FULL or code == _IOERR_SHMSIZE:
            raise _Full("the disk is full", obj=path, remedy="free space there") from error
        damaged = code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code == _IOERR_SHORT_READ
        if damaged or "Could not decode" in str(error):  # text that is none: Python's own error, without a code
            raise LedgerDamaged(f"the ledger is damaged: {error}", obj=path, remedy=_REBUILD) from error
        raise LedgerError(f"the ledger cannot be used: {error}", obj=path) from error
    except OSError as error:
        raise LedgerError(f"the ledger cannot be used: {error.strerror}", obj=path) from error


def _open_connection(path: str, *, new: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{urllib.parse.quote(path)}?mode=rw",
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        _make_durable(connection, path, new=new)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_durable(connection: sqlite3.Connection, path: str, *, new: bool) -> None:
    """A commit returns after its log is on the disk (fsync). https://sqlite.org/pragma.html#pragma_synchronous

    The mode is set in a new file only: to set it would write to an empty or foreign file, and spoil the evidence.
    """
    mode = connection.execute(f"PRAGMA journal_mode{' = WAL' if new else ''}").fetchone()[0]
    if mode != "wal":
        if new:
            raise LedgerError(f"no write-ahead log on this file system (got {mode})", obj=path)
        raise LedgerDamaged(f"not a kvtier ledger: its journal mode is {mode}", obj=path, remedy=_REBUILD)
    connection.execute("PRAGMA synchronous = FULL")
    if connection.execute("PRAGMA synchronous").fetchone()[0] != 2:
        raise LedgerError("SQLite refuses synchronous = FULL", obj=path)


def _commits(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT value FROM meta WHERE key = 'commits'").fetchone()
    if row is None or not str(row[0]).isdigit():
        raise LedgerDamaged("the number of commits is missing")
    return int(row[0])
