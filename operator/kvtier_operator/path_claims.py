"""Which tier has a path first: of two tiers that could be on one node, neither's path may lie below the other's.

The later one does not hold: by creation time, then by namespace and name. Two tiers with the same path are no conflict, as on a
node (`kvtier_node.tier_paths`). Selectors decide: two tiers never meet if they want different values of one label. A tier whose
spec cannot be read claims nothing here. What is said of a conflict is `planning`'s.

An index, because each event asks: paths above one are looked up by name, paths below it are neighbours in a sorted list.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from kvtier_api.clean_path import is_below
from kvtier_operator.facts import Key, TierFacts

__all__ = ["PathClaim", "PathClaims", "claim_of"]

_EARLY: Final = datetime.min.replace(tzinfo=UTC)
_AFTER_SLASH: Final = chr(ord("/") + 1)


@dataclass(frozen=True, slots=True)
class PathClaim:
    """What of a tier matters here. `nodes` are the labels of nodes that may hold it; none: every node."""

    key: Key
    path: str
    declared_at: datetime
    nodes: Mapping[str, str]

    @property
    def rank(self) -> tuple[datetime, Key]:
        """The smaller, the earlier: a total order, so that of two tiers exactly one is refused."""
        return self.declared_at, self.key

    def meets(self, other: PathClaim) -> bool:
        """Whether there can be a node for both: a node has one value of a label."""
        return all(other.nodes.get(label, value) == value for label, value in self.nodes.items())

    def conflicts(self, other: PathClaim) -> bool:
        return self.meets(other) and (is_below(self.path, other.path) or is_below(other.path, self.path))


def claim_of(tier: TierFacts) -> PathClaim | None:
    """None where the path is not known."""
    if tier.spec is None:
        return None
    declared_at = tier.meta.creation_timestamp or _EARLY
    return PathClaim(tier.key, tier.spec.path, declared_at, tier.spec.node_selector or {})


class PathClaims:
    """All tiers' claims. One conflict, and one change, cost what is above and below the path, not all there is."""

    def __init__(self) -> None:
        self._claims: dict[Key, PathClaim] = {}
        self._at: dict[str, set[Key]] = {}
        self._paths: list[str] = []
        """Sorted, each once."""

    def put(self, key: Key, claim: PathClaim | None) -> set[Key]:
        """The tier claims this now, or nothing (any more). Returns the other tiers whose answer may be another one now."""
        before = self._claims.get(key)
        if before == claim:
            return set()
        concerned: set[Key] = set()
        if before is not None:
            concerned |= self._later_than(before)
            self._take_out(before)
        if claim is not None:
            self._put_in(claim)
            concerned |= self._later_than(claim)
        return concerned - {key}

    def before(self, key: Key) -> PathClaim | None:
        """The first of the earlier tiers that this one's path is in conflict with."""
        own = self._claims.get(key)
        if own is None:
            return None
        earlier = (it for it in self._near(own.path) if it.rank < own.rank and it.conflicts(own))
        return min(earlier, key=lambda it: it.rank, default=None)

    def _later_than(self, claim: PathClaim) -> set[Key]:
        return {it.key for it in self._near(claim.path) if it.rank > claim.rank and it.conflicts(claim)}

    def _near(self, path: str) -> Iterator[PathClaim]:
        """Claims of paths above and below this one."""
        end = path.rfind("/")
        while end > 0:
            yield from self._claims_at(path[:end])
            end = path.rfind("/", 0, end)
        first = bisect_left(self._paths, f"{path}/")
        last = bisect_left(self._paths, path + _AFTER_SLASH, first)
        for number in range(first, last):
            yield from self._claims_at(self._paths[number])

    def _claims_at(self, path: str) -> Iterator[PathClaim]:
        return (self._claims[key] for key in self._at.get(path, ()))

    def _put_in(self, claim: PathClaim) -> None:
        self._claims[claim.key] = claim
        mates = self._at.setdefault(claim.path, set())
        if not mates:
            insort(self._paths, claim.path)
        mates.add(claim.key)

    def _take_out(self, claim: PathClaim) -> None:
        del self._claims[claim.key]
        mates = self._at[claim.path]
        mates.discard(claim.key)
        if not mates:
            del self._at[claim.path]
            del self._paths[bisect_left(self._paths, claim.path)]
