"""Ending a volume: InUse → Dying → Erasing → Erased, and the receipt of it.

The order is fixed: fence, destroy the key, verify in the kernel, read back, discard, release, record. Each step can be run
again after a crash. Nothing is claimed that a step did not verify: while one fails, the volume stays `Erasing`.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Final

from kvtier_api.erasure import Trigger
from kvtier_api.errors import EraseIncomplete, KvtierError, LedgerError
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTierSpec, ScrubVerify
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node import backends, shared_memory
from kvtier_node.backends.base import Backend
from kvtier_node.kernel.processes import boot_id
from kvtier_node.kernel.refusal import refused
from kvtier_node.ledger import VolumeRow
from kvtier_node.live import Death, LiveVolume, ranges_of, request_of
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.receipts import Receipt, ReceiptDraft, Step, Technique, TierIdentity, plaintext_of, seconds, utc_now
from kvtier_node.sampling import Range, joined

__all__ = ["Death", "abandon", "erase"]

_COPIES: Final = (
    "plaintext was found in the volume and overwritten; copies of it from before that, of a disk, a snapshot or a backup, are not"
    " reached"
)


def erase(node: Node, live: LiveVolume, trigger: Trigger, *, death: Death | None = None) -> Receipt:
    """Erase the volume of `live` and put it on record; release the guardian's lock. Idempotent.

    Raises EraseIncomplete while anything may still be reachable; `live` is then still guarded, and the call can be
    made again. Raises KernelError, LedgerError, UnsafePath in the same way.
    """
    begin, clock = utc_now(), time.monotonic()
    live.attempts += 1
    live.close_watch()  # first, whatever follows: a descriptor of our own would keep the key
    death = live.death = live.death or death
    row = live.row = _enter_erasing(node, live, trigger, death)
    try:
        steps, destroyed_at, destroyed_clock = _erase_place(node, row)
    except OSError as error:
        raise refused(error, error.filename if isinstance(error.filename, str) else row.place) from error
    deadline_s = float(KVCacheTierSpec.model_validate(row.spec).scrub.deadline)
    took_s = destroyed_clock - (death.monotonic if death else clock)
    draft = _draft(node, row, trigger)
    receipt = node.ledger.finish(
        row.volume_id,
        draft.model_copy(
            update={
                "technique": _technique(row, steps),
                "consumer_died_at": row.facts.get("died_at"),
                "begin": begin,
                "key_destroyed_at": destroyed_at,
                "end": utc_now(),
                "deadline_s": seconds(deadline_s),
                "deadline_met": took_s <= deadline_s if death else None,
                "duration_s": seconds(round(took_s, 6)),
                "steps": steps,
                "not_covered": [*([_COPIES] if plaintext_of(steps) else []), *draft.not_covered],
            }
        ),
        node.identity,
    )
    live.row = node.ledger.get(row.volume_id)
    try:
        node.places.forget(row.place)
    except (KvtierError, OSError) as error:  # it is erased and on record: there is nothing to try again
        _tell(node, "ForeignData", row.place, f"the place of an erased volume: {error}")
    live.guardian.close(ended=True)
    return receipt


def _tell(node: Node, reason: str, about: str, message: str) -> None:
    try:
        node.ledger.add_event("Warning", reason, about, message)
    except LedgerError:
        pass  # a full disk. A directory is still there, and told of by the next recovery; plaintext is on the receipt


def abandon(node: Node, live: LiveVolume, reason: str) -> Receipt:
    """An administrator's word ends the volume: `Abandoned`, with the reason on a receipt that claims no erasure."""
    row = node.ledger.get(live.volume_id)
    now = utc_now()
    step = Step(
        "abandoned", None, f"by an administrator: {reason}; nothing was verified, bytes may be left at {row.place}"
    )
    draft = _draft(node, row, Trigger.REQUEST).model_copy(
        update={"technique": Technique.NOTHING, "begin": now, "end": now, "steps": [step]}
    )
    receipt = node.ledger.finish(row.volume_id, draft, node.identity, to=VolumeState.ABANDONED, reason=reason)
    live.close_watch()
    live.guardian.close(ended=True)
    return receipt


def _enter_erasing(node: Node, live: LiveVolume, trigger: Trigger, death: Death | None) -> VolumeRow:
    row = node.ledger.get(live.volume_id)
    if row.state is VolumeState.IN_USE:
        facts = {"died_at": death.at} if death else {}
        row = node.ledger.advance(row.volume_id, VolumeState.DYING, reason=trigger.value, facts=facts)
    if row.state is not VolumeState.ERASING:
        row = node.ledger.advance(row.volume_id, VolumeState.ERASING, reason=trigger.value)
    return row


