"""What may be forgotten: old erasures beyond the limit, and erased volumes beyond it. Nothing that is open, ever."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from kvtier_api.volume import VolumeState
from kvtier_operator.facts import ErasureFacts
from kvtier_operator.places import Place

__all__ = ["DEFAULT_LIMIT", "erasures_to_forget", "volumes_to_forget"]

DEFAULT_LIMIT: Final = 100
"""Complete erasures of each tier, and erased volumes of each tier, that stay."""
_FIRST: Final = datetime.min.replace(tzinfo=UTC)


def erasures_to_forget(erasures: Iterable[ErasureFacts], limit: int) -> list[ErasureFacts]:
    """The oldest complete ones beyond `limit`. A record that an open request needs stays."""
    erasures = list(erasures)
    asked = {erasure.uid for erasure in erasures if not erasure.is_record and not erasure.is_complete}
    complete = [erasure for erasure in erasures if erasure.is_complete and erasure.request_uid not in asked]
    complete.sort(key=lambda it: (it.end or _FIRST, it.created_at, it.name), reverse=True)
    return complete[limit:]


def volumes_to_forget(places: Iterable[Place], limit: int) -> list[Place]:
    """The oldest Erased ones beyond `limit`. An abandoned place is never forgotten."""
    erased = [place for place in places if place.volume.state is VolumeState.ERASED and not place.volume.deleting]
    erased.sort(key=lambda it: (it.volume.receipt.time if it.volume.receipt else _FIRST, it.volume.name), reverse=True)
    return erased[limit:]
