"""How far the API server was told: the durable memory of the reporter, `<state_dir>/reported.json`.

Written after the fact, so after a crash something may be told twice, and never not at all. A lost or foreign file, and a
ledger that was rebuilt since, mean: from the beginning.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final

from kvtier_api.errors import NotFound
from kvtier_node.paths import AllowedRoots

__all__ = ["Cursor", "CursorFile", "identity_of"]

_NAME: Final = "reported.json"
_LIMIT_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Cursor:
    """Every arrow up to number `arrow` is in the API, and every event up to number `event`; `ledger`: which ledger's."""

    ledger: str
    arrow: int = 0
    event: int = 0


class CursorFile:
    """One process uses it: the agent that holds the node's lock."""

    def __init__(self, state_dir: str) -> None:
        self._path = os.path.realpath(state_dir)
        self._allowed = AllowedRoots([self._path])
        self._written: Cursor | None = None

    def load(self, ledger: str) -> Cursor:
        """The cursor of this very ledger. Raises KvtierError where the directory cannot be used."""
        with self._allowed.open_directory(self._path) as directory:
            try:
                found = json.loads(directory.read_file(_NAME, _LIMIT_BYTES))
                cursor = Cursor(str(found["ledger"]), int(found["arrow"]), int(found["event"]))
            except (NotFound, ValueError, KeyError, TypeError):
                return Cursor(ledger)
        return cursor if cursor.ledger == ledger else Cursor(ledger)

    def save(self, cursor: Cursor) -> None:
        """Durable on return. Raises KvtierError."""
        if cursor == self._written:
            return
        with self._allowed.open_directory(self._path) as directory:
            directory.write_file_atomic(_NAME, json.dumps(asdict(cursor)).encode(), 0o600)
        self._written = cursor


def identity_of(rebuilt: tuple[str, str] | None) -> str:
    """What tells a ledger from its successor: when it was rebuilt."""
    return rebuilt[0] if rebuilt is not None else "first"
