"""The kopf side: which objects are watched, and the thin handlers that turn each event into a fact and tiers to look at.

Level-based: `on.event` alone, no finalizer, no annotation, no patch by kopf. Nothing is decided here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import kopf

from kvtier_operator.feed import Feed
from kvtier_operator.settings import Settings
from kvtier_operator.sources import Source, kinds

__all__ = ["operator_settings", "registry"]

_PREFIX: Final = "controller.kvtier.dev"
_LIST_CHUNK: Final = 100
"""kopf decodes all of an answer at once."""
_LAST_ERROR_S: Final = 30.0


def registry(feed: Feed, settings: Settings) -> kopf.OperatorRegistry:
    """Handlers on a registry of their own, so that a process can begin anew after the Lease was lost."""
    found = kopf.OperatorRegistry()

    def watch(source: Source) -> None:
        async def handler(type: str | None, event: Mapping[str, Any], **_: Any) -> None:  # noqa: A002 (kopf's name)
            feed.event(source.facts, source.parse, type, event["object"])

        info = source.kind._api_info
        group, version = info.resource.group, info.resource.version
        kopf.on.event(group, version, info.plural, id=f"{info.plural}-event", registry=found)(handler)

    for source in kinds(settings):
        watch(source)

    login = kopf.login_with_kubeconfig if settings.kubeconfig else _login
    kopf.on.login(id="login", registry=found)(login)
    return found


def _login(*, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """By the address that every pod is given, not by kopf's name for it: erasures go on while the cluster's DNS does not."""
    found = kopf.login_with_service_account(settings=settings)
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if found is None or not (host and port):
        return found or kopf.login_with_kubeconfig(settings=settings)
    return dataclasses.replace(found, server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


class _NoDiffBase(kopf.DiffBaseStorage):
    """kopf copies the essence of each object at each event, for handlers of changes. Here are none."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:  # noqa: ARG002
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:  # noqa: ARG002
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:  # noqa: ARG002
        raise AssertionError("no handler of changes is registered")


class _ForEver:
    """Pauses between attempts, without end: an API server that is away is waited for, by a process that stays."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
        while True:
            yield _LAST_ERROR_S


def operator_settings(settings: Settings) -> kopf.OperatorSettings:
    found = kopf.OperatorSettings()
    found.scanning.disabled = True
    found.posting.enabled = False
    found.peering.standalone = True
    # kopf takes its finalizer away from every object that no handler of its own needs it for: it must not be ours.
    found.persistence.finalizer = f"{_PREFIX}/not-used"
    found.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_PREFIX)
    found.persistence.diffbase_storage = _NoDiffBase()
    found.networking.error_backoffs = _ForEver()
    found.networking.request_timeout = 30
    found.networking.connect_timeout = 5
    found.watching.server_timeout = 300
    found.watching.client_timeout = 330
    found.watching.connect_timeout = 5
    found.watching.chunk_size = _LIST_CHUNK
    # kopf holds the last event of an object for as long as its worker idles.
    found.queueing.idle_timeout = 0.05
    if settings.agent_selector:
        found.watching.label_selectors["", "v1", "pods"] = settings.agent_selector
    return found
