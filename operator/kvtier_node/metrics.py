"""The agent's figures for Prometheus: gauges from the last reconcile, counters of this process.

Names begin with `kvtier_node_`: what this node sees. The controller's view of the same tiers has other names
(`kvtier_tier_*`), so that a sum over all processes counts nothing twice. What is counted since the start of the
process ends in `_total`. Serving them is `endpoints`. docs/metrics.md lists them.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier_api.erasure import Trigger
from kvtier_api.meta import Condition, ConditionStatus
from kvtier_node.ledger import VolumeRow
from kvtier_node.receipts import Receipt
from kvtier_node.tier_status import residual_bytes

__all__ = ["AgentMetrics", "Snapshot"]

_ERASE_BUCKETS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
_TIER: Final = ("namespace", "tier")


@dataclass(frozen=True)
class Snapshot:
    """What the last reconcile saw. `conditions` by tier key, `used_bytes` by volume id; `foreign` are keys of tiers."""

    version: str = ""
    node: str = ""
    ready: bool = False
    rows: Sequence[VolumeRow] = ()
    conditions: dict[str, Sequence[Condition]] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    used_bytes: dict[str, int] = field(default_factory=dict)
    bad_manifests: int = 0
    open_requests: int = 0
    failing: int = 0
    receipts: int = 0
    rebuilt_at: float = 0
    """Seconds since 1970; 0: the ledger was never rebuilt."""
    mirror_problem: bool = False
    reconciled_at: float | None = None
    """CLOCK_MONOTONIC seconds."""


class _Gauges(Collector):
    """Gauges of a snapshot, made anew at each scrape: what is gone from the snapshot is gone from the output."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()

    def collect(self) -> Iterator[Metric]:
        now = self.snapshot
        build = GaugeMetricFamily("kvtier_node_build_info", "Version and node.", labels=("version", "node"))
        build.add_metric((now.version, now.node), 1)
        yield build
        for name, text, value in (
            ("kvtier_node_ready", "1 once recovery has finished.", now.ready),
            (
                "kvtier_node_tiers",
                "Tiers that are declared by a manifest of this node.",
                len(now.conditions),
            ),
            ("kvtier_node_bad_manifests", "Manifests that cannot be used now.", now.bad_manifests),
            ("kvtier_node_erase_requests_open", "Requests to erase that are not fulfilled yet.", now.open_requests),
            ("kvtier_node_erasures_failing", "Volumes whose last attempt to erase failed.", now.failing),
            ("kvtier_node_receipts", "Receipts in this node's chain.", now.receipts),
            (
                "kvtier_node_ledger_rebuilt_timestamp_seconds",
                "When the ledger was rebuilt from what was on the node; 0: never.",
                now.rebuilt_at,
            ),
            (
                "kvtier_node_receipts_mirror_problem",
                "1 while the second copy of the receipts is behind.",
                now.mirror_problem,
            ),
        ):
            yield GaugeMetricFamily(name, text, value=float(value))
        if now.reconciled_at is not None:
            yield GaugeMetricFamily(
                "kvtier_node_reconcile_age_seconds",
                "Since the last reconcile that was completed.",
                value=time.monotonic() - now.reconciled_at,
            )
        yield from self._of_tiers(now)
        yield self._conditions(now)

    @staticmethod
    def _of_tiers(now: Snapshot) -> Iterator[Metric]:
        volumes = GaugeMetricFamily(
            "kvtier_node_volumes", "Volumes that have not ended, by state.", labels=(*_TIER, "state", "backend")
        )
        tally = Tally((row.tier_namespace, row.tier_name, row.state.value, row.backend.value) for row in now.rows)
        for labels, count in sorted(tally.items()):
            volumes.add_metric(labels, count)
        provisioned = GaugeMetricFamily("kvtier_node_provisioned_bytes", "Slot bytes of volumes.", labels=_TIER)
        used = GaugeMetricFamily("kvtier_node_used_bytes", "Slot bytes that were written, as measured.", labels=_TIER)
        residual = GaugeMetricFamily(
            "kvtier_node_residual_bytes", "Slot bytes of ended consumers that are not proven erased.", labels=_TIER
        )
        foreign = GaugeMetricFamily(
            "kvtier_node_foreign_data",
            "1 if what kvtier did not make keeps volumes of the tier from being made.",
            labels=_TIER,
        )
        keys = {(row.tier_namespace, row.tier_name) for row in now.rows} | {
            _labels(key) for key in (*now.conditions, *now.foreign)
        }
        for key in sorted(keys):
            mine = [row for row in now.rows if (row.tier_namespace, row.tier_name) == key]
            provisioned.add_metric(key, sum(row.ranks * row.bytes_per_rank for row in mine))
            used.add_metric(key, sum(now.used_bytes.get(row.volume_id, 0) for row in mine))
            residual.add_metric(key, residual_bytes(mine))
            foreign.add_metric(key, float("/".join(key) in now.foreign))
        yield from (volumes, provisioned, used, residual, foreign)

    @staticmethod
    def _conditions(now: Snapshot) -> Metric:
        family = GaugeMetricFamily(
            "kvtier_node_tier_condition",
            "1 for the status that the condition has.",
            labels=(*_TIER, "condition", "status"),
        )
        for key, conditions in sorted(now.conditions.items()):
            for condition in conditions:
                for status in ConditionStatus:
                    labels = (*_labels(key), condition.type, status.value)
                    family.add_metric(labels, float(condition.status is status))
        return family


def _labels(key: str) -> tuple[str, str]:
    namespace, _, name = key.partition("/")
    return namespace, name


class AgentMetrics:
    """One registry of its own. `set` and `erased` may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._gauges = _Gauges()
        self.registry.register(self._gauges)
        ProcessCollector(registry=self.registry)
        self._seconds = Histogram(
            "kvtier_node_erase_seconds",
            "From the consumer's death (or, where nobody saw it, the begin) to the key's verified end.",
            ("trigger",),
            buckets=_ERASE_BUCKETS_S,
            registry=self.registry,
        )
        self._erasures = Counter("kvtier_node_erasures", "Erasures on record.", ("trigger",), registry=self.registry)
        self._crashes = Counter(
            "kvtier_node_crash_erasures", "Erasures after a crash, a restart or a power loss.", registry=self.registry
        )
        self._missed = Counter(
            "kvtier_node_deadline_misses", "Volumes not erased within scrub.deadline.", registry=self.registry
        )
        self._missed_ids: set[str] = set()

    def set(self, snapshot: Snapshot) -> None:
        self._gauges.snapshot = snapshot

    def erased(self, receipt: Receipt) -> None:
        """Count a receipt that was added to the chain, by this process or another."""
        if receipt.duration_s is not None:
            self._seconds.labels(receipt.trigger.value).observe(float(receipt.duration_s))
        self._erasures.labels(receipt.trigger.value).inc()
        if receipt.trigger in (Trigger.CRASH, Trigger.RESTART, Trigger.POWER_LOSS):
            self._crashes.inc()
        if receipt.deadline_met is False and receipt.volume_id is not None:
            self.missed(receipt.volume_id)

    def missed(self, volume_id: str) -> bool:
        """Count a missed deadline, once for each volume; whether it is new."""
        if volume_id in self._missed_ids:
            return False
        self._missed_ids.add(volume_id)
        self._missed.inc()
        return True

    def text(self) -> bytes:
        """The exposition format (text/plain; version=0.0.4)."""
        return generate_latest(self.registry)
