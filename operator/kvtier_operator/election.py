"""One active replica: a Lease of our own, taken, renewed and given back. kopf's peering is no lock, so it is not used.

The clock of another machine is never compared with one's own, and no wall clock at all: times in a Lease are for people.
A candidate takes the Lease when it was given back, or when it saw no renewal for the Lease's whole duration by its own
monotonic clock. The holder's fence opens for a shorter time than that, counted from before its request was sent. A late
write of a former holder is refused by its resourceVersion.

A Lease whose version went back tells that etcd was restored from an older copy. Then what the Lease says is old, and so is
all that a term remembers: the holder's term ends, and a candidate waits as if it had seen the Lease for the first time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import structlog

from kvtier_operator.facts import Body
from kvtier_operator.fence import Fence
from kvtier_operator.kinds import LEASES
from kvtier_operator.kube import Kube
from kvtier_operator.problems import AlreadyThere, ApiProblem, Conflict, Missing

__all__ = ["Election", "Timing"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Timing:
    """Seconds. A hand-over after a crash takes `duration_s` and one retry; `duration_s - fence_s` is the margin of safety."""

    duration_s: int = 10
    fence_s: float = 6.5
    renew_s: float = 2.0
    retry_s: float = 1.5


class Election:
    """`identity` is of this process alone: a restarted container is another candidate. `looked` is called after each look."""

    def __init__(
        self,
        kube: Kube,
        *,
        namespace: str,
        name: str,
        identity: str,
        timing: Timing | None = None,
        looked: Callable[[], None] = lambda: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._name = name
        self.identity = identity
        self.timing = timing or Timing()
        self._looked = looked
        self._now = now
        self._observed: tuple[str, float] | None = None
        self._newest = 0
        self._not_before_s = 0.0
        self._held: Body | None = None
        self._tell_went_back: Callable[[], None] = lambda: None

    async def acquire(self, fence: Fence | None = None, went_back: Callable[[], None] = lambda: None) -> Fence:
        """Wait for one's turn. Returns the fence, or a new one, open. API problems are logged and waited out.

        `went_back`: the Lease tells that etcd was restored, so what was read before is of another history.
        """
        fence = fence or Fence()
        self._tell_went_back = went_back
        while True:
            asked_at = time.monotonic()
            try:
                if await self._try():
                    fence.open_until(asked_at + self.timing.fence_s)
                    log.info("lease acquired", lease=self._name, identity=self.identity)
                    return fence
            except (Conflict, AlreadyThere):
                log.info("another candidate was first", lease=self._name)
            except ApiProblem as error:
                log.warning("lease not readable", lease=self._name, error=str(error))
            self._looked()
            await asyncio.sleep(self.timing.retry_s)

    async def _try(self) -> bool:
        try:
            lease = await self._kube.get(LEASES, self._name, self._namespace)
        except Missing:
            self._held = await self._kube.create(LEASES, self._body(None, transitions=0))
            self._went_back(self._held)
            return True
        if not self._is_free(lease):
            return False
        transitions = int((lease.get("spec") or {}).get("leaseTransitions") or 0) + 1
        self._held = await self._kube.replace(LEASES, self._body(lease, transitions=transitions))
        self._went_back(self._held)
        return True

    def _is_free(self, lease: Body) -> bool:
        spec: Body = lease.get("spec") or {}
        now_s = time.monotonic()
        waits_s = float(spec.get("leaseDurationSeconds") or self.timing.duration_s)
        version = str(lease["metadata"]["resourceVersion"])
        if self._observed is None or self._observed[0] != version:
            self._observed = (version, now_s)
        if self._went_back(lease):
            log.warning("the Lease went back: etcd was restored", lease=self._name)
            self._not_before_s = now_s + max(waits_s, self.timing.duration_s)
        if now_s < self._not_before_s:  # whoever holds it in truth may not know yet that it is lost
            return False
        # One's own name: of a write whose answer was lost, or of a term of this process that has ended.
        if spec.get("holderIdentity") in (None, "", self.identity):
            return True
        return now_s - self._observed[1] > waits_s

    def _went_back(self, lease: Body) -> bool:
        """Whether the Lease is older than one that was seen. Versions of one kind grow (KEP-5504), unless etcd was restored."""
        text = str(lease["metadata"]["resourceVersion"])
        version = int(text) if text.isdecimal() else 0
        newest, self._newest = self._newest, version
        if version < newest:
            self._tell_went_back()
        return version < newest

    async def hold(self, fence: Fence) -> None:
        """Renew until the Lease is lost; then the fence is closed and this returns."""
        while fence.is_open:
            await asyncio.sleep(self.timing.renew_s)
            asked_at = time.monotonic()
            try:
                held = self._held
                if held is None:
                    break
                transitions = int(held["spec"].get("leaseTransitions", 0))
                self._held = await self._kube.replace(LEASES, self._body(held, transitions=transitions))
                self._went_back(self._held)
                fence.open_until(asked_at + self.timing.fence_s)
            except (Conflict, Missing) as error:
                if not await self._still_ours():
                    log.error("lease lost", lease=self._name, error=str(error))  # noqa: TRY400  (no traceback: it is no defect)
                    break
            except ApiProblem as error:
                log.warning("lease not renewed", lease=self._name, error=str(error))
        fence.close()

    async def _still_ours(self) -> bool:
        """A renewal whose answer was lost leaves our own name under another version."""
        try:
            lease = await self._kube.get(LEASES, self._name, self._namespace)
        except Missing:
            return False
        except ApiProblem as error:
            log.warning("lease not readable", lease=self._name, error=str(error))
            return True  # not known; the fence closes by itself if it stays so
        if self._went_back(lease):
            log.error("the Lease went back: etcd was restored; memory is not trusted any more", lease=self._name)
            return False
        if (lease.get("spec") or {}).get("holderIdentity") != self.identity:
            return False
        self._held = lease
        return True

    async def give_back(self) -> None:
        """After everything has stopped: the next replica need not wait. Problems are logged; the Lease then runs out."""
        held, self._held = self._held, None
        if held is None:
            return
        body = self._body(held, transitions=int(held["spec"].get("leaseTransitions", 0)))
        body["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._kube.replace(LEASES, body)
            log.info("lease given back", lease=self._name)
        except ApiProblem as error:
            log.warning("lease not given back", lease=self._name, error=str(error))

    def _body(self, known: Body | None, *, transitions: int) -> dict[str, Any]:
        now = self._now().isoformat(timespec="microseconds").replace("+00:00", "Z")
        metadata: dict[str, Any] = {"name": self._name, "namespace": self._namespace}
        acquired = now
        if known is not None:
            metadata |= {"resourceVersion": known["metadata"]["resourceVersion"], "uid": known["metadata"]["uid"]}
            spec: Body = known.get("spec") or {}
            if spec.get("holderIdentity") == self.identity:
                acquired = str(spec.get("acquireTime") or now)
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self.timing.duration_s,
                "acquireTime": acquired,
                "renewTime": now,
                "leaseTransitions": transitions,
            },
        }
