"""The periodic full resync: everything is listed from the API server, and memory is made to say the same.

After a gap in a watch (410 Gone) kopf lists again but does not compare: what vanished meanwhile would stay in memory for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from kvtier_api.errors import InvalidResource
from kvtier_operator.facts import (
    AgentFacts,
    Body,
    ErasureFacts,
    Key,
    NodeFacts,
    TierFacts,
    VolumeFacts,
    agent_facts,
    erasure_facts,
    node_facts,
    tier_facts,
    volume_facts,
)
from kvtier_operator.kinds import ERASURES, NODES, PODS, TIERS, VOLUMES, Kind
from kvtier_operator.kube import EVERYWHERE, Kube
from kvtier_operator.settings import Settings
from kvtier_operator.view import Fact, View

__all__ = ["missing_kind", "relist"]

log = structlog.get_logger(__name__)


async def relist(kube: Kube, view: View, settings: Settings) -> tuple[set[Key], int]:
    """The tiers that memory had otherwise, and in how many objects. Raises ApiProblem; memory is then as it was."""
    view.begin_relist()
    found: list[Fact] = []
    for namespace in settings.watched_namespaces or (EVERYWHERE,):
        found += await _listed(kube, view, TIERS, TierFacts, tier_facts, namespace)
        found += await _listed(kube, view, VOLUMES, VolumeFacts, volume_facts, namespace)
        found += await _listed(kube, view, ERASURES, ErasureFacts, erasure_facts, namespace)
    found += await _listed(kube, view, NODES, NodeFacts, node_facts, None)
    if settings.agent_selector:
        namespaces = settings.watched_namespaces or (EVERYWHERE,)
        for namespace in namespaces:
            found += await _listed(kube, view, PODS, AgentFacts, agent_facts, namespace, settings.agent_selector)
    return view.relist(found)


async def _listed(  # noqa: PLR0917
    kube: Kube,
    view: View,
    kind: Kind,
    facts: type[Fact],
    parse: Callable[[Body], Fact],
    namespace: str | None,
    labels: str = "",
) -> list[Fact]:
    found: list[Fact] = []
    async for item in kube.listed(kind, namespace, labels=labels):
        try:
            found.append(view.known(facts, *item.identity) or parse(item.body()))
        except InvalidResource as error:
            log.warning("an object cannot be read", kind=kind.__name__, error=str(error))
    return found


async def missing_kind(kube: Kube, settings: Settings) -> str:
    """The first kind that the API server does not serve yet; empty when all are there. Raises ApiProblem."""
    namespace = settings.watched_namespaces[0] if settings.watched_namespaces else EVERYWHERE
    for kind in (TIERS, VOLUMES, ERASURES):
        if not await kube.is_served(kind, namespace):
            return str(kind.__name__)
    return ""
