"""What a guardian does all the time: see its volumes' consumers end, and erase; end a consumer when an erasure is requested.

One call of `look` is one look at one volume. Who calls it, and how often, is the guardian's: `kvtier run` for its own volume,
`kvtier node` for all that it guards.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Final

from kvtier_api.erasure import ErasureScope, Trigger
from kvtier_api.errors import Busy, KvtierError, NotFound
from kvtier_api.volume import VolumeState
from kvtier_node.backends import BACKENDS
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import Death, erase
from kvtier_node.kernel.processes import PidFd
from kvtier_node.kernel.refusal import as_refusal, refused
from kvtier_node.ledger import TERMINAL, ArrowRefused, EraseRequest, VolumeRow
from kvtier_node.live import LiveVolume, request_of
from kvtier_node.node import Node
from kvtier_node.pods.between import look_between
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.pods.ending import end_use, files_of_devices, files_of_place
from kvtier_node.receipts import Receipt
from kvtier_node.recovery import destroys_keys, evidence, trigger_of, usage
from kvtier_node.shared_memory import FACT, SharedMemoryWatch, files_of

__all__ = ["LOOK_S", "Look", "close_if_fulfilled", "fulfil_requests", "in_scope", "look", "stop_consumer", "stop_pod"]

LOOK_S: Final = 0.2
"""Seconds between two looks at a volume in use; an end is seen within 1 s."""
_GRACE_S: Final = 10.0


@dataclass
class Look:
    """What a look found: the volume is still in use, was erased, or could not be erased yet."""

    in_use: bool
    why: str
    receipt: Receipt | None = None
    error: KvtierError | None = None


def look(node: Node, live: LiveVolume, *, trigger: Trigger | None = None, death: Death | None = None) -> Look:
    """Look once; erase if nobody uses the volume any more.

    `trigger` and `death` are the caller's better knowledge of how and when the consumer ended. An erasure that fails
    is reported, not raised: the volume stays `Erasing`, and the next look tries again.
    """
    try:
        found = usage(node, live)
    except (KvtierError, OSError) as error:  # not knowing is not a proof of death
        failure = as_refusal(error, live.row.place)
        return Look(True, f"whether it is in use cannot be told: {failure}", error=failure)
    if found.alive:
        return Look(True, found.reason, error=_observed(node, live))
    pod = PodConsumer.from_record(live.row.consumer)
    if found.lost and pod is not None:  # it lives, and its next container must not find the bare directory
        try:
            stop_pod(node, live, pod, Trigger.CRASH)
        except (KvtierError, OSError) as error:
            return Look(False, found.reason, error=as_refusal(error, live.row.place))
    if live.row.state is VolumeState.IN_USE and death is None and live.death is None:
        death = Death.now()
    try:
        receipt = erase(node, live, trigger or trigger_of(node.ledger.get(live.volume_id)), death=death)
    except KvtierError as error:
        return Look(False, found.reason, error=error)
    return Look(False, found.reason, receipt=receipt)


def _observed(node: Node, live: LiveVolume) -> KvtierError | None:
    try:
        observe(node, live)
    except KvtierError as error:
        return error
    except OSError as error:
        return refused(error, live.row.place)
    return None


def observe(node: Node, live: LiveVolume) -> None:
    """See what the living consumer has in shared memory, and put it on record; empty what a pod's old container left.

    Raises LedgerError, KernelError, and what `look_between` raises.
    """
    pod = PodConsumer.from_record(live.row.consumer)
    if pod is not None and destroys_keys(live.row):
        look_between(node, live, pod)
    consumer = ProcessConsumer.from_record(live.row.consumer)
    if consumer is None or not consumer.alive():
        return
    if live.shared is None:
        live.shared = SharedMemoryWatch.resume(files_of(live.row.facts))
    if live.shared.look(consumer.pid):
        live.row = node.ledger.note(
            live.volume_id, facts={FACT: [file.record() for file in live.shared.files.values()]}
        )


def stop_consumer(live: LiveVolume, *, grace_s: float = _GRACE_S) -> None:
    """End the consumer on record: SIGTERM, and SIGKILL after `grace_s`. By pidfd: never a process that took its pid."""
    consumer = ProcessConsumer.from_record(live.row.consumer)
    if consumer is None or not consumer.alive():
        return
    try:
        with PidFd.open(consumer.pid, consumer.start_time) as handle:
            handle.send_signal(signal.SIGTERM)
            if not handle.wait(grace_s):
                handle.send_signal(signal.SIGKILL)
                handle.wait(grace_s)
    except NotFound:
        return  # it ended by itself between the two


def fulfil_requests(node: Node, lives: list[LiveVolume]) -> list[Receipt]:
    """Erase those of `lives` that an open request (`kvtier erase`) is about; close requests that are fulfilled.

    A request is closed when no volume of its tier is left, whoever guarded it; until then it stays open.
    """
    receipts = []
    for request in node.ledger.open_requests():
        for live in lives:
            if not in_scope(request, live.row):
                continue
            try:
                receipts.append(_end(node, live, Trigger(request.trigger)))
            except KvtierError as error:
                if str(error) != live.said:  # not the same one again at every look
                    live.said = str(error)
                    node.ledger.add_event("Warning", "EraseIncomplete", live.volume_id, str(error))
        close_if_fulfilled(node, request)
    return receipts


def _end(node: Node, live: LiveVolume, trigger: Trigger) -> Receipt:
    """Stop the consumer and erase. Raises Busy while what it forked still uses a volume that has no key to destroy."""
    pod = PodConsumer.from_record(live.row.consumer)
    if pod is not None:
        stop_pod(node, live, pod, trigger)
    stop_consumer(live)
    if not destroys_keys(live.row) and (found := evidence(live)).alive:
        raise Busy(
            f"the consumer ended, and {found.reason}: it could go on writing",
            obj=live.row.place,
            remedy="end the processes that hold it (lsof +D, or fuser); kvtier tries again by itself",
        )
    return erase(node, live, trigger, death=Death.now())


def stop_pod(node: Node, live: LiveVolume, pod: PodConsumer, trigger: Trigger) -> None:
    """On record first: from then on the pod's directory is no sign that it uses the volume."""
    if live.row.state is VolumeState.IN_USE and pod.ended is None:
        pod = pod.with_end(trigger)
        live.row = node.ledger.note(live.volume_id, consumer=pod.record())
    place = node.places.open(live.row.place)
    files = None
    if place is not None:
        with place:
            backend = BACKENDS[live.row.backend]
            files = files_of_place(place, own_device=backend.own_device)
            if files is None:  # an erasure took the mount off, and somebody has it in another namespace
                files = files_of_devices(backend.own_devices(place, request_of(live.row)))
    end_use(pod, files, grace_s=_GRACE_S)


