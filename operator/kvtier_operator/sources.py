"""What the controller looks at: each kind, where, and how its objects become facts. For lists, watches and kopf alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_operator.facts import (
    AgentFacts,
    Body,
    ErasureFacts,
    NodeFacts,
    TierFacts,
    VolumeFacts,
    agent_facts,
    erasure_facts,
    node_facts,
    tier_facts,
    volume_facts,
)
from kvtier_operator.kinds import ERASURES, EVERYWHERE, NODES, PODS, TIERS, VOLUMES, Kind
from kvtier_operator.settings import Settings
from kvtier_operator.view import Fact

__all__ = ["Source", "kinds", "sources"]


@dataclass(frozen=True)
class Source:
    """Objects of one kind. `namespace` None: those of the cluster itself."""

    kind: Kind
    facts: type[Fact]
    parse: Callable[[Body], Fact]
    namespace: str | None = None
    labels: str = ""

    @property
    def name(self) -> str:
        return str(self.kind.__name__)


def kinds(settings: Settings) -> Sequence[Source]:
    """Each kind once, wherever it is looked for. Tiers come first, and nodes after what is on them."""
    found = [
        Source(TIERS, TierFacts, tier_facts, EVERYWHERE),
        Source(VOLUMES, VolumeFacts, volume_facts, EVERYWHERE),
        Source(ERASURES, ErasureFacts, erasure_facts, EVERYWHERE),
        Source(NODES, NodeFacts, node_facts),
    ]
    if settings.agent_selector:
        found.append(Source(PODS, AgentFacts, agent_facts, EVERYWHERE, settings.agent_selector))
    return found


def sources(settings: Settings) -> Sequence[Source]:
    """Each kind in each namespace that is looked at."""
    return [
        Source(it.kind, it.facts, it.parse, namespace, it.labels)
        for it in kinds(settings)
        for namespace in ((settings.watched_namespaces or (EVERYWHERE,)) if it.namespace is not None else (None,))
    ]
