"""The reconcile of `kvtier node`: manifests, ledger and measurements become status files, events and metrics.

It decides one thing: a tier that was declared and is declared no more is deleted, by a request that every guardian sees.
That is certain only when the whole directory was read without an error. Volumes are erased by their guardians, never here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_api.erasure import Trigger
from kvtier_api.errors import InvalidResource, KvtierError
from kvtier_api.meta import Condition
from kvtier_api.reasons import Reason
from kvtier_api.rules import check_update
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import VolumeState
from kvtier_node.conditions import TierFacts, VolumeFacts, is_overdue
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.event_log import Log
from kvtier_node.hardening import HostFacts, measure_host
from kvtier_node.ledger import TERMINAL, VolumeRow
from kvtier_node.manifests import BadManifest, ManifestDirectory, Manifests
from kvtier_node.measuring import VolumeMeasurement
from kvtier_node.metrics import AgentMetrics, Snapshot
from kvtier_node.node import Node
from kvtier_node.receipts import Receipt, plaintext_of
from kvtier_node.status_files import StatusFiles
from kvtier_node.threads import Threads
from kvtier_node.tier_check import TierCheck, check_tier
from kvtier_node.tier_status import status_of

__all__ = ["Reconciler"]

_CHECK_S: Final = 60.0
_HOST_S: Final = 60.0
_HISTORY: Final = 1000
_FOREIGN_S: Final = 600.0
"""kubelet asks for a volume again at least every two minutes, for as long as its pod is there."""
_LIVING: Final = frozenset(VolumeState) - TERMINAL
DELETION: Final = "the tier's manifest was removed"


def _declared_at(tier: KVCacheTier, at: datetime | None) -> KVCacheTier:
    """With the time since when it is declared here, which no manifest says."""
    return tier.model_copy(update={"metadata": tier.metadata.model_copy(update={"creation_timestamp": at})})


class Reconciler:
    """What the agent knows between two reconciles. `reconcile` runs in one thread at a time."""

    def __init__(self, node: Node, manifests: ManifestDirectory, log: Log) -> None:
        self._node = node
        self._manifests = manifests
        self._log = log
        self._files = StatusFiles(node.state_dir)
        self._accepted: dict[str, KVCacheTier] | None = None
        """Tiers in force, those that are being deleted included; None before the first look at the status files."""
        self._conditions: dict[str, list[Condition]] = {}
        self._missing: set[str] = set()
        self._deleting: set[str] = set()
        self._checks: dict[str, tuple[KVCacheTier, float, TierCheck]] = {}
        self._checking: set[str] = set()
        self._host: HostFacts | None = None
        self._host_at = 0.0
        self._last: dict[str, Receipt] = {}
        self._receipts_seen = 0
        self._said: dict[str, str] = {}
        self._foreign_at: dict[str, float] = {}
        self.metrics = AgentMetrics()
        self.rows: list[VolumeRow] = []
        self.completed_at: float | None = None
        """CLOCK_MONOTONIC seconds of the last one that came to its end."""
        head = node.ledger.head()
        for receipt in node.ledger.receipts(max(0, head.count - _HISTORY)):
            self._remember(receipt)
        self._receipts_seen = head.count

    @property
    def host(self) -> HostFacts | None:
        """What was measured of the host last."""
        return self._host

    def foreign_data(self, key: str, found: bool) -> None:
        """What kvtier did not make was in the way of a pod's volume of the tier, just now; or was not. From any thread."""
        if found:
            self._foreign_at[key] = time.monotonic()
        else:
            self._foreign_at.pop(key, None)

    def _foreign(self) -> frozenset[str]:
        """Tiers of manifests by their checks, tiers of pods by what those were refused for lately."""
        since = time.monotonic() - _FOREIGN_S
        return frozenset(
            [key for key, (_, _, check) in list(self._checks.items()) if check.reason is Reason.FOREIGN_DATA]
            + [key for key, at in list(self._foreign_at.items()) if at > since]
        )

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)

    def _remember(self, receipt: Receipt) -> None:
        if receipt.tier is not None:
            self._last[f"{receipt.tier.namespace}/{receipt.tier.name}"] = receipt

    def reconcile(self, *, measured: Mapping[str, VolumeMeasurement], failures: Mapping[str, str], ready: bool) -> None:
        """Once. Raises LedgerError, and KvtierError where status cannot be written."""
        now = self.now()
        declared = self._take_manifests()
        self.rows = self._node.ledger.volumes(_LIVING)
        self._count_receipts()
        for row in self.rows:
            if is_overdue(row, now) and self.metrics.missed(row.volume_id):
                self._event("DeadlineMissed", row.volume_id, failures.get(row.volume_id) or "not erased in time")
        if time.monotonic() - self._host_at > _HOST_S:
            self._host = measure_host(self._node.places.roots, self._consumers())
            self._host_at = time.monotonic()
        abandoned = self._node.ledger.volumes({VolumeState.ABANDONED})
        for key, tier in list((self._accepted or {}).items()):
            self._write_status(
                TierFacts(
                    tier=tier,
                    now=now,
                    volumes=[
                        VolumeFacts(row, measured.get(row.volume_id), failures.get(row.volume_id, ""))
                        for row in self.rows
                        if row.tier_key == key
                    ],
                    abandoned=sum(row.tier_key == key for row in abandoned),
                    check=self._checks[key][2] if key in self._checks else None,
                    host=self._host,
                    missed=self._missed(key),
                    plaintext=self._plaintext(key),
                    manifest_problem=self._said.get(f"refused:{key}", "") or declared.problem_of(key),
                    recovering=not ready,
                    deleting=key in self._deleting,
                ),
                key,
            )
        self._finish_deletions()
        self._set_metrics(declared, measured, failures, ready)
        self.completed_at = time.monotonic()

    # -- manifests

    def _take_manifests(self) -> Manifests:
        found = self._manifests.scan()
        if self._accepted is None:
            self._accepted, unreadable = self._files.load()
            for path, error in unreadable:
                self._event("InvalidStatusFile", path, str(error))
            self._conditions = {
                key: list(tier.status.conditions) for key, tier in self._accepted.items() if tier.status is not None
            }
        for bad in found.bad:
            self._say_once(f"bad:{bad.path}", "InvalidManifest", bad.path, str(bad.error))
        for known in [key for key in self._said if key.startswith("bad:")]:
            if known.removeprefix("bad:") not in {bad.path for bad in found.bad}:
                del self._said[known]
        now = self.now().replace(microsecond=0)  # as it is written down
        for key, tier in found.tiers.items():
            self._accept(key, tier, found, now)
        # Missing twice in a row: some editors remove a file for a moment when they save it.
        missing = set(self._accepted) - set(found.tiers) - self._deleting if found.complete else set()
        for key in missing & self._missing:
            self._delete(key)
        self._missing = missing
        return found

    def _accept(self, key: str, tier: KVCacheTier, found: Manifests, now: datetime) -> None:
        """Put a tier in force, unless it changes what cannot be changed: then the one in force stays."""
        accepted = self._accepted if self._accepted is not None else {}
        old = accepted.get(key)
        if old is not None and key not in self._deleting:
            try:
                check_update(old.spec, tier.spec)
            except InvalidResource as error:
                self._say_once(f"refused:{key}", "InvalidManifest", found.origin[key], str(error))
                found.bad.append(BadManifest(found.origin[key], error))
                return
        self._said.pop(f"refused:{key}", None)
        self._deleting.discard(key)
        if old is None or old.spec != tier.spec:
            self._log.info("tier", tier=key, file=found.origin[key], change="declared" if old is None else "changed")
            self._checks.pop(key, None)
        accepted[key] = _declared_at(tier, now if old is None else old.metadata.creation_timestamp)

    def _delete(self, key: str) -> None:
        """The manifest is gone. Every guardian ends the consumers and erases, as deletionPolicy Erase says."""
        self._deleting.add(key)
        self._event("Deleting", key, DELETION)
        open_already = any(
            request.tier == key and request.trigger == Trigger.DELETION for request in self._node.ledger.open_requests()
        )
        if not open_already:
            self._node.ledger.add_request(key, "All", DELETION, trigger=Trigger.DELETION)

    def _finish_deletions(self) -> None:
        busy = {request.tier for request in self._node.ledger.open_requests()} | {row.tier_key for row in self.rows}
        for key in self._deleting - busy:
            self._files.remove(key)
            self._deleting.discard(key)
            if self._accepted is not None:
                self._accepted.pop(key, None)
            self._conditions.pop(key, None)
            self._checks.pop(key, None)
            self._log.info("tier", tier=key, change="deleted")

    # -- checks that can take long

    def start_checks(self, start: Callable[[Coroutine[Any, Any, None]], None], threads: Threads) -> None:
        """Look at tiers whose last check is old, each in a thread of its own: a path can hang."""
        for key, tier in (self._accepted or {}).items():
            last = self._checks.get(key)
            fresh = last is not None and last[0].spec == tier.spec and time.monotonic() - last[1] < _CHECK_S
            if not fresh and key not in self._checking and key not in self._deleting:
                start(self._check(key, tier, threads))

    async def _check(self, key: str, tier: KVCacheTier, threads: Threads) -> None:
        self._checking.add(key)
        try:
            found = await threads.run(lambda: check_tier(self._node, tier))
            self._checks[key] = (tier, time.monotonic(), found)
            if found.reason is not None:
                self._say_once(f"check:{key}", found.reason.value, key, found.message)
            else:
                self._said.pop(f"check:{key}", None)
        finally:
            self._checking.discard(key)

    # -- what is written down

    def _write_status(self, facts: TierFacts, key: str) -> None:
        status = status_of(facts, self._conditions.get(key, ()), self._last.get(key))
        self._conditions[key] = list(status.conditions)
        self._files.write(facts.tier.model_copy(update={"status": status}))

    def _missed(self, key: str) -> str:
        last = self._last.get(key)
        return f"receipt {last.id}" if last is not None and last.deadline_met is False else ""

    def _plaintext(self, key: str) -> str:
        last = self._last.get(key)
        return f"receipt {last.id}" if last is not None and plaintext_of(last.steps) else ""

    def _count_receipts(self) -> None:
        for receipt in self._node.ledger.receipts(self._receipts_seen):
            self._receipts_seen = receipt.seq
            self._remember(receipt)
            self.metrics.erased(receipt)

    def _consumers(self) -> list[int]:
        used = [row for row in self.rows if row.state is VolumeState.IN_USE]
        found = [ProcessConsumer.from_record(row.consumer) for row in used]
        return [consumer.pid for consumer in found if consumer is not None and consumer.alive()]

    def _set_metrics(
        self,
        declared: Manifests,
        measured: Mapping[str, VolumeMeasurement],
        failures: Mapping[str, str],
        ready: bool,
    ) -> None:
        ledger = self._node.ledger
        self.metrics.set(
            Snapshot(
                version=self._node.versions["kvtier"],
                node=self._node.name,
                ready=ready,
                rows=self.rows,
                conditions=dict(self._conditions),
                foreign=self._foreign(),
                used_bytes={volume_id: seen.used_bytes for volume_id, seen in measured.items()},
                bad_manifests=len(declared.bad),
                open_requests=len(ledger.open_requests()),
                failing=sum(bool(text) for text in failures.values()),
                receipts=self._receipts_seen,
                rebuilt_at=datetime.fromisoformat(ledger.rebuilt[0]).timestamp() if ledger.rebuilt else 0,
                mirror_problem=ledger.mirror_problem is not None,
                reconciled_at=time.monotonic(),
            )
        )

    def _say_once(self, topic: str, reason: str, obj: str, message: str) -> None:
        if self._said.get(topic) != message:
            self._said[topic] = message
            self._event(reason, obj, message)

    def _event(self, reason: str, obj: str, message: str) -> None:
        self._log.warning("event", reason=reason, object=obj, message=message)
        try:
            self._node.ledger.add_event("Warning", reason, obj, message)
        except KvtierError as error:
            self._log.error("event-not-recorded", error=str(error))
