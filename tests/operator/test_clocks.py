"""Clocks that were set back, or ahead: no time that was written down goes back, and no machine's clock decides anything."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from kvtier_api.erasure import ErasureState
from kvtier_api.meta import find_condition
from kvtier_api.volume import VolumeState
from kvtier_operator.places import places
from kvtier_operator.planning import plan
from kvtier_operator.requests import request_status
from kvtier_operator.writing import abandoned
from operator_facts import NOW, a_node, a_record, a_request, a_snapshot, a_tier, a_volume, around

HOURS = timedelta(hours=5)


def test_a_clock_that_was_set_back_turns_conditions_and_no_times() -> None:
    before = plan(a_snapshot(a_tier(), [a_volume()])).tier_status
    assert before is not None
    silent = around(a_node(ready=False))
    snapshot = a_snapshot(replace(a_tier(), status=before), [a_volume()], around=silent, now=NOW - HOURS)
    after = plan(snapshot).tier_status
    assert after is not None
    statuses = {it.type: it.status for it in before.conditions}
    assert {it.type for it in after.conditions if it.status != statuses[it.type]} >= {"Scrubbed", "Encrypted", "Ready"}
    assert {it.last_transition_time for it in after.conditions} == {NOW}
    later = plan(a_snapshot(replace(a_tier(), status=after), [a_volume()], now=NOW + HOURS)).tier_status
    assert later is not None
    ready = find_condition(later.conditions, "Ready")
    assert ready is not None
    assert ready.last_transition_time == NOW + HOURS


def test_a_request_does_not_end_before_it_began() -> None:
    """Nodes say when they erased, by their clocks; the end is by the controller's."""
    ahead = a_record(a_volume(), request="request-uid", end=NOW + HOURS)
    places_ = places([a_volume(state=VolumeState.ERASED)], around())
    status = request_status(a_request(), places_, [ahead], tier_exists=True, now=NOW)
    assert status.state is ErasureState.COMPLETE
    assert status.begin is not None
    assert status.end is not None
    assert status.begin <= status.end


def test_a_place_is_not_given_up_before_it_was_in_use() -> None:
    volume = a_volume(state_since=NOW + HOURS, abandon="ticket 7")
    since = abandoned(volume, "the node is gone", NOW)["status"]["stateSince"]
    assert since == (NOW + HOURS).isoformat().replace("+00:00", "Z")


def test_a_clock_that_is_ahead_makes_no_erasure_late_and_one_behind_hides_none() -> None:
    """The node wrote since when, by its own clock: what counts is how long this controller has seen it."""
    volume = a_volume(state=VolumeState.ERASING, state_since=NOW)

    def scrubbed(now: datetime, seen_s: float) -> str:
        status = plan(a_snapshot(a_tier(), [volume], now=now, ending_s={volume.uid: seen_s})).tier_status
        assert status is not None
        found = find_condition(status.conditions, "Scrubbed")
        assert found is not None
        return found.reason

    assert scrubbed(NOW + HOURS, 2.0) == "Erasing"
    assert scrubbed(NOW - HOURS, 60.0) == "DeadlineMissed"
