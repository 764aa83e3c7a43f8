"""The engine's side of kvtier: a store of KV blocks in sealed slots, and what adapts it to inference engines.

Imports nothing of Kubernetes or the operator, and no torch: only `torch_staging` does, and is imported by name.
"""

from kvtier_engine.bookkeeping import Presence
from kvtier_engine.config import SaltPolicy, StoreConfig
from kvtier_engine.jobs import JobResult, Outcome
from kvtier_engine.stats import RankStatistics, StoreStatistics
from kvtier_engine.store import SlotStore

__all__ = [
    "JobResult",
    "Outcome",
    "Presence",
    "RankStatistics",
    "SaltPolicy",
    "SlotStore",
    "StoreConfig",
    "StoreStatistics",
]
