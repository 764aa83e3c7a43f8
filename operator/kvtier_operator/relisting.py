"""The periodic full resync: everything is listed from the API server, and memory is made to say the same.

After a gap in a watch (410 Gone) kopf lists again but does not compare: what vanished meanwhile would stay in memory for ever.
"""

from __future__ import annotations

import structlog

from kvtier_api.errors import InvalidResource
from kvtier_operator.facts import Key
from kvtier_operator.kinds import ERASURES, EVERYWHERE, TIERS, VOLUMES
from kvtier_operator.kube import Kube
from kvtier_operator.settings import Settings
from kvtier_operator.sources import Source, sources
from kvtier_operator.view import Fact, View

__all__ = ["listed", "missing_kind", "relist"]

log = structlog.get_logger(__name__)


async def relist(kube: Kube, view: View, settings: Settings) -> tuple[set[Key], int]:
    """The tiers that memory had otherwise, and in how many objects. Raises ApiProblem; memory is then as it was."""
    view.begin_relist()
    found: list[Fact] = []
    for source in sources(settings):
        facts, _ = await listed(kube, view, source)
        found += facts
    return view.relist(found)


async def listed(kube: Kube, view: View, source: Source) -> tuple[list[Fact], str]:
    """The facts of one list, and its version. What `view` has already is not read again. Raises ApiProblem."""
    found: list[Fact] = []
    version = ""
    async for page in kube.pages(source.kind, source.namespace, labels=source.labels):
        version = page.version
        for item in page.items:
            try:
                found.append(view.known(source.facts, *item.identity) or source.parse(item.body()))
            except InvalidResource as error:
                log.warning("an object cannot be read", kind=source.name, error=str(error))
    return found, version


async def missing_kind(kube: Kube, settings: Settings) -> str:
    """The first kind that the API server does not serve yet; empty when all are there. Raises ApiProblem."""
    namespace = settings.watched_namespaces[0] if settings.watched_namespaces else EVERYWHERE
    for kind in (TIERS, VOLUMES, ERASURES):
        if not await kube.is_served(kind, namespace):
            return str(kind.__name__)
    return ""
