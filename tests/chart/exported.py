"""What each process exports: name, type, labels and help of every metric, collected from its registry with all of it in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvtier_api.meta import Condition
from kvtier_api.tier import KVCacheTierStatus
from kvtier_node.metrics import AgentMetrics, Snapshot
from kvtier_operator.metrics import Metrics
from ledger_samples import draft, row

_RESERVED = {"le", "quantile"}


@dataclass(frozen=True)
class Exported:
    """`name` is what a query says (`_total` of a counter is part of it). `series` are the names of its samples."""

    name: str
    type: str
    labels: frozenset[str]
    help: str
    series: frozenset[str]


def _of(registry: CollectorRegistry) -> Iterator[Exported]:
    for family in registry.collect():
        if not family.name.startswith("kvtier_"):
            continue  # process_*, python_*: of the client library
        samples = [it for it in family.samples if not it.name.endswith("_created")]
        assert samples, f"{family.name} is not in use here: use it in this module"
        yield Exported(
            f"{family.name}_total" if family.type == "counter" else family.name,
            family.type,
            frozenset(label for it in samples for label in it.labels) - _RESERVED,
            family.documentation,
            frozenset(it.name for it in samples),
        )


_CONDITION = Condition.model_validate(
    {"type": "Ready", "status": "True", "reason": "AllGuaranteesHold", "lastTransitionTime": "2026-01-01T00:00:00Z"}
)


def of_the_agent() -> dict[str, Exported]:
    metrics = AgentMetrics()
    used = row()
    metrics.set(Snapshot(rows=[used], conditions={"default/chat": [_CONDITION]}, reconciled_at=0.0))
    metrics.erased(draft(used.volume_id))
    return {it.name: it for it in _of(metrics.registry)}


def of_the_controller() -> dict[str, Exported]:
    metrics = Metrics()
    metrics.tier(("default", "chat"), KVCacheTierStatus(conditions=[_CONDITION]), 0)
    metrics.reconciled("done", 0.1)
    metrics.api_request("GET", "KVCacheTier", "200", 0.1)
    metrics.event_posted("Erased")
    metrics.erasure_recorded("Crash")
    metrics.resynced("done", 0)
    return {it.name: it for it in _of(metrics.registry)}
