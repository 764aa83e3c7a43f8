"""What a store says of itself: counters since it was opened, and what was measured when it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["RankStatistics", "StoreStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatistics:
    """`direct_reason` says why O_DIRECT is not used; empty while it is."""

    rank: int
    path: str
    direct: bool
    direct_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatistics:
    """`outcomes` counts items by "store.<outcome>" and "load.<outcome>"; `errors` counts system errors by name.

    `oldest_block_age_s` is an upper bound: the age of the oldest epoch with a key. `hardened` False: the process can
    be dumped, for the reason in `hardening_error` or because the configuration says so.
    """

    slots: int
    ready: int
    free: int
    quarantined: int
    evictions: int
    open_jobs: int
    stored_bytes: int
    loaded_bytes: int
    outcomes: Counter[str]
    errors: Counter[str]
    keys: int
    locked_key_bytes: int
    keys_dropped: int
    oldest_block_age_s: float | None
    sealed: bool
    hardened: bool
    hardening_error: str
    staging_bytes: int
    ranks: tuple[RankStatistics, ...]
