"""Events that are still to be told: the API server refused one for a while, or the answer to the write behind it was lost.

An event is planned with a write and posted after it. Where anything fails in between, the write may have been done, and the
next plan has no event for it any more. So what was planned is kept, and told once the tier is at rest, if it is true by then.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final, TypeVar

import structlog

from kvtier_api.erasure import ErasureState
from kvtier_operator.announcing import Announcement, Regarding, of_tier
from kvtier_operator.event_poster import EventPoster
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import ErasureFacts, Key, TierFacts
from kvtier_operator.problems import ApiProblem, Refused, RightMissing

__all__ = ["Teller", "of_late", "still_true"]

log = structlog.get_logger(__name__)
_FIRST_S: Final = 2.0
_LONGEST_S: Final = 300.0
_AT_MOST: Final = 100
"""Of one tier. They are news, and the status says what they say."""
_HAND_OVER: Final = timedelta(minutes=2)
_SAME_NOTE: Final = frozenset({EventReason.TIER_DECLARED, EventReason.TIER_READY, EventReason.INVALID_SPEC})
_ENDS: Final = {
    EventReason.ERASURE_COMPLETE: ErasureState.COMPLETE,
    EventReason.ERASURE_FAILED: ErasureState.FAILED,
}


KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
_What = tuple[Regarding, EventReason, str]


def _what(of: Announcement) -> _What:
    """What it is about: of two about the same the later one counts. Lost keys are those of one volume of many."""
    return of.regarding, of.reason, of.note if of.reason is EventReason.KEYS_LOST else ""


@dataclass
class _OfTier:
    planned: dict[_What, Announcement] = field(default_factory=dict)
    """Their write may or may not have been done."""
    refused: dict[Announcement, None] = field(default_factory=dict)
    """They are true, and the API server did not take them, or did not say so."""
    tries: int = 0
    again_at_s: float = 0.0


class Teller:
    """For one term. A failure is logged; nobody waits for an event."""

    def __init__(self, poster: EventPoster) -> None:
        self._poster = poster
        self._left: dict[Key, _OfTier] = {}

    async def tell(self, key: Key, announcement: Announcement) -> None:
        left = self._left.get(key)
        if left is not None:
            left.planned.pop(_what(announcement), None)
        try:
            await self._poster.post(announcement)
        except ApiProblem as error:
            _not_posted(announcement, error)
            if _is_final(error):
                return
            left = self._left.setdefault(key, _OfTier())
            left.refused[announcement] = None
            _bound(left.refused)
            self._later(left)

    def has(self, key: Key) -> bool:
        """Whether something of the tier is still to be told."""
        return key in self._left

    def keep(self, key: Key, announcements: Iterable[Announcement]) -> None:
        """Before a plan is carried out: what is not told when it ends, or fails, is looked at again at rest."""
        for announcement in announcements:
            planned = self._left.setdefault(key, _OfTier()).planned
            planned[_what(announcement)] = announcement
            _bound(planned)

    def owe(self, key: Key, announcements: Iterable[Announcement]) -> None:
        """What is true, and may or may not have been told."""
        for announcement in announcements:
            refused = self._left.setdefault(key, _OfTier()).refused
            refused[announcement] = None
            _bound(refused)

    async def settle(self, key: Key, tier: TierFacts | None, erasures: Collection[ErasureFacts]) -> float | None:
        """At rest: tell what is left. Returns the seconds after which to try again, or None."""
        left = self._left.get(key)
        if left is None:
            return None
        planned, left.planned = left.planned, {}
        for announcement in planned.values():
            if still_true(announcement, tier, erasures):
                await self.tell(key, announcement)
        if left.refused and time.monotonic() >= left.again_at_s:
            refused, left.refused = left.refused, {}
            for announcement in refused:
                try:
                    await self._poster.post(announcement, again=True)
                except ApiProblem as error:
                    _not_posted(announcement, error)
                    if not _is_final(error):
                        left.refused[announcement] = None
            self._later(left)
        if not left.refused:
            self._left.pop(key, None)
            return None
        return max(0.1, left.again_at_s - time.monotonic())

    @staticmethod
    def _later(left: _OfTier) -> None:
        if left.refused:
            left.again_at_s = time.monotonic() + min(_LONGEST_S, _FIRST_S * 2 ** min(left.tries, 16))
            left.tries += 1


def of_late(tier: TierFacts, now: datetime) -> list[Announcement]:
    """What a controller that was stopped between a status and its event may have left untold: of the last minutes alone.

    Those whose note is the same whoever writes it, so that one that was told is found by its name.
    """
    status = tier.status
    if status is None:
        return []
    recent = [it for it in status.conditions if now - it.last_transition_time < _HAND_OVER]
    created = tier.meta.creation_timestamp
    is_new = created is not None and now - created < _HAND_OVER
    found = of_tier(replace(tier, status=None), status.model_copy(update={"conditions": recent}))
    return [it for it in found if it.reason in _SAME_NOTE and (is_new or it.reason is not EventReason.TIER_DECLARED)]


def still_true(announcement: Announcement, tier: TierFacts | None, erasures: Collection[ErasureFacts]) -> bool:
    """Whether the write that it was planned with was done, as the API server has it now.

    Events of a volume's state are planned again by themselves, so they are none of these.
    """
    about, reason = announcement.regarding, announcement.reason
    there = tier is not None and tier.meta.uid == about.uid
    match reason:
        case EventReason.DELETION_DONE:
            return not there
        case EventReason.KEYS_LOST:
            name = announcement.note.partition(":")[0]
            return any(erasure.volume_id == name for erasure in erasures)
        case EventReason.DELETION_WAITS:
            return there and tier is not None and tier.deleting
        case EventReason.ERASURE_COMPLETE | EventReason.ERASURE_FAILED:
            return any(it.uid == about.uid and it.state is _ENDS[reason] for it in erasures)
        case _:
            if tier is None or not there or tier.status is None:
                return False
            return announcement in of_tier(replace(tier, status=None), tier.status)


def _bound(of: dict[KeyT, ValueT]) -> None:
    if len(of) > _AT_MOST:
        del of[next(iter(of))]


def _is_final(error: ApiProblem) -> bool:
    """Whether it would be refused again. A right may come: an API server that starts has not read the roles yet."""
    return isinstance(error, Refused) and not isinstance(error, RightMissing)


def _not_posted(announcement: Announcement, error: ApiProblem) -> None:
    log.warning("event not posted", reason=announcement.reason.value, error=str(error))
