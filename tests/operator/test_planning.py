"""Plans: the same facts, the same plan; after it is done, nothing is left to do."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvtier_api.erasure import ErasureState
from kvtier_api.meta import find_condition
from kvtier_api.volume import VolumeState
from kvtier_operator.announcing import of_volumes
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import TierFacts, tier_facts, volume_facts
from kvtier_operator.places import Surroundings, places
from kvtier_operator.planning import Plan, Snapshot, plan
from kvtier_operator.releasing import VolumeStep
from kvtier_operator.telling import of_late
from operator_facts import GOOD, NOW, a_node, a_record, a_request, a_snapshot, a_tier, a_volume, around, receipt, said

S = VolumeState
GONE = Surroundings({})


def steps(of: Plan) -> list[VolumeStep]:
    return [step for _, step in of.volume_steps]


def events(of: Plan) -> list[EventReason]:
    return [it.reason for it in of.announcements]


def carried_out(snapshot: Snapshot) -> Snapshot:
    """What the API server would have after the plan: only the status matters here."""
    done = plan(snapshot)
    assert snapshot.tier is not None
    tier = snapshot.tier
    if done.tier_status is not None:
        tier = replace(tier, status=done.tier_status)
    if done.hold_tier:
        tier = replace(tier, meta=tier.meta.model_copy(update={"finalizers": ["kvtier.dev/erase"]}))
    return replace(snapshot, tier=tier, seen={volume.uid: volume.state for volume in snapshot.volumes})


def at_rest(tier: TierFacts, *volumes: Any, **changes: Any) -> Snapshot:
    return carried_out(a_snapshot(tier, volumes, **changes))


def test_the_first_plan_holds_the_tier_and_says_that_it_was_declared() -> None:
    todo = plan(a_snapshot(a_tier(held=False)))
    assert todo.hold_tier
    assert events(todo) == [EventReason.TIER_DECLARED]
    assert todo.tier_status is not None


@pytest.mark.parametrize("state", list(S))
def test_after_a_plan_nothing_is_left_to_do(state: S) -> None:
    volume = a_volume(state=state, receipt=receipt() if state is S.ERASED else None)
    snapshot = at_rest(a_tier(held=False), volume)
    assert plan(snapshot).parts() == []
    later = replace(snapshot, now=NOW + timedelta(seconds=1))
    assert plan(later).parts() == [], "time alone writes nothing"


def test_a_stored_status_reads_back_as_it_was_written() -> None:
    snapshot = at_rest(a_tier(), a_volume(), erasures=[a_record(a_volume(2))])
    assert snapshot.tier is not None
    assert snapshot.tier.status is not None
    body = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": snapshot.tier.meta.model_dump(mode="json", by_alias=True, exclude_none=True),
        "spec": {"sizePerRank": "1Gi", "ranks": 2, "path": "/var/lib/kvtier"},
        "status": snapshot.tier.status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }
    assert plan(replace(snapshot, tier=tier_facts(body))).parts() == []


def test_a_tier_goes_only_when_no_place_counts() -> None:
    deleting = a_tier(deleting=True)
    assert not plan(a_snapshot(deleting, [a_volume()])).release_tier
    assert not plan(a_snapshot(deleting, [a_volume(state=S.FAILED)])).release_tier
    assert not plan(a_snapshot(deleting, [a_volume(state=None, problem="?")])).release_tier
    assert plan(a_snapshot(deleting, [a_volume(state=S.ERASED, receipt=receipt())])).release_tier
    assert plan(a_snapshot(deleting, [a_volume(state=S.ABANDONED)])).release_tier
    assert plan(a_snapshot(deleting)).release_tier


def test_a_gone_node_holds_the_tier_for_ever_and_says_so_once() -> None:
    snapshot = a_snapshot(a_tier(deleting=True), [a_volume()], around=GONE)
    todo = plan(snapshot)
    assert not todo.release_tier
    assert EventReason.DELETION_WAITS in events(todo)
    assert EventReason.NODE_UNREACHABLE in events(todo)
    assert plan(carried_out(snapshot)).parts() == []


def test_lost_keys_are_recorded_before_the_tier_goes() -> None:
    volume = a_volume()
    silent = around(a_node(ready=False, boot_id="boot-2"))
    first = plan(a_snapshot(a_tier(deleting=True), [volume], around=silent))
    assert steps(first) == [VolumeStep.RECORD_KEYS_LOST]
    assert not first.release_tier
    record = a_record(volume, name=f"{volume.name}-keys-lost")
    second = plan(a_snapshot(a_tier(deleting=True), [volume], around=silent, erasures=[record]))
    assert steps(second) == []
    assert second.release_tier
    refused = plan(
        a_snapshot(a_tier(deleting=True), [volume], around=silent, unrecordable={f"{volume.name}-keys-lost"})
    )
    assert refused.release_tier, "a namespace that takes no new objects must not wait for one"


def test_a_reason_abandons_a_place_of_a_silent_node_only() -> None:
    given_up = a_volume(abandon="ticket 7")
    assert steps(plan(a_snapshot(a_tier(), [given_up], around=GONE))) == [VolumeStep.ABANDON]
    assert steps(plan(a_snapshot(a_tier(), [given_up]))) == [], "its agent does it, and signs"
    silent_reason = plan(a_snapshot(a_tier(), [a_volume(abandon="  ")], around=GONE))
    assert steps(silent_reason) == []
    assert EventReason.ABANDON_REFUSED in events(silent_reason)


STRANGER = {**GOOD, **said(Scrubbed=(None, "NotInLedger"))}


def test_a_volume_that_its_nodes_ledger_does_not_have_holds_the_tier_and_is_a_persons_to_give_up() -> None:
    """Its node is heard, but nobody there would ever answer for it: neither erase it, nor follow the annotation."""
    stranger = a_volume(conditions=STRANGER)
    todo = plan(a_snapshot(a_tier(deleting=True), [stranger]))
    assert not todo.release_tier
    assert EventReason.NOT_IN_LEDGER in events(todo)
    assert steps(plan(a_snapshot(a_tier(), [replace(stranger, abandon="node re-imaged")]))) == [VolumeStep.ABANDON]


def test_a_reboot_since_proves_the_keys_lost_of_a_volume_that_no_ledger_has() -> None:
    rebooted = around(a_node(boot_id="boot-2"))
    known = plan(a_snapshot(a_tier(deleting=True), [a_volume()], around=rebooted))
    assert steps(known) == [], "its agent proves it, and signs"
    todo = plan(a_snapshot(a_tier(deleting=True), [a_volume(conditions=STRANGER)], around=rebooted))
    assert steps(todo) == [VolumeStep.RECORD_KEYS_LOST]


def test_a_record_without_its_status_is_completed_before_the_tier_goes() -> None:
    """The controller was stopped between its two writes, or did not hear that the first was done."""
    volume = a_volume()
    silent = around(a_node(ready=False, boot_id="boot-2"))
    begun = replace(a_record(volume, name=f"{volume.name}-keys-lost"), state=ErasureState.PENDING)
    todo = plan(a_snapshot(a_tier(deleting=True), [volume], around=silent, erasures=[begun]))
    assert steps(todo) == [VolumeStep.RECORD_KEYS_LOST]
    assert not todo.release_tier


def test_an_erasure_is_its_nodes_to_announce() -> None:
    """The controller does not repeat it: there is one event, whoever runs."""
    (place,) = places([a_volume(state=S.ERASED, receipt=receipt())], around())
    assert of_volumes(a_tier(), [place], {"uid-1": S.IN_USE}) == []


def test_a_volume_object_is_held_while_it_counts_and_released_when_it_does_not() -> None:
    assert steps(plan(a_snapshot(a_tier(), [a_volume(finalizers=())]))) == [VolumeStep.HOLD]
    assert steps(plan(a_snapshot(a_tier(), [a_volume(deleting=True)]))) == []
    erased = a_volume(state=S.ERASED, receipt=receipt(), deleting=True)
    assert steps(plan(a_snapshot(a_tier(), [erased]))) == [VolumeStep.RELEASE]
    assert steps(plan(a_snapshot(None, [erased]))) == [VolumeStep.RELEASE], "after the tier is gone, too"


def test_volumes_of_an_earlier_tier_of_that_name_are_not_counted_but_stay_held() -> None:
    others = a_volume(tier_uid="another", finalizers=())
    todo = plan(a_snapshot(a_tier(), [others]))
    assert todo.tier_status is not None
    assert todo.tier_status.volumes is not None
    assert todo.tier_status.volumes.total == 0
    assert steps(todo) == [VolumeStep.HOLD]


def test_a_spec_that_does_not_hold_is_said_and_leaves_the_figures_of_running_volumes() -> None:
    before = at_rest(a_tier(), a_volume())
    assert before.tier is not None
    body = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": "t", "namespace": "n", "uid": "tier-uid", "finalizers": ["kvtier.dev/erase"]},
        "spec": {"sizePerRank": "1Gi", "ranks": "two", "path": "/var/lib/kvtier"},
    }
    facts = replace(tier_facts(body), status=before.tier.status)
    assert "spec.ranks" in facts.problem
    todo = plan(replace(before, tier=facts))
    assert todo.tier_status is not None
    assert todo.tier_status.bytes_total == before.tier.status.bytes_total  # type: ignore[union-attr]
    ready = find_condition(todo.tier_status.conditions, "Ready")
    assert ready is not None
    assert (ready.status.value, ready.reason) == ("False", "InvalidSpec")
    assert "spec.ranks" in ready.message
    assert events(todo) == [EventReason.INVALID_SPEC]
    encrypted = find_condition(todo.tier_status.conditions, "Encrypted")
    assert encrypted is not None
    assert encrypted.status.value == "True", "what was measured of running volumes stays"


def test_residual_bytes_are_the_nodes_measure_or_all_of_it() -> None:
    volumes = [
        a_volume(1, S.DYING),
        a_volume(2, S.ERASING, residual_bytes=5),
        a_volume(3, S.IN_USE),
        a_volume(4, S.ERASED, receipt=receipt()),
    ]
    status = plan(a_snapshot(a_tier(), volumes)).tier_status
    assert status is not None
    assert status.residual_bytes == 2 * 1024**3 + 5
    assert status.bytes_total == 3 * 2 * 1024**3


def test_the_last_erasure_never_goes_back() -> None:
    snapshot = at_rest(a_tier(), erasures=[a_record(a_volume(1), end=NOW)])
    assert snapshot.tier is not None
    after = plan(replace(snapshot, erasures=[a_record(a_volume(2), end=NOW - timedelta(hours=2))]))
    assert after.parts() == []
    assert snapshot.tier.status is not None
    assert snapshot.tier.status.last_erasure is not None
    assert snapshot.tier.status.last_erasure.receipt_id == f"receipt-{a_volume(1).name}"


def test_history_keeps_the_newest_and_what_is_open() -> None:
    records = [a_record(a_volume(n), end=NOW - timedelta(minutes=n), name=f"r{n}") for n in range(5)]
    forgotten = plan(a_snapshot(a_tier(), erasures=records, history_limit=2)).forget_erasures
    assert [it.name for it in forgotten] == ["r2", "r3", "r4"]
    erased = [a_volume(n, S.ERASED, receipt=receipt(NOW - timedelta(minutes=n))) for n in range(3)]
    todo = plan(a_snapshot(a_tier(), [*erased, a_volume(8, S.ABANDONED), a_volume(9)], history_limit=1))
    assert [it.volume.name for it in todo.forget_volumes] == [erased[1].name, erased[2].name]


def test_an_event_is_told_when_a_state_is_new_and_not_again() -> None:
    tier = a_tier()
    (place,) = places([a_volume()], around())
    assert [it.reason for it in of_volumes(tier, [place], {})] == [EventReason.STORE_CREATED, EventReason.STORE_IN_USE]
    assert of_volumes(tier, [place], {"uid-1": S.IN_USE}) == []
    assert [it.reason for it in of_volumes(tier, [place], {"uid-1": S.READY})] == [EventReason.STORE_IN_USE]


def test_an_unreadable_volume_is_a_place() -> None:
    body = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheVolume",
        "metadata": {"name": "kvv-00000000000000000001", "namespace": "n", "uid": "u"},
        "spec": {"tierRef": {"name": "t"}, "nodeName": "node-a"},
        "status": {"state": "Teleported"},
    }
    found = volume_facts(body)
    assert (found.tier, found.node_name, found.state) == (("n", "t"), "node-a", None)
    assert found.problem
    assert not plan(a_snapshot(a_tier(deleting=True), [found])).release_tier


def test_a_record_that_an_open_request_needs_is_not_forgotten() -> None:
    request = a_request()
    needed = a_record(a_volume(1), request=request.uid, end=NOW - timedelta(minutes=9), name="needed")
    others = [a_record(a_volume(n), end=NOW - timedelta(minutes=n), name=f"r{n}") for n in (2, 3)]
    todo = plan(a_snapshot(a_tier(), [a_volume(8)], erasures=[request, needed, *others], history_limit=1))
    assert [it.name for it in todo.forget_erasures] == ["r3"]


def test_what_the_controller_before_wrote_and_did_not_tell_is_told_by_the_next() -> None:
    """It was killed between the status and the event. What is older than a hand-over was told, or is no news any more."""
    new = replace(a_tier(), meta=a_tier().meta.model_copy(update={"creation_timestamp": NOW}))
    status = plan(a_snapshot(new, [a_volume()])).tier_status
    written = replace(new, status=status)
    assert [it.reason for it in of_late(written, NOW)] == [EventReason.TIER_DECLARED, EventReason.TIER_READY]
    assert set(of_late(written, NOW)) <= set(plan(a_snapshot(new, [a_volume()])).announcements), "by the same name"
    assert of_late(written, NOW + timedelta(minutes=10)) == []
    assert of_late(new, NOW) == [], "nothing was written yet: the plan tells it"
