"""The controller's names in the API: finalizer, annotations, labels, field manager. They are part of the interface.

A finalizer or annotation of kopf's own is never written: kopf only watches here.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ABANDON",
    "CONTROLLER",
    "FIELD_MANAGER",
    "FINALIZER",
    "KEYS_LOST_SUFFIX",
    "REQUEST_LABEL",
    "SYSTEM_UUID",
    "VOLUME_LABEL",
]

FINALIZER: Final = "kvtier.dev/erase"
"""On tiers and volumes: the object stays for as long as bytes behind it may be readable."""
ABANDON: Final = "kvtier.dev/abandon"
"""Annotation of a volume. Its value is the reason why an administrator gives the place up."""
SYSTEM_UUID: Final = "kvtier.dev/system-uuid"
"""Annotation of a volume, by its agent: `status.nodeInfo.systemUUID` of the machine that holds the keys."""
VOLUME_LABEL: Final = "kvtier.dev/volume"
"""Label of a KVCacheErasure that an agent, or the controller, made as the record of one volume's erasure."""
REQUEST_LABEL: Final = "kvtier.dev/request"
"""Label of such a record: the uid of the KVCacheErasure that asked for it."""
KEYS_LOST_SUFFIX: Final = "-keys-lost"
"""Name of the controller's own record: the volume's name and this."""
FIELD_MANAGER: Final = "kvtier-controller"
CONTROLLER: Final = "kvtier.dev/controller"
"""`reportingController` of events."""