def _erase_place(node: Node, row: VolumeRow) -> tuple[list[Step], str, float]:
    """The steps, and when the key was verified gone: UTC and CLOCK_MONOTONIC."""
    backend, request = backends.BACKENDS[BackendName(row.backend)], request_of(row)
    spec = KVCacheTierSpec.model_validate(row.spec)
    place = node.places.open(row.place)
    if place is None:
        return [_absent(node, row)], utc_now(), time.monotonic()
    with place:
        ranges, steps = _ranges(place, row, backend)
        steps += backend.destroy_key(place, request, row.key_id)
        destroyed_at, clock = utc_now(), time.monotonic()
        if row.boot_id == boot_id():  # memory of an earlier boot is gone
            steps += shared_memory.erase(shared_memory.files_of(row.facts))
        if row.boot_id != boot_id() and backend.technique is Technique.KEY_DESTROYED:
            steps.append(Step("boot-id", True, f"the kernel of boot {row.boot_id}, which had the key, no longer runs"))
        # Where the engine alone encrypts, only the sample shows that it did.
        if spec.scrub.verify is ScrubVerify.SAMPLE or backend.technique is Technique.PROCESS_DEATH:
            found = backend.read_back(place, request, ranges)
            if any(step.name == "overwrite" for step in found):  # what was not sealed was readable until then
                destroyed_at, clock = utc_now(), time.monotonic()
            steps += _with_findings(node, row, list(found))
        # Before anything is removed: at the next attempt there would be nothing left that could fail.
        refuse_false_claim(row, steps)
        steps += backend.release(place, request, discard=spec.scrub.discard)
        refuse_false_claim(row, steps)
    return steps, destroyed_at, clock


def _ranges(place: Directory, row: VolumeRow, backend: Backend) -> tuple[list[Range], list[Step]]:
    """Where the consumer's bytes can lie. What keeps us from seeing it now must not keep the key alive."""
    try:
        return joined(ranges_of(row) + backend.data_ranges(place, request_of(row))), []
    except (KvtierError, OSError) as error:
        return ranges_of(row), [Step("data-ranges", None, f"only the areas on record are read back: {error}"[:500])]


def _with_findings(node: Node, row: VolumeRow, found: list[Step]) -> list[Step]:
    """The second reader's steps, after those of earlier attempts that found plaintext: that stays on record."""
    earlier = [Step(**step) for step in row.facts.get("findings", [])]
    if any(step.ok is False for step in found):
        if plaintext := plaintext_of(found):
            _tell(node, Reason.PLAINTEXT_FOUND.value, row.volume_id, plaintext)
        node.ledger.note(row.volume_id, facts={"findings": [asdict(step) for step in earlier + found]})
    return earlier + found


def _absent(node: Node, row: VolumeRow) -> Step:
    """A place whose directory is not there. Only where that proves something is it taken as erased."""
    recorded = row.facts.get("file_system")
    if recorded is None or node.places.file_system_of(os.path.dirname(row.place)) != recorded:
        raise EraseIncomplete(
            "the place is not there: its file system may not be mounted",
            obj=row.place,
            remedy="mount it again, or end it with 'kvtier erase --abandon --reason ...' if it is really gone",
        )
    backend = backends.BACKENDS[BackendName(row.backend)]
    if row.facts.get("declared") is None:
        return Step("place", True, "the volume was recorded, and its directory never made")
    if row.boot_id != boot_id() and backend.technique is Technique.KEY_DESTROYED:
        return Step(
            "boot-id",
            True,
            f"the directory is gone; its key was only in the kernel of boot {row.boot_id}, which no longer runs",
        )
    raise EraseIncomplete(
        "the directory is gone, and not by kvtier's hand: what was in it may be elsewhere",
        obj=row.place,
        remedy="put it back, or end it with 'kvtier erase --abandon --reason ...'",
    )


def refuse_false_claim(row: VolumeRow, steps: list[Step]) -> None:
    """Raise EraseIncomplete if a step failed that no later step of its kind made good, or made impossible to measure."""
    last = {step.name.removesuffix("-after-overwrite"): step for step in steps}
    for step in last.values():
        if step.ok is False:
            raise EraseIncomplete(
                f"step {step.name} failed: {step.detail}",
                obj=row.place,
                remedy="kvtier tries again by itself; 'kvtier erase --abandon --reason ...' ends it without a claim",
            )


def _technique(row: VolumeRow, steps: list[Step]) -> Technique:
    names = {step.name for step in steps}
    if "overwrite" in names:
        return Technique.OVERWRITE
    if names == {"place"}:
        return Technique.NOTHING
    if "boot-id" in names:
        return Technique.KEY_LOST
    return backends.BACKENDS[BackendName(row.backend)].technique


def _draft(node: Node, row: VolumeRow, trigger: Trigger) -> ReceiptDraft:
    now = utc_now()
    backend = backends.BACKENDS[BackendName(row.backend)]
    return ReceiptDraft(
        node_name=node.name,
        tier=TierIdentity(uid=row.tier_uid, namespace=row.tier_namespace, name=row.tier_name),
        volume_id=row.volume_id,
        place=row.place,
        device_serial=row.facts.get("device_serial"),
        backend=backend.name,
        technique=Technique.NOTHING,
        cipher=row.facts.get("cipher"),
        key_id=row.key_id,
        trigger=trigger,
        size_bytes=row.size_bytes,
        begin=now,
        end=now,
        not_covered=backend.not_covered(),
        versions=node.versions,
    )