def in_scope(request: EraseRequest, row: VolumeRow) -> bool:
    """Whether the request is about the volume: of its tier, not ended, and recorded before the request was.

    By the ledger's order, not by time: a clock can be set.
    """
    return (
        request.scope == ErasureScope.ALL
        and row.tier_key == request.tier
        and not row.is_terminal
        and (row.created_at <= request.created_at if request.after is None else row.sequence <= request.after)
    )


def close_if_fulfilled(node: Node, request: EraseRequest) -> bool:
    """Close the request if nothing in its scope is left, whoever guarded it; whether that is so."""
    if request.scope != ErasureScope.ALL:
        return False
    live = frozenset(VolumeState) - TERMINAL
    if any(in_scope(request, row) for row in node.ledger.volumes(live)):
        return False
    try:
        node.ledger.close_request(request.id, "every volume in scope is Erased")
    except ArrowRefused:
        pass  # another guardian closed it first
    return True


def wait_for_end(node: Node, live: LiveVolume, *, limit_s: float | None = None) -> Look:
    """Look until the volume is erased, or for `limit_s` seconds; the last look."""
    until = None if limit_s is None else time.monotonic() + limit_s
    while True:
        seen = look(node, live)
        if seen.receipt is not None or (until is not None and time.monotonic() > until):
            return seen
        time.sleep(LOOK_S)
