"""A volume that the API has on this node, and this node's ledger has not: what is said of it, and what a person can do.

It happens when a node's state directory or disk was replaced under the same name. Nothing can be measured of such a place, and
nothing is claimed: its conditions become Unknown, it goes on to count, and only a person ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from kvtier_api.conditions import Finding, written_down
from kvtier_api.documents import parse_object
from kvtier_api.errors import InvalidResource
from kvtier_api.meta import ConditionType, find_condition
from kvtier_api.reasons import Reason
from kvtier_api.volume import KVCacheVolume, KVCacheVolumeStatus
from kvtier_node.cluster.objects import ABANDON

__all__ = ["unknown_status"]

_TYPES: Final = (
    ConditionType.PROVISIONED,
    ConditionType.ENCRYPTED,
    ConditionType.SALT_ENFORCED,
    ConditionType.RETENTION_ENFORCED,
    ConditionType.SCRUBBED,
)


def unknown_status(body: Mapping[str, Any], node_name: str, now: datetime) -> KVCacheVolumeStatus | None:
    """The status to write, or None: it says so already, has ended, or cannot be read (the controller says that)."""
    try:
        volume = parse_object(body, kind=KVCacheVolume)
    except InvalidResource:
        return None
    before = volume.status or KVCacheVolumeStatus()
    if before.state.is_final:
        return None
    scrubbed = find_condition(before.conditions, ConditionType.SCRUBBED)
    if scrubbed is not None and scrubbed.reason == Reason.NOT_IN_LEDGER:
        return None
    text = (
        f"the ledger of node {node_name} has no volume {volume.metadata.name}: its state directory, or its disk, is not the one"
        " that made it. Bring them back, or give the place up: kubectl annotate kvcv"
        f" {volume.metadata.name} -n {volume.metadata.namespace} {ABANDON}='who, and why'"
    )
    found = [Finding(type_, None, Reason.NOT_IN_LEDGER, text) for type_ in _TYPES]
    conditions = written_down(found, before.conditions, generation=volume.metadata.generation, now=now)
    return before.model_copy(update={"conditions": conditions})
