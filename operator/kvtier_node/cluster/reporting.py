"""What the ledger holds, told to the API server: in order, after the fact, again and again until it is told.

Each arrow of a pod's volume makes the volume due. A report is of the row as it is now: the object, the record of an erasure,
then the status, so that whoever reads `Erased` finds the record, and last the event. An outage changes nothing on the node;
when it is over, what is due is told in the order of the last arrows. `cursor` remembers over restarts. Only `recorded` makes
anybody wait: a volume is shown to its pod once its object is in the API.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from kvtier_api.errors import InvalidResource, KvtierError, NotFound, NotPermitted
from kvtier_api.meta import Condition
from kvtier_api.volume import VolumeState
from kvtier_node.cluster.announcing import Announcer
from kvtier_node.cluster.cursor import Cursor, CursorFile, identity_of
from kvtier_node.cluster.errors import ApiUnavailable
from kvtier_node.cluster.objects import volume_status
from kvtier_node.cluster.rights import MissingRights
from kvtier_node.cluster.volume_conditions import Seen, differ, volume_conditions
from kvtier_node.cluster.writing import Writer
from kvtier_node.event_log import Log
from kvtier_node.ledger import Transition, VolumeRow
from kvtier_node.node import Node
from kvtier_node.pods.consumer import PodIdentity, pod_of
from kvtier_node.receipts import Receipt
from kvtier_node.tasks import wait_for_event
from kvtier_node.threads import Threads

__all__ = ["Due", "Reporter"]

_ROUND_S: Final = 2.0
_FIRST_RETRY_S: Final = 0.5
_LAST_RETRY_S: Final = 30.0
_REFUSED_AGAIN_S: Final = 60.0
_RECORDED_S: Final = 30.0


class Arrows(NamedTuple):
    """The numbers of the first and of the last arrow of a volume that were not reported."""

    first: int
    last: int


class Due:
    """Volumes that have something to report, with their arrows. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[str, Arrows] = {}
        self._last = 0

    def add(self, volume_id: str, arrow: int) -> None:
        self.put_back(volume_id, Arrows(arrow, arrow))

    def again(self, volume_id: str) -> None:
        """It is due, though no arrow says so."""
        with self._lock:
            self._due.setdefault(volume_id, Arrows(self._last + 1, self._last))

    def take(self, volume_id: str) -> Arrows:
        with self._lock:
            return self._due.pop(volume_id)

    def put_back(self, volume_id: str, arrows: Arrows) -> None:
        """They were not reported after all; others may have come meanwhile."""
        with self._lock:
            known = self._due.get(volume_id, arrows)
            self._due[volume_id] = Arrows(min(arrows.first, known.first), max(arrows.last, known.last))
            self._last = max(self._last, arrows.last)

    def in_order(self) -> list[str]:
        """By their last arrows: so records of erasures come in the order of their receipts, whatever came before them."""
        with self._lock:
            return sorted(self._due, key=lambda volume_id: self._due[volume_id].last)

    def told(self) -> int:
        """Every arrow up to this number is reported."""
        with self._lock:
            return min([self._last, *(arrows.first - 1 for arrows in self._due.values())])

    def reach(self, arrow: int) -> None:
        with self._lock:
            self._last = max(self._last, arrow)


@dataclass
class _Known:
    """What was written of a volume by this process."""

    recorded: bool = False
    """Its object is in the API: written by this process, or seen there."""
    lost: int = 0
    """How often it went from there."""
    waiters: list[asyncio.Future[None]] = field(default_factory=list)
    refusal: str = ""
    again_at: float = 0.0
    conditions: list[Condition] = field(default_factory=list)
    status: dict[str, Any] | None = None

    def settle(self, error: KvtierError | None = None) -> None:
        """Tell those who wait that it is recorded, or why it is not."""
        if error is None:
            self.recorded = True
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None) if error is None else waiter.set_exception(error)
        self.waiters.clear()


