"""The cluster's side of the agent: reports, watches and wishes, as tasks beside the CSI service.

Watched are this node's own volumes (selectable field `spec.nodeName`), requests to erase, and the tiers that have a volume here:
each tier by its name, so that a thousand others cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from lightkube import AsyncClient
from lightkube.models.core_v1 import ObjectReference
from lightkube.operators import not_exists

from kvtier_api.documents import parse_object
from kvtier_api.errors import InvalidResource, KvtierError, NotFound
from kvtier_api.meta import API_VERSION
from kvtier_api.volume import KVCacheVolume
from kvtier_node.cluster.announcing import Announcer
from kvtier_node.cluster.api import ApiCluster
from kvtier_node.cluster.client import ERASURES, TIERS, VOLUMES, plain, translated
from kvtier_node.cluster.errors import ApiUnavailable
from kvtier_node.cluster.objects import VOLUME_LABEL
from kvtier_node.cluster.reporting import Reporter
from kvtier_node.cluster.rights import MissingRights
from kvtier_node.cluster.unknown import unknown_status
from kvtier_node.cluster.volume_conditions import Seen
from kvtier_node.cluster.watching import Body, Selection, Watcher
from kvtier_node.cluster.wishes import Ending, GivingUp, Wish, wishes
from kvtier_node.cluster.writing import Writer
from kvtier_node.csi.rows import of_pods
from kvtier_node.csi.surroundings import Guards
from kvtier_node.event_log import Log
from kvtier_node.guarding import stop_pod
from kvtier_node.ledger import ABANDON, VolumeRow
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.tasks import end_tasks, wait_for_event
from kvtier_node.threads import Threads

__all__ = ["ClusterPart"]

_ROUND_S: Final = 1.0
_AT_MOST_EVERY_S: Final = 0.1
_END_S: Final = 5.0
_AGAIN_S: Final = 5.0
_TIER_OBJECT: Final = "KVCacheTier "


class ClusterPart:
    """`start` once the node is open; `close` at the end. `cluster` is what the CSI service asks."""

    def __init__(self, client: AsyncClient, reporter: Reporter, log: Log) -> None:
        self._client = client
        self._reporter = reporter
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._tiers: dict[tuple[str, str], tuple[Watcher, asyncio.Task[None]]] = {}
        self._deleted_tiers: set[str] = set()
        self._busy: set[str] = set()
        self._carried_out: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._relisted = False
        self._lost: set[str] = set()
        self._unknown: dict[str, Body] = {}

    def start(self, node: Node, guards: Guards, threads: Threads) -> ApiCluster:
        """Begin to report and to watch. Raises nothing that the API server does."""
        self._node, self._guards, self._threads = node, guards, threads
        writer = Writer(self._client, node.name)
        self._writer = writer
        rights = MissingRights()
        announcer = Announcer(node, writer, threads=threads, find=self._reference, rights=rights, log=self._log)
        self._reporter.bind(
            node, writer, announcer, threads=threads, seen=self._seen, tier_gone=self._is_tier_gone, rights=rights
        )
        self._volumes = Watcher(
            self._client,
            Selection(VOLUMES, fields={"spec.nodeName": node.name}),
            changed=self._changed.set,
            listed=self._volumes_listed,
            deleted=self._volume_deleted,
            log=self._log,
        )
        self._requests = Watcher(
            self._client,
            Selection(ERASURES, labels={VOLUME_LABEL: not_exists()}),
            changed=self._changed.set,
            log=self._log,
        )
        for work in (self._reporter.run(), self._volumes.run(), self._requests.run(), self._rounds()):
            self._start(work)
        return ApiCluster(self._client, self._reporter, node.name)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("cluster-task-ended", error=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """End the tasks, and the connections."""
        if left := await end_tasks(self._tasks, limit_s=_END_S):
            self._log.warning("cluster-tasks-left", tasks=left)
        await self._client.close()

    def _seen(self, volume_id: str) -> Seen:
        watch = self._guards.watch_of(volume_id)
        failure = watch.failure if watch is not None else ""
        return Seen(self._guards.measured(volume_id), self._guards.host(), failure)

    # -- what the API has of this node's volumes

    def _by_name(self) -> dict[str, Body]:
        return {str(body["metadata"]["name"]): body for body in self._volumes.objects.values()}

    def _volumes_listed(self) -> None:
        self._relisted = True

    def _volume_deleted(self, body: Body) -> None:
        """The record of a place must not go before the place does. That of an ended one may: the controller forgets old ones."""
        self._lost.add(str(body["metadata"]["name"]))

    def _compare(self, objects: dict[str, Body], rows: Sequence[VolumeRow], ended: dict[str, VolumeRow | None]) -> None:
        """After a list: what the API has not, or has otherwise, is told anew. The node is right, the API is a copy.

        `ended`: the ledger's rows of those of `objects` that are not among `rows`. It has each volume before the API does.
        """
        self._unknown.clear()
        self._lost |= {row.volume_id for row in rows if row.volume_id not in objects}
        living = {row.volume_id: row for row in rows}
        for name, body in objects.items():
            known = living.get(name) or ended.get(name)
            if known is None:
                self._unknown[name] = body
                continue
            status = body.get("status") or {}
            self._reporter.adopt(name, _conditions(body))
            if status.get("state") != known.state.value:
                self._reporter.again(name)

    async def _tell_unknown(self) -> None:
        """Volumes of this node by the API that its ledger does not have: nothing measured of them stands any more."""
        unknown, self._unknown = self._unknown, {}
        for name, body in unknown.items():
            status = unknown_status(body, self._node.name, datetime.now(UTC))
            if status is None:
                continue
            self._log.warning("unknown-volume", volume=name, remedy="see its condition Scrubbed")
            try:
                await self._writer.unknown(body, status)
            except ApiUnavailable as error:
                self._unknown[name] = body
                self._log.warning("unknown-volume-not-told", volume=name, error=str(error))
            except KvtierError as error:  # changed or deleted meanwhile: the next list has it as it is
                self._log.warning("unknown-volume-not-told", volume=name, error=str(error))

    def _rows_of(self, names: Sequence[str]) -> dict[str, VolumeRow | None]:
        found: dict[str, VolumeRow | None] = {}
        for name in names:
            try:
                found[name] = self._node.ledger.get(name)
            except NotFound:
                found[name] = None
        return found

    # -- the rounds

    async def _rounds(self) -> None:
        while True:
            try:
                await self._round()
            except (KvtierError, OSError) as error:
                self._log.error("cluster-round-failed", error=str(error))
            await wait_for_event(self._changed, _ROUND_S)
            self._changed.clear()
            await asyncio.sleep(_AT_MOST_EVERY_S)  # many changes at once are one round

    async def _round(self) -> None:
        rows = [row for row, _ in await self._threads.run(lambda: of_pods(self._node))]
        self._follow_tiers(rows)
        if not self._volumes.synced:
            return
        if self._relisted:
            self._relisted = False
            known = {row.volume_id for row in rows}
            objects = self._by_name()
            others = [name for name in objects if name not in known]
            self._compare(objects, rows, await self._threads.run(lambda: self._rows_of(others)))
        await self._tell_unknown()
        lost, self._lost = self._lost, set()
        for row in rows:
            if row.volume_id in lost:
                self._reporter.lost(row.volume_id)
        self._reporter.look_at(rows)
        for wish in wishes(
            rows,
            volumes=self._by_name(),
            deleting_tiers=self._deleting(),
            requests=list(self._requests.objects.values()),
        ):
            self._carry_out(wish)

    def _follow_tiers(self, rows: Sequence[VolumeRow]) -> None:
        """Watch each tier that has a volume here, and no other."""
        wanted = {(row.tier_namespace, row.tier_name) for row in rows}
        for namespace, name in wanted - set(self._tiers):
            watcher = Watcher(
                self._client,
                Selection(TIERS, namespace, fields={"metadata.name": name}),
                changed=self._changed.set,
                deleted=lambda body: self._deleted_tiers.add(str(body["metadata"]["uid"])),
                log=self._log,
            )
            self._tiers[namespace, name] = (watcher, self._start(watcher.run()))
        for key in set(self._tiers) - wanted:
            self._tiers.pop(key)[1].cancel()

    def _is_tier_gone(self, row: VolumeRow) -> bool:
        """Only where it is known: its watch has listed, and it is not there."""
        found = self._tiers.get((row.tier_namespace, row.tier_name))
        return found is not None and found[0].synced and row.tier_uid not in found[0].objects

    def _deleting(self) -> dict[str, bool]:
        found = dict.fromkeys(self._deleted_tiers, True)
        for watcher, _ in self._tiers.values():
            for uid, body in watcher.objects.items():
                found[uid] = body["metadata"].get("deletionTimestamp") is not None
        return found

    # -- wishes

    def _carry_out(self, wish: Wish) -> None:
        """Each in a task of its own: to end a pod's processes takes its time. Not again at once."""
        now = asyncio.get_running_loop().time()
        if wish.volume_id in self._busy or now - self._carried_out.get(wish.volume_id, -_AGAIN_S) < _AGAIN_S:
            return
        self._busy.add(wish.volume_id)
        self._carried_out[wish.volume_id] = now
        self._start(self._do(wish))

    async def _do(self, wish: Wish) -> None:
        try:
            if isinstance(wish, GivingUp):
                await self._threads.run(lambda: self._give_up(wish))
                return
            watch = self._guards.watch_of(wish.volume_id)
            if watch is None:
                return  # it is being published just now, or taken over: the next round finds it
            async with watch.turn:
                self._log.info("ending", volume=wish.volume_id, trigger=wish.trigger.value, request=wish.request)
                await self._threads.run(lambda: self._end(watch.live, wish))
        except (KvtierError, OSError) as error:
            self._log.error("wish-failed", volume=wish.volume_id, error=str(error))
        finally:
            self._busy.discard(wish.volume_id)

    def _end(self, live: LiveVolume, wish: Ending) -> None:
        pod = PodConsumer.from_record(live.row.consumer)
        if pod is None or live.row.is_terminal:
            return
        if wish.request is not None and live.row.facts.get("request") != wish.request:
            live.row = self._node.ledger.note(live.volume_id, facts={"request": wish.request})
        stop_pod(self._node, live, pod, wish.trigger)

    def _give_up(self, wish: GivingUp) -> None:
        """A request of the ledger: the volume's guardian abandons it, with a receipt."""
        requests = self._node.ledger.open_requests()
        if any(it.scope == ABANDON and it.argument == wish.volume_id for it in requests):
            return
        row = self._node.ledger.get(wish.volume_id)
        self._node.ledger.add_request(row.tier_key, ABANDON, wish.reason, argument=wish.volume_id)

    # -- events

    async def _reference(self, about: str) -> ObjectReference | None:
        """The API object that an event of the ledger is about."""
        body = self._by_name().get(about)
        if body is not None:
            return _reference_to(body)
        if not about.startswith(_TIER_OBJECT):
            return None
        namespace, _, name = about.removeprefix(_TIER_OBJECT).partition("/")
        with translated(about):
            return _reference_to(plain(await self._client.get(TIERS, name, namespace=namespace)))


def _reference_to(body: Body) -> ObjectReference:
    metadata = body["metadata"]
    return ObjectReference(
        apiVersion=API_VERSION,
        kind=str(body["kind"]),
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
    )


def _conditions(body: Body) -> list[Any]:
    try:
        volume = parse_object(body, kind=KVCacheVolume)
    except InvalidResource:
        return []
    return list(volume.status.conditions) if volume.status is not None else []
