"""Whether a volume of a tier could be made on this node now: path, foreign data, backend, space. Makes no volume.

The tier's directory itself is made if it is missing. The backend is tried, with whatever it tries taken away again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import (
    BackendUnavailable,
    ForeignData,
    InsufficientSpace,
    InvalidResource,
    KvtierError,
    NotPermitted,
    UnsafePath,
)
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import BackendName
from kvtier_node.kernel.refusal import refused
from kvtier_node.node import Node
from kvtier_node.provisioning import choose_backend, refuse_too_large
from kvtier_node.tier_paths import refuse_nested

__all__ = ["TierCheck", "check_tier"]

_REASONS: Final[tuple[tuple[type[KvtierError], Reason], ...]] = (
    (UnsafePath, Reason.UNSAFE_PATH),  # before NotPermitted, which it is a kind of
    (NotPermitted, Reason.PATH_NOT_ALLOWED),
    (InvalidResource, Reason.INVALID_SPEC),
    (ForeignData, Reason.FOREIGN_DATA),
    (InsufficientSpace, Reason.INSUFFICIENT_SPACE),
    (BackendUnavailable, Reason.BACKEND_UNAVAILABLE),
    (KvtierError, Reason.PROVISIONING_FAILED),
)


@dataclass(frozen=True)
class TierCheck:
    """`reason` is None where a volume could be made; then `backend` would be used. `message` says what was seen."""

    reason: Reason | None
    message: str
    backend: BackendName | None = None


def check_tier(node: Node, tier: KVCacheTier) -> TierCheck:
    """Look now. Raises nothing that is about the tier."""
    try:
        refuse_nested(node, tier)
        with node.places.tier_directory(tier.spec.path, create=True) as directory:
            path = directory.path

            def known() -> set[str]:
                return {row.volume_id for row in node.ledger.volumes() if os.path.dirname(row.place) == path}

            node.places.refuse_foreign(directory, known)
            backend, reasons = choose_backend(tier, directory, device=_device_to_look_at(node, tier))
            refuse_too_large(directory, tier, backend)
    except OSError as error:
        return TierCheck(Reason.PROVISIONING_FAILED, str(refused(error, tier.spec.path)))
    except KvtierError as error:
        return TierCheck(next(reason for kind, reason in _REASONS if isinstance(error, kind)), str(error))
    return TierCheck(None, f"{backend.name.value}: {reasons[backend.name]}", backend.name)


def _device_to_look_at(node: Node, tier: KVCacheTier) -> str | None:
    """The tier's, unless a volume of kvtier's has it: then it is in use, and holds data, which is no news."""
    device = tier.spec.device
    if device is None or any(not row.is_terminal and row.spec.get("device") == device for row in node.ledger.volumes()):
        return None
    return device
