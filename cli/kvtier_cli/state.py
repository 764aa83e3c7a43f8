"""The state directory as a command reads it: the ledger if there is one, without making or rebuilding anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_node.ledger import Ledger

__all__ = ["existing_ledger", "was_used"]


def was_used(state_dir: str) -> bool:
    """Whether kvtier ever ran with this state directory: it, or what it left when it was lost, is there."""
    return any(os.path.lexists(f"{state_dir}/{name}") for name in ("ledger.db", "ledger.mark", "receipts.jsonl"))


@contextmanager
def existing_ledger(state_dir: str) -> Iterator[Ledger]:
    """The ledger of a state directory that was used. Raises NotFound, NotPermitted, LedgerError."""
    from kvtier_api.errors import NotFound, NotPermitted
    from kvtier_node.ledger import Ledger

    if os.path.isdir(state_dir) and not os.access(state_dir, os.R_OK | os.X_OK):
        raise NotPermitted(
            "the state directory is another user's",
            obj=state_dir,
            remedy="run the command as that user (sudo kvtier …)",
        )
    if not was_used(state_dir):
        raise NotFound(
            "kvtier was never started with this state directory",
            obj=f"--state-dir {state_dir}",
            remedy="name the right one, or start 'kvtier node' or 'kvtier run'",
        )
    ledger = Ledger.open(state_dir, create=False)
    try:
        yield ledger
    finally:
        ledger.close()
