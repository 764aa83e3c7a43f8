"""Requests to erase: who is in scope, when it is complete, and what it says until then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from kvtier_api.erasure import ErasureState, KVCacheErasureStatus
from kvtier_api.volume import VolumeState
from kvtier_operator.facts import ErasureFacts, VolumeFacts
from kvtier_operator.places import Surroundings, places
from kvtier_operator.requests import FROM_VOLUME, request_status
from operator_facts import NOW, a_record, a_request, a_volume, around, receipt, said

S = VolumeState


def answer(
    request: ErasureFacts,
    volumes: Sequence[VolumeFacts],
    records: Sequence[ErasureFacts] = (),
    where: Surroundings | None = None,
    **more: Any,
) -> KVCacheErasureStatus:
    arguments: dict[str, Any] = {"tier_exists": True, "now": NOW, **more}
    return request_status(request, places(volumes, where or around()), records, **arguments)


def complete(status: KVCacheErasureStatus) -> tuple[str, str]:
    (condition,) = status.conditions
    return condition.status.value, condition.reason


def test_a_volume_in_use_is_pending_then_erasing_then_done() -> None:
    request = a_request()
    pending = answer(request, [a_volume()])
    assert (pending.state, complete(pending)) == (ErasureState.PENDING, ("Unknown", "Pending"))
    assert pending.residual_bytes == a_volume().size_bytes
    erasing = answer(replace(request, status=pending), [a_volume(state=S.ERASING)])
    assert (erasing.state, complete(erasing)) == (ErasureState.ERASING, ("Unknown", "Erasing"))
    erased = a_volume(state=S.ERASED, receipt=receipt())
    done = answer(replace(request, status=erasing), [erased], [a_record(erased)])
    assert (done.state, complete(done)) == (ErasureState.COMPLETE, ("True", "Complete"))
    assert [it.receipt_id for it in done.volumes] == [f"receipt-{erased.name}"]
    assert (done.residual_bytes, done.end) == (0, NOW)


def test_a_receipt_without_a_record_is_taken_from_the_volume() -> None:
    done = answer(a_request(), [a_volume(state=S.ERASED, receipt=receipt())])
    assert done.state is ErasureState.COMPLETE
    assert [(it.technique, it.verified) for it in done.volumes] == [(FROM_VOLUME, False)]


def test_a_volume_made_later_is_not_in_scope() -> None:
    later = a_volume(created_at=NOW)
    assert answer(a_request(), [later]).state is ErasureState.COMPLETE


def test_a_volume_erased_before_the_request_is_no_result_of_it() -> None:
    earlier = a_volume(state=S.ERASED, receipt=receipt(NOW - timedelta(hours=1)))
    done = answer(a_request(), [earlier], [a_record(earlier, end=NOW - timedelta(hours=1))])
    assert done.state is ErasureState.COMPLETE
    assert done.volumes == []


def test_a_result_stays_when_volume_and_record_are_gone() -> None:
    first, second = a_volume(1, S.ERASED, receipt=receipt()), a_volume(2)
    half = answer(a_request(), [first, second], [a_record(first)])
    assert half.state is ErasureState.ERASING
    after = answer(replace(a_request(), status=half), [second])
    assert [it.volume_id for it in after.volumes] == [first.name]


def test_a_silent_node_leaves_it_unknown() -> None:
    waiting = answer(a_request(), [a_volume()], where=Surroundings({}))
    assert waiting.state is ErasureState.PENDING
    assert complete(waiting) == ("Unknown", "NodeUnreachable")


def test_a_failed_erasure_is_said_while_the_agent_tries_again() -> None:
    refused = a_volume(state=S.ERASING, conditions=said(Scrubbed=(False, "EraseIncomplete")))
    status = answer(a_request(), [refused])
    assert (status.state, complete(status)) == (ErasureState.ERASING, ("False", "EraseFailed"))


def test_a_place_given_up_fails_the_request() -> None:
    status = answer(a_request(), [a_volume(state=S.ABANDONED)])
    assert (status.state, complete(status)) == (ErasureState.FAILED, ("False", "Abandoned"))


def test_no_tier_of_that_name_fails_the_request() -> None:
    status = answer(a_request(), [], tier_exists=False)
    assert (status.state, complete(status)) == (ErasureState.FAILED, ("False", "EraseFailed"))


def test_a_tenant_is_erased_by_who_holds_its_keys_and_the_volume_lives_on() -> None:
    request = a_request(scope="Tenant", tenant="team-a")
    waiting = answer(request, [a_volume()])
    assert complete(waiting) == ("Unknown", "Pending")
    assert "engine" in waiting.conditions[0].message
    done = answer(request, [a_volume()], [a_record(a_volume(), request=request.uid)])
    assert done.state is ErasureState.COMPLETE


def test_a_record_for_another_request_is_no_answer() -> None:
    status = answer(a_request(), [a_volume()], [a_record(a_volume(), request="another")])
    assert status.state is ErasureState.PENDING


def test_what_was_not_verified_is_named() -> None:
    erased = a_volume(state=S.ERASED, receipt=receipt())
    done = answer(a_request(), [erased], [a_record(erased, verified=False)])
    assert done.state is ErasureState.COMPLETE
    assert f"not verified: {erased.name}" in done.conditions[0].message


def test_the_status_of_a_request_at_rest_does_not_change_with_time() -> None:
    request = a_request()
    first = answer(request, [a_volume(state=S.ERASING)])
    again = answer(replace(request, status=first), [a_volume(state=S.ERASING)], now=NOW + timedelta(minutes=5))
    assert again == first
