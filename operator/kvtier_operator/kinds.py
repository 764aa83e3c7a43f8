"""The kinds that the controller reads and writes, as lightkube resource classes over plain dictionaries.

Its own few classes, because the bundled ones build a tree of typed objects out of each Node.
"""

from __future__ import annotations

from typing import Any, Final

from lightkube.core.resource import ApiInfo, ResourceDef
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    GenericNamespacedStatus,
    create_api_info,
)

from kvtier_api.erasure import KVCacheErasure
from kvtier_api.meta import GROUP, VERSION, Resource
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import KVCacheVolume

__all__ = ["ERASURES", "EVENTS", "EVERYWHERE", "LEASES", "NODES", "PODS", "TIERS", "VOLUMES", "Kind"]

EVERYWHERE: Final = "*"
"""All namespaces."""
Kind = Any
"""A lightkube resource class. Its own types cannot be named for classes that are made here."""


def _namespaced(group: str, version: str, kind: str, plural: str) -> Kind:
    info = create_api_info(group, version, kind, plural)
    status = ApiInfo(
        resource=ResourceDef(group, version, kind),
        parent=ResourceDef(group, version, kind),
        plural=plural,
        verbs=["get", "patch", "put"],
        action="status",
    )
    sub = type(f"{kind}Status", (GenericNamespacedStatus,), {"_api_info": status})
    return type(kind, (GenericNamespacedResource,), {"_api_info": info, "Status": sub})


def _own(model: type[Resource]) -> Kind:
    return _namespaced(GROUP, VERSION, model.__name__, model.plural)


TIERS: Final[Kind] = _own(KVCacheTier)
VOLUMES: Final[Kind] = _own(KVCacheVolume)
ERASURES: Final[Kind] = _own(KVCacheErasure)
PODS: Final[Kind] = _namespaced("", "v1", "Pod", "pods")
LEASES: Final[Kind] = _namespaced("coordination.k8s.io", "v1", "Lease", "leases")
EVENTS: Final[Kind] = _namespaced("events.k8s.io", "v1", "Event", "events")
NODES: Final[Kind] = type("Node", (GenericGlobalResource,), {"_api_info": create_api_info("", "v1", "Node", "nodes")})
