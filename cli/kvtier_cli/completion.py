"""What the shell completes: names of tiers, and of receipts, of this host. Nothing is made, rebuilt or said on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import typer

from kvtier_cli.options import DEFAULT_MANIFESTS, DEFAULT_STATE_DIR, absolute

__all__ = ["receipt_ids", "tier_names"]

_DEFAULT_NAMESPACE: Final = "default/"


def _option(context: typer.Context, name: str, variable: str, default: Path) -> str:
    """As it is on the line so far, or as the command would take it."""
    return absolute(Path(context.params.get(name) or os.environ.get(variable) or default))


def tier_names(context: typer.Context, incomplete: str) -> list[str]:
    """Tiers that are declared or were used; those of the default namespace by their name alone."""
    from kvtier_api.errors import KvtierError
    from kvtier_cli.state import declared_tiers, existing_ledger, known_tiers

    state_dir = _option(context, "state_dir", "KVTIER_STATE_DIR", DEFAULT_STATE_DIR)
    manifests = _option(context, "manifests", "KVTIER_MANIFESTS", DEFAULT_MANIFESTS)
    found: set[str] = set()
    try:
        found |= set(declared_tiers(state_dir, manifests))
        with existing_ledger(state_dir) as ledger:
            found |= known_tiers(ledger, state_dir, manifests)
    except (KvtierError, OSError):
        pass  # the command itself says what is wrong; a line that is being typed is no place for it
    return [name for key in sorted(found) if (name := key.removeprefix(_DEFAULT_NAMESPACE)).startswith(incomplete)]


def receipt_ids(context: typer.Context, incomplete: str) -> list[str]:
    """Ids of receipts, newest first, and of their volumes once one is begun."""
    from kvtier_api.errors import KvtierError
    from kvtier_cli.state import existing_ledger

    try:
        with existing_ledger(_option(context, "state_dir", "KVTIER_STATE_DIR", DEFAULT_STATE_DIR)) as ledger:
            receipts = ledger.receipts()[::-1]
    except (KvtierError, OSError):
        return []  # as above
    names = [item.volume_id or "" if incomplete.startswith("kvv") else item.id for item in receipts]
    return [name for name in names if name and name.startswith(incomplete)]
