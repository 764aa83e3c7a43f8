"""The controller's metrics. Labels name namespaces, tiers, nodes and reasons; never a tenant, a salt or a path.

Figures of tiers are set when a tier was reconciled, so a scrape costs no request. docs/metrics.md lists them.
"""

from __future__ import annotations

import time
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvtier_api.tier import KVCacheTierStatus
from kvtier_operator.facts import Key

__all__ = ["Metrics"]

_STATES: Final = ("ready", "in_use", "erasing", "failed", "abandoned")
_VALUES: Final = {"True": 1.0, "False": 0.0, "Unknown": -1.0}
_SECONDS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        tier = ("namespace", "tier")
        self._tiers = Gauge("kvtier_tiers", "Tiers that the controller knows", registry=self.registry)
        self._volumes = Gauge(
            "kvtier_tier_volumes", "Volumes of a tier by state", (*tier, "state"), registry=self.registry
        )
        self._bytes = Gauge(
            "kvtier_tier_bytes", "Bytes of the slot files of volumes that are not erased", tier, registry=self.registry
        )
        self._residual = Gauge(
            "kvtier_tier_residual_bytes",
            "Bytes whose consumer ended and whose erasure is not proven",
            tier,
            registry=self.registry,
        )
        self._oldest = Gauge(
            "kvtier_tier_oldest_block_timestamp_seconds",
            "No readable block of the tier is older than this",
            tier,
            registry=self.registry,
        )
        self._conditions = Gauge(
            "kvtier_tier_condition",
            "1 True, 0 False, -1 Unknown",
            (*tier, "type", "reason"),
            registry=self.registry,
        )
        self._said: dict[Key, set[tuple[str, str]]] = {}
        self._unheard = Gauge(
            "kvtier_tier_unreachable_volumes",
            "Volumes whose node does not report",
            tier,
            registry=self.registry,
        )
        self._reconciles = Counter(
            "kvtier_reconciles", "Reconciles of a tier by result", ("result",), registry=self.registry
        )
        self._reconcile_seconds = Histogram(
            "kvtier_reconcile_seconds", "Seconds of one reconcile", buckets=_SECONDS, registry=self.registry
        )
        self._api = Counter(
            "kvtier_api_requests",
            "Requests to the API server; code none: no answer",
            ("verb", "kind", "code"),
            registry=self.registry,
        )
        self._api_seconds = Histogram(
            "kvtier_api_request_seconds",
            "Seconds of one request to the API server",
            ("verb",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._events = Counter("kvtier_events", "Events posted by reason", ("reason",), registry=self.registry)
        self._erasures = Counter(
            "kvtier_erasure_records",
            "Records of erasures that were seen to come by trigger",
            ("trigger",),
            registry=self.registry,
        )
        self._leading = Gauge("kvtier_leading", "1 while this replica holds the Lease", registry=self.registry)
        self._resyncs = Counter("kvtier_resyncs", "Full lists by result", ("result",), registry=self.registry)
        self._drift = Counter(
            "kvtier_resync_drift", "Objects that a full list had otherwise than memory", registry=self.registry
        )
        age = Gauge("kvtier_last_reconcile_age_seconds", "Age of the last completed reconcile", registry=self.registry)
        self.completed_at_s = time.monotonic()
        age.set_function(self.reconcile_age_s)

    def reconcile_age_s(self) -> float:
        return time.monotonic() - self.completed_at_s

    def alive(self) -> None:
        """A reconcile, or a standby's look at the Lease, was completed."""
        self.completed_at_s = time.monotonic()

    def reconciled(self, result: str, seconds: float) -> None:
        self._reconciles.labels(result).inc()
        self._reconcile_seconds.observe(seconds)

    def api_request(self, verb: str, kind: str, code: str, seconds: float) -> None:
        self._api.labels(verb, kind, code).inc()
        self._api_seconds.labels(verb).observe(seconds)

    def event_posted(self, reason: str) -> None:
        self._events.labels(reason).inc()

    def erasure_recorded(self, trigger: str) -> None:
        self._erasures.labels(trigger).inc()

    def leading(self, held: bool) -> None:
        self._leading.set(1 if held else 0)

    def resynced(self, result: str, drift: int) -> None:
        self._resyncs.labels(result).inc()
        self._drift.inc(drift)

    def tiers(self, count: int) -> None:
        self._tiers.set(count)

    def tier(self, key: Key, status: KVCacheTierStatus, unheard: int) -> None:
        counts = status.volumes
        for state in _STATES:
            self._volumes.labels(*key, state).set(getattr(counts, state) if counts is not None else 0)
        self._bytes.labels(*key).set(status.bytes_total or 0)
        self._residual.labels(*key).set(status.residual_bytes or 0)
        oldest = status.oldest_block_time
        self._oldest.labels(*key).set(oldest.timestamp() if oldest is not None else 0)
        self._unheard.labels(*key).set(unheard)
        values = {(it.type, it.reason): _VALUES[it.status.value] for it in status.conditions}
        for said in self._said.get(key, set()) - values.keys():
            self._conditions.remove(*key, *said)
        self._said[key] = set(values)
        for said, value in values.items():
            self._conditions.labels(*key, *said).set(value)

    def tier_gone(self, key: Key) -> None:
        """By name: `remove_by_labels` looks at the figures of every tier."""
        for said in self._said.pop(key, ()):
            self._conditions.remove(*key, *said)
        for state in _STATES:
            self._volumes.remove(*key, state)
        for gauge in (self._bytes, self._residual, self._oldest, self._unheard):
            gauge.remove(*key)

    def all_tiers_gone(self) -> None:
        """The Lease is lost: another replica speaks for the tiers now."""
        for gauge in (self._volumes, self._bytes, self._residual, self._oldest, self._unheard, self._conditions):
            gauge.clear()
        self._said.clear()
        self._tiers.set(0)
