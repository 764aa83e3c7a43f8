"""What people ask of this node's volumes through the API, carried out: a tier's deletion, a request to erase, a place given up.

Level-based: what is in the API and what is in the ledger are compared, again and again; nothing is remembered that is not in one
of them. Only what somebody wrote down ends a volume in use (a deletion timestamp, a request, an annotation); an object that is
merely not there does not: after an etcd restore it would be a loss of memory, not a wish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from kvtier_api.documents import parse_object
from kvtier_api.erasure import ErasureScope, ErasureState, KVCacheErasure, Trigger
from kvtier_api.errors import InvalidResource
from kvtier_api.volume import VolumeState
from kvtier_node.cluster.objects import ABANDON
from kvtier_node.ledger import VolumeRow

__all__ = ["Ending", "GivingUp", "Wish", "wishes"]

_ENDING: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})
_STOPPABLE: Final = _ENDING | {VolumeState.IN_USE}
"""Again while it is being erased: a container that was started anew may hold a file by now."""
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Ending:
    """End the consumer's use, so that the guardian erases. `request`: the uid of the KVCacheErasure that asks for it."""

    volume_id: str
    trigger: Trigger
    request: str | None = None


@dataclass(frozen=True)
class GivingUp:
    """An administrator's word ends a volume that cannot be erased."""

    volume_id: str
    reason: str


Wish = Ending | GivingUp


def wishes(
    rows: Sequence[VolumeRow],
    *,
    volumes: Mapping[str, Body],
    deleting_tiers: Mapping[str, bool],
    requests: Sequence[Body],
) -> list[Wish]:
    """What is asked of `rows`. `volumes` are their API objects by name, `deleting_tiers` the uids of tiers that go."""
    asked = [request for request in (_request(body) for body in requests) if request is not None]
    found: list[Wish] = []
    for row in rows:
        body = volumes.get(row.volume_id)
        reason = _abandoned(body)
        if reason and row.state in _ENDING:
            found.append(GivingUp(row.volume_id, reason))
        elif row.state in _STOPPABLE and deleting_tiers.get(row.tier_uid):
            found.append(Ending(row.volume_id, Trigger.DELETION))
        elif row.state in _STOPPABLE and body is not None:
            request = next((it for it in asked if _is_about(it, row, body)), None)
            if request is not None:
                found.append(Ending(row.volume_id, request.spec.trigger, request.metadata.uid))
    return found


def _abandoned(body: Body | None) -> str:
    annotations = (body["metadata"].get("annotations") if body is not None else None) or {}
    return str(annotations.get(ABANDON, "")).strip()


def _request(body: Body) -> KVCacheErasure | None:
    """An open request to erase everything. Tenants and ages are the engine's to erase: it alone has their keys."""
    try:
        request = parse_object(body, kind=KVCacheErasure)
    except InvalidResource:  # the controller says so on the object
        return None
    done = request.status is not None and request.status.state in (ErasureState.COMPLETE, ErasureState.FAILED)
    return None if done or request.spec.scope is not ErasureScope.ALL else request


def _is_about(request: KVCacheErasure, row: VolumeRow, body: Body) -> bool:
    """A volume of its tier that was there before it, by the API server's clock alone."""
    metadata, wanted = request.metadata, request.spec.tier_ref
    if (metadata.namespace, wanted.name) != (row.tier_namespace, row.tier_name):
        return False
    if wanted.uid not in (None, row.tier_uid) or metadata.creation_timestamp is None:
        return False
    return datetime.fromisoformat(str(body["metadata"]["creationTimestamp"])) <= metadata.creation_timestamp
