"""Does what `planning` says for one tier, step by step, each step guarded by the version of the object it was decided on.

What a write returns goes into the view at once, and the plan is made anew until nothing is left to do. A conflict or a missing
object means that memory was old: the objects are read again, and so is the decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from datetime import UTC, datetime
from typing import Final

import structlog

from kvtier_api.erasure import ErasureState, KVCacheErasureStatus
from kvtier_api.errors import InvalidResource
from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState
from kvtier_operator import writing
from kvtier_operator.announcing import Announcement
from kvtier_operator.conditions import ENDING
from kvtier_operator.event_poster import EventPoster
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import (
    ErasureFacts,
    Key,
    TierFacts,
    VolumeFacts,
    erasure_facts,
    tier_facts,
    volume_facts,
)
from kvtier_operator.history import DEFAULT_LIMIT
from kvtier_operator.kinds import ERASURES, TIERS, VOLUMES
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.places import Place
from kvtier_operator.planning import Plan, Snapshot, own_places, plan
from kvtier_operator.problems import AlreadyThere, ApiProblem, Conflict, Missing, Refused, RightMissing
from kvtier_operator.releasing import VolumeStep, holds
from kvtier_operator.requests import FROM_VOLUME
from kvtier_operator.telling import Teller, of_late
from kvtier_operator.view import View

__all__ = ["Reconciler"]

log = structlog.get_logger(__name__)
_ROUNDS: Final = 4
_GONE: Final = 2**63
_ENDED: Final = frozenset({ErasureState.COMPLETE, ErasureState.FAILED})
_CAN_WAIT: Final = frozenset({"requests", "tier_status", "announcements"})
"""Parts of a plan that say what is. The others do something."""
_NEWS_AT_MOST: Final = 10_000
"""Events of one tier that wait for the API server."""


class Reconciler:
    def __init__(
        self,
        kube: Kube,
        view: View,
        poster: EventPoster,
        metrics: Metrics,
        *,
        history_limit: int = DEFAULT_LIMIT,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        tell_later: Callable[[Key], None] | None = None,
        look_at: Callable[[Key], None] = lambda _: None,
    ) -> None:
        """`tell_later`: somebody will call `tell`, so that no tier's status waits for another's events; None: told at once.

        `look_at`: a tier that what was read or written here concerns, beside the one in hand; no event tells of it any more.
        """
        self._kube = kube
        self._view = view
        self._teller = Teller(poster)
        self._metrics = metrics
        self._history_limit = history_limit
        self._now = now
        self._seen: dict[Key, dict[str, VolumeState | None]] = {}
        self._said: dict[Key, set[Announcement]] = {}
        self._tell_later = tell_later
        self._look_at = look_at
        self._news: dict[Key, list[Announcement]] = {}
        self._moving: set[Key] = set()
        self._unrecordable: set[str] = set()
        self._ending_since_s: dict[Key, dict[str, float]] = {}

    def begin(self) -> None:
        """What is there when this controller begins is no news, but for what the one before may have written and not told."""
        for volume in self._view.all_volumes():
            self._seen.setdefault(volume.tier, {})[volume.uid] = volume.state
        for key in self._view.tier_keys():
            if (tier := self._view.tier(key)) is not None and (untold := of_late(tier, self._now())):
                self._teller.owe(key, untold)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one tier to rest. Returns the seconds after which to look again, or None. Raises ApiProblem, NotLeading."""
        self._moving.add(key)
        try:
            again_in_s = await self._to_rest(key)
        finally:
            if self._tell_later is not None and (key in self._news or self._teller.has(key)):
                self._tell_later(key)
        if self._tell_later is not None:
            return again_in_s
        untold_in_s = await self.tell(key)
        return min((it for it in (again_in_s, untold_in_s) if it is not None), default=None)

    async def tell(self, key: Key) -> float | None:
        """Post the tier's events. Returns the seconds after which to try again, or None. Raises NotLeading."""
        while news := self._news.get(key):
            await self._teller.tell(key, news.pop(0))
        self._news.pop(key, None)
        if key in self._moving:  # whether what was planned is true is known at rest; `reconcile` asks again then
            return None
        return await self._teller.settle(key, self._view.tier(key), self._view.erasures(key))

    async def _to_rest(self, key: Key) -> float | None:
        reports = set()
        for left in range(_ROUNDS, -1, -1):
            snapshot = self._snapshot(key)
            todo = plan(snapshot)
            if not todo.parts():
                self._measure(key)
                self._moving.discard(key)
                return todo.again_in_s
            reports.add(_reports(snapshot))
            if len(reports) > 1 and _CAN_WAIT.issuperset(todo.parts()):
                # There is news since the first write: others have their turn, and all that comes meanwhile is one write.
                return 0.0
            if not left:
                break
            self._teller.keep(key, todo.announcements)
            try:
                await self._do(snapshot, todo)
            except (Conflict, Missing) as error:
                log.info("memory was old", tier=_name(key), error=str(error))
                await self._read_again(key)
        if len(reports) > 1:  # agents report faster than a round takes: that is no failure
            return 0.0
        raise ApiProblem(
            f"not at rest after {_ROUNDS} rounds; to do: {', '.join(todo.parts())}",
            obj=_name(key),
            remedy="tried again",
        )

    def _snapshot(self, key: Key) -> Snapshot:
        volumes = self._view.volumes(key)
        return Snapshot(
            key=key,
            now=self._now(),
            tier=self._view.tier(key),
            volumes=volumes,
            erasures=self._view.erasures(key),
            around=self._view.surroundings(volumes),
            path_taken_by=self._view.path_taken_by(key),
            ending_s=self._ending_s(key, volumes),
            seen=self._seen.get(key, {}),
            said=self._said.get(key, ()),
            unrecordable=self._unrecordable,
            history_limit=self._history_limit,
        )

    def _ending_s(self, key: Key, volumes: Sequence[VolumeFacts]) -> dict[str, float]:
        now_s = time.monotonic()
        before = self._ending_since_s.pop(key, {})
        since = {volume.uid: before.get(volume.uid, now_s) for volume in volumes if volume.state in ENDING}
        if since:
            self._ending_since_s[key] = since
        return {uid: now_s - at_s for uid, at_s in since.items()}

    async def _do(self, snapshot: Snapshot, todo: Plan) -> None:
        key = snapshot.key
        tier = self._view.tier(key)
        if todo.hold_tier and tier is not None:
            patch = writing.held(list(tier.meta.finalizers), tier.meta.resource_version)
            self._take(tier_facts(await self._kube.merge(TIERS, *key, patch)))
        for place, step in todo.volume_steps:
            await self._volume_step(place, step)
        for request, request_status in todo.requests:
            if request_status.state in _ENDED:
                await self._see_its_volumes(request)
                await self._see_its_records(request, request_status)
            body = await self._kube.apply_status(ERASURES, writing.erasure_status(request, request_status))
            self._take(erasure_facts(body))
        tier = self._view.tier(key)
        if todo.tier_status is not None and tier is not None:
            body = await self._kube.apply_status(TIERS, writing.tier_status(tier, todo.tier_status))
            self._take(tier_facts(body))
        self._announce(snapshot, todo)
        for erasure in todo.forget_erasures:
            await self._forget_erasure(erasure)
        for place in todo.forget_volumes:
            await self._forget_volume(place.volume)
        if todo.release_tier:
            await self._release(key)
            for announcement in todo.announcements:
                if announcement.reason is EventReason.DELETION_DONE:
                    self._add_news(key, announcement)

    async def _see_its_volumes(self, request: ErasureFacts) -> None:
        """Before the last word on a request, which no agent looks at any more: memory is not trusted, as in `_release`.

        Raises Conflict where the API server has the tier, or a volume of it that has not ended, and memory has not.
        """
        known = {volume.uid for volume in self._view.volumes(request.tier)}
        for volume in await self._list_volumes(request.tier):
            if not volume.is_final and volume.uid not in known:
                raise Conflict(f"its volume {volume.name} is newer than memory", obj="/".join(request.key))
        if self._view.tier(request.tier) is None:
            namespace, name = request.tier
            try:
                await self._kube.get(TIERS, name, namespace)
            except Missing:
                return
            raise Conflict(f"its tier {name} is newer than memory", obj="/".join(request.key))

    async def _see_its_records(self, request: ErasureFacts, status: KVCacheErasureStatus) -> None:
        """The same. An agent makes the record first, and then says `Erased`; but events of records and of volumes come on their
        own ways, and what a record has (how, and whether verified) cannot be added later.

        Raises Conflict where the API server has a record that memory has not.
        """
        unproven = {it.volume_id for it in status.volumes if it.technique == FROM_VOLUME}
        if not unproven:
            return
        known = {(it.key, it.version) for it in self._view.erasures(request.tier)}
        async for body in self._kube.list(ERASURES, request.namespace, fields=_of_tier(request.tier)):
            try:
                fact = erasure_facts(body)
            except InvalidResource:
                continue  # `_read_again` says so
            if fact.volume_id in unproven and fact.is_complete and (fact.key, fact.version) not in known:
                raise Conflict(f"its record {fact.name} is newer than memory", obj="/".join(request.key))

    async def _volume_step(self, place: Place, step: VolumeStep) -> None:
        volume = place.volume
        log.info("volume step", step=step.name, volume=volume.name, tier=_name(volume.tier))
        match step:
            case VolumeStep.HOLD:
                patch = writing.held(list(volume.finalizers), volume.version)
                self._take(volume_facts(await self._kube.merge(VOLUMES, *volume.key, patch)))
            case VolumeStep.ABANDON:
                body = writing.abandoned(volume, place.unheard, self._now())
                self._take(volume_facts(await self._kube.apply_status(VOLUMES, body)))
            case VolumeStep.RECORD_KEYS_LOST:
                await self._record_keys_lost(place)
            case VolumeStep.RELEASE:
                patch = writing.released(list(volume.finalizers), volume.version)
                fact = volume_facts(await self._kube.merge(VOLUMES, *volume.key, patch))
                if fact.finalizers:
                    self._take(fact)
                else:
                    self._drop(VolumeFacts, volume.key)

    async def _record_keys_lost(self, place: Place) -> None:
        body = writing.keys_lost_record(place.volume, place.keys_lost)
        try:
            made = await self._kube.create(ERASURES, body)
        except AlreadyThere:  # this controller, or the one before it, was stopped between the two writes
            made = await self._kube.get(ERASURES, body["metadata"]["name"], place.volume.namespace)
        except RightMissing:
            raise
        except (
            Refused
        ) as error:  # a namespace that is being deleted takes no new objects; it must not wait for this one
            log.warning("no record of lost keys", volume=place.volume.name, proof=place.keys_lost, error=str(error))
            self._unrecordable.add(body["metadata"]["name"])
            return
        fact = erasure_facts(made)
        if not fact.is_complete:
            status = writing.keys_lost_status(made, place.volume, place.keys_lost, self._now())
            fact = erasure_facts(await self._kube.apply_status(ERASURES, status))
        self._take(fact)

    def _announce(self, snapshot: Snapshot, todo: Plan) -> None:
        """After the writes that they tell of: `tell` posts them, and what cannot be told is told later (`telling`)."""
        for announcement in todo.announcements:
            if announcement.reason is not EventReason.DELETION_DONE:  # not done before `_release` looked
                self._add_news(snapshot.key, announcement)
            if announcement.reason is EventReason.ABANDON_REFUSED:
                self._said.setdefault(snapshot.key, set()).add(announcement)
        # What was planned for, not what memory says by now: a state that came meanwhile is still to be told.
        self._seen[snapshot.key] = {volume.uid: volume.state for volume in snapshot.volumes}

    def _add_news(self, key: Key, announcement: Announcement) -> None:
        news = self._news.setdefault(key, [])
        news.append(announcement)
        if len(news) > _NEWS_AT_MOST:
            log.warning("event not posted", reason=news.pop(0).reason.value, error="too many before it")

    async def _forget_erasure(self, erasure: ErasureFacts) -> None:
        try:
            await self._kube.delete(ERASURES, erasure.namespace, erasure.name, uid=erasure.uid, version=erasure.version)
        except Missing:
            pass  # gone already, which is what was wanted
        self._drop(ErasureFacts, erasure.key)

    async def _forget_volume(self, volume: VolumeFacts) -> None:
        try:
            await self._kube.delete(VOLUMES, volume.namespace, volume.name, uid=volume.uid, version=volume.version)
        except Missing:
            self._drop(VolumeFacts, volume.key)
            return
        await self._read_volume(volume.key)

    async def _release(self, key: Key) -> None:
        """The last step of a deletion. Memory is not trusted: the volumes are read from the API server first."""
        fresh = await self._list_volumes(key)
        for volume in fresh:
            self._take(volume)
        tier = self._view.tier(key)
        if tier is None:
            return
        waiting = holds(own_places(tier, fresh, self._view.surroundings(fresh)))
        if waiting:
            raise Conflict(f"{waiting[0].place.volume.name} still holds the tier: {waiting[0].why}", obj=_name(key))
        patch = writing.released(list(tier.meta.finalizers), tier.meta.resource_version)
        body = await self._kube.merge(TIERS, *key, patch)
        log.info("tier released", tier=_name(key))
        if body["metadata"].get("finalizers"):
            self._take(tier_facts(body))
        elif (known := self._view.tier(key)) is not None and known.meta.uid == tier.meta.uid:
            self._drop(TierFacts, key)  # not one that was made anew meanwhile

    async def _list_volumes(self, key: Key) -> list[VolumeFacts]:
        """The tier's volumes as the API server has them now. Raises ApiProblem."""
        return [volume_facts(body) async for body in self._kube.list(VOLUMES, key[0], fields=_of_tier(key))]

    async def _read_again(self, key: Key) -> None:
        """The tier and all that belongs to it, from the API server. What comes to memory meanwhile is newer than the answers."""
        tier = self._view.tier(key)
        volumes_before = {(it.key, it.version) for it in self._view.volumes(key)}
        erasures_before = {(it.key, it.version) for it in self._view.erasures(key)}
        try:
            self._take(tier_facts(await self._kube.get(TIERS, key[1], key[0])))
        except Missing:
            if self._view.tier(key) == tier:
                self._drop(TierFacts, key)
        volumes = await self._list_volumes(key)
        for volume in volumes:
            self._take(volume)
        listed = {volume.key for volume in volumes}
        for known in self._view.volumes(key):
            if known.key not in listed and (known.key, known.version) in volumes_before:
                self._drop(VolumeFacts, known.key)
        erasures = set()
        async for body in self._kube.list(ERASURES, key[0], fields=_of_tier(key)):
            try:
                fact = erasure_facts(body)
            except InvalidResource as error:
                log.warning("an erasure cannot be read", error=str(error))
                continue
            erasures.add(fact.key)
            self._take(fact)
        for erasure in self._view.erasures(key):
            if erasure.key not in erasures and (erasure.key, erasure.version) in erasures_before:
                self._drop(ErasureFacts, erasure.key)

    def _take(self, fact: TierFacts | VolumeFacts | ErasureFacts) -> None:
        own = fact.key if isinstance(fact, TierFacts) else fact.tier
        for other in self._view.take(fact) - {own}:
            self._look_at(other)

    def _drop(self, kind: type[TierFacts | VolumeFacts | ErasureFacts], key: Key) -> None:
        concerned = self._view.drop(kind, key, _GONE)
        if kind is TierFacts:  # what else goes concerns the tier in hand alone
            for other in concerned - {key}:
                self._look_at(other)

    async def _read_volume(self, key: Key) -> None:
        try:
            self._take(volume_facts(await self._kube.get(VOLUMES, key[1], key[0])))
        except Missing:
            self._drop(VolumeFacts, key)

    def _measure(self, key: Key) -> None:
        """Figures of a tier at rest, and an end to what is remembered of one that is gone."""
        tier = self._view.tier(key)
        self._metrics.tiers(self._view.tier_count())
        volumes = self._view.volumes(key)
        if tier is not None and tier.status is not None:
            around = self._view.surroundings(volumes)
            places = own_places(tier, volumes, around)
            silent = sum(1 for it in places if it.unheard and it.silence is Reason.NODE_UNREACHABLE)
            self._metrics.tier(key, tier.status, silent)
        elif tier is None:
            self._metrics.tier_gone(key)
            self._said.pop(key, None)
            if not volumes:
                self._seen.pop(key, None)


def _reports(snapshot: Snapshot) -> Hashable:
    """What agents and people said so far. Own writes do not change it."""
    volumes = (
        (it.uid, it.state, it.state_since, it.deleting, it.abandon, *it.conditions.values()) for it in snapshot.volumes
    )
    return frozenset(volumes), frozenset(it.uid for it in snapshot.erasures if it.is_record)


def _of_tier(key: Key) -> str:
    """The field selector of what belongs to a tier."""
    return f"spec.tierRef.name={key[1]}"


def _name(key: Key) -> str:
    return "/".join(key)