class Reporter:
    """`observe` is the ledger's observer; `run` tells what is due until it is cancelled."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._due = Due()
        self._known: dict[str, _Known] = {}
        self._receipts: dict[str, Receipt] = {}
        self._receipts_read = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._event_cursor = 0
        self.away = ""
        """Why the API server cannot be told anything now; empty while it can."""

    def bind(
        self,
        node: Node,
        writer: Writer,
        announcer: Announcer,
        *,
        threads: Threads,
        seen: Callable[[str], Seen],
        tier_gone: Callable[[VolumeRow], bool],
        rights: MissingRights,
    ) -> None:
        """Before `run`. `seen` is what the agent knows of a volume beside its row; `tier_gone`, whether its tier is."""
        self._node, self._writer, self._announcer, self._threads = node, writer, announcer, threads
        self._seen, self._tier_gone, self._rights = seen, tier_gone, rights
        self._cursor_file = CursorFile(node.state_dir)
        self._loop = asyncio.get_running_loop()

    # -- what is due

    def observe(self, arrow: Transition) -> None:
        """Of the ledger, in whatever thread."""
        self._due.add(arrow.volume_id, arrow.seq)
        self._ring()

    def again(self, volume_id: str) -> None:
        """The API has something else than the ledger: tell it anew."""
        self._of(volume_id).status = None
        self._due.again(volume_id)
        self._ring()

    def lost(self, volume_id: str) -> None:
        """The object of a living volume is not in the API any more: make it again, at once and then ever more slowly."""
        known = self._of(volume_id)
        if known.lost:
            known.again_at = asyncio.get_running_loop().time() + min(2.0**known.lost, _REFUSED_AGAIN_S)
        known.lost += 1
        known.recorded = False
        self.again(volume_id)

    def adopt(self, volume_id: str, conditions: Sequence[Condition]) -> None:
        """The object is in the API already, from before this process."""
        known = self._of(volume_id)
        if not known.conditions:
            known.conditions = list(conditions)
        known.settle()

    def _of(self, volume_id: str) -> _Known:
        return self._known.setdefault(volume_id, _Known())

    def _ring(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def recorded(self, volume_id: str) -> None:
        """Return once the volume's object is in the API. Raises ApiUnavailable after a while, or why it was refused."""
        known = self._of(volume_id)
        if known.recorded:
            return
        waiter = asyncio.get_running_loop().create_future()
        known.waiters.append(waiter)
        known.again_at = 0.0
        self._due.again(volume_id)
        self._ring()
        try:
            async with asyncio.timeout(_RECORDED_S):
                await waiter
        except TimeoutError as error:
            raise ApiUnavailable(
                f"the volume could not be put on record there within {_RECORDED_S:g} s: {self.away or 'no answer'}",
                obj=f"KVCacheVolume {volume_id}",
                remedy="kubelet asks again",
            ) from error

    # -- telling it

    async def run(self) -> None:
        """Until cancelled. Nothing that the API server does ends it."""
        await self._threads.run(self._catch_up)
        delay_s = _FIRST_RETRY_S
        while True:
            try:
                await self._round()
                self.away, delay_s = "", _FIRST_RETRY_S
            except ApiUnavailable as error:
                if not self.away:
                    self._log.warning("api-away", error=str(error), due=len(self._due.in_order()))
                self.away = str(error)
                await asyncio.sleep(delay_s * random.uniform(0.7, 1.3))  # noqa: S311  spread, not a secret
                delay_s = min(delay_s * 2, _LAST_RETRY_S)
                continue
            except (KvtierError, OSError) as error:  # the ledger is busy, or the disk full
                self._log.error("report-failed", error=str(error))
            await wait_for_event(self._wake, _ROUND_S)
            self._wake.clear()

    def _catch_up(self) -> None:
        ledger = self._node.ledger
        cursor = self._cursor_file.load(identity_of(ledger.rebuilt))
        self._event_cursor = cursor.event
        for arrow in ledger.transitions():
            self._due.reach(arrow.seq)
            if arrow.seq > cursor.arrow:
                self._due.add(arrow.volume_id, arrow.seq)

    async def _round(self) -> None:
        now = asyncio.get_running_loop().time()
        for volume_id in self._due.in_order():
            if self._of(volume_id).again_at > now:
                continue
            await self._one(volume_id)
        self._event_cursor = await self._announcer.post(self._event_cursor)
        cursor = Cursor(identity_of(self._node.ledger.rebuilt), self._due.told(), self._event_cursor)
        await self._threads.run(lambda: self._cursor_file.save(cursor))

    async def _one(self, volume_id: str) -> None:
        arrows = self._due.take(volume_id)
        try:
            await self._report(volume_id)
        except ApiUnavailable:
            self._due.put_back(volume_id, arrows)
            raise
        except (NotPermitted, InvalidResource, NotFound) as error:
            self._due.put_back(volume_id, arrows)
            self._rights.wait_for(error)
            self._refused(volume_id, error)
        except ValueError as error:  # pydantic's: a row that no object can be made of
            self._due.put_back(volume_id, arrows)
            self._refused(volume_id, InvalidResource(str(error)[:500], obj=volume_id))
        except BaseException:
            self._due.put_back(volume_id, arrows)
            raise

    def _refused(self, volume_id: str, error: KvtierError) -> None:
        """The API server does not want it: a rule of its own, or a right that is missing. Said once, tried again later."""
        known = self._of(volume_id)
        known.again_at = asyncio.get_running_loop().time() + _REFUSED_AGAIN_S
        if known.refusal != str(error):
            self._log.error("report-refused", volume=volume_id, error=str(error))
        known.refusal = str(error)
        known.settle(error)

    async def _report(self, volume_id: str) -> None:
        row = await self._threads.run(lambda: self._node.ledger.get(volume_id))
        pod = pod_of(row.consumer, row.facts)
        if pod is None:
            return  # a volume of `kvtier run`: its tier is a file on this host
        known = self._of(volume_id)
        receipt = await self._threads.run(lambda: self._receipt_of(row)) if row.is_terminal else None
        try:
            await self._write(row, pod, known, receipt)
        except NotFound:  # the object went meanwhile: it is made again
            known.recorded = False
            known.status = None
            try:
                await self._write(row, pod, known, receipt)
            except NotFound as error:  # its namespace is gone
                if not row.is_terminal:
                    raise
                self._log.info("nowhere-to-report", volume=volume_id, error=str(error))
        if row.is_terminal:
            self._known.pop(volume_id, None)
            self._receipts.pop(volume_id, None)

    async def _write(self, row: VolumeRow, pod: PodIdentity, known: _Known, receipt: Receipt | None) -> None:
        if not known.recorded:
            await self._writer.volume(row, pod, owned=not self._tier_gone(row))
            known.settle()
        if row.state is VolumeState.ERASED and receipt is not None:
            await self._writer.erasure(row, pod, receipt)
        seen = self._seen(row.volume_id)
        conditions = volume_conditions(row, receipt, seen, known.conditions, datetime.now(UTC))
        status = volume_status(row, receipt, conditions, seen.failure)
        manifest = status.model_dump(mode="json", by_alias=True, exclude_none=True)
        if manifest != known.status:
            await self._writer.volume_status(row, status)
            known.status, known.conditions = manifest, conditions
        if row.state is VolumeState.ERASED and receipt is not None:
            await self._announcer.erased(row, receipt)
        known.refusal = ""

    def _receipt_of(self, row: VolumeRow) -> Receipt | None:
        """The receipt that ended the volume. Each is read once, and kept until it is told.

        One that was told is read again where the API was set back, and has to be told again.
        """
        for receipt in self._node.ledger.receipts(self._receipts_read):
            self._receipts_read = receipt.seq
            if receipt.volume_id is not None:
                self._receipts[receipt.volume_id] = receipt
        found = self._receipts.get(row.volume_id)
        if found is None:
            of_volume = [it for it in self._node.ledger.receipts() if it.volume_id == row.volume_id]
            found = of_volume[-1] if of_volume else None
        return found

    # -- what changed without an arrow

    def look_at(self, rows: Sequence[VolumeRow]) -> None:
        """Volumes whose conditions say something else by now are due."""
        for row in rows:
            known = self._known.get(row.volume_id)
            if known is None or known.status is None:
                continue
            now = volume_conditions(row, None, self._seen(row.volume_id), known.conditions, datetime.now(UTC))
            if differ(now, known.conditions):
                self._due.again(row.volume_id)
                self._wake.set()
