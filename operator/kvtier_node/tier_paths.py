"""Of two tiers, neither's path may lie below the other's: what the one makes there would be foreign data to the other.

The one that was first keeps working: who has a volume on record before who has none, then who was declared first. Paths are
compared as they are written: a tier's path is absolute and clean, and no step of it is a link. Two tiers with the same path
are not refused: each finds the other's volumes signed by this node, and leaves them alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from kvtier_api.clean_path import is_below
from kvtier_api.errors import InvalidResource
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import VolumeState
from kvtier_node.ledger import TERMINAL, VolumeRow
from kvtier_node.manifests import key_of
from kvtier_node.node import Node
from kvtier_node.status_files import StatusFiles

__all__ = ["refuse_nested"]

_LIVING: Final = frozenset(VolumeState) - TERMINAL
_EARLY: Final = datetime.min.replace(tzinfo=UTC)
_Rank = tuple[int, int, datetime, str]


def refuse_nested(node: Node, tier: KVCacheTier) -> None:
    """Raise InvalidResource if the tier's path lies below or above that of a tier that was there first.

    Looked at: volumes on record that have not ended, and the status files of declared tiers. Raises LedgerError, and what
    reading the status files raises.
    """
    rows = node.ledger.volumes(_LIVING)
    declared, _unreadable = StatusFiles(node.state_dir).load()
    key, path = key_of(tier), tier.spec.path
    others = {(row.tier_key, os.path.dirname(row.place)) for row in rows}
    others |= {(name, other.spec.path) for name, other in declared.items() if name != key}
    own = _rank(key, rows, declared.get(key))
    for other, where in sorted(others):
        if not (is_below(path, where) or is_below(where, path)):
            continue
        if other == key or _rank(other, rows, declared.get(other)) < own:
            raise _nested(key, path, other, where)


def _rank(key: str, rows: Sequence[VolumeRow], declared: KVCacheTier | None) -> _Rank:
    """The smaller, the earlier: a total order, so that of two tiers exactly one is refused."""
    first = min((row.sequence for row in rows if row.tier_key == key), default=None)
    if first is not None:
        return 0, first, _EARLY, key
    if declared is not None:
        return 1, 0, declared.metadata.creation_timestamp or _EARLY, key
    return 2, 0, _EARLY, key


def _nested(key: str, path: str, other: str, where: str) -> InvalidResource:
    whose = f"an earlier tier {other}" if other == key else f"tier {other}"
    lies = "below" if is_below(path, where) else "above"
    return InvalidResource(
        f"the path {path} lies {lies} {where}, the path of {whose}, which was there first",
        obj=f"spec.path of tier {key}",
        remedy="give one of them a directory that is neither below nor above the other's: a tier's path cannot be changed, so"
        " remove the tier and declare it with another one",
    )
