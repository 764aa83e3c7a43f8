"""What people ask for through the API, and what of it ends a volume: pure, from objects as the API server gives them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.volume import VolumeState
from kvtier_node.cluster.wishes import Ending, GivingUp, wishes
from kvtier_node.ledger import VolumeRow
from ledger_samples import row

BEFORE, REQUEST, AFTER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z", "2026-01-01T00:02:00Z"
USED = replace(row(), state=VolumeState.IN_USE)


def volume(of: VolumeRow, created: str = BEFORE, **annotations: str) -> dict[str, Any]:
    return {"metadata": {"name": of.volume_id, "creationTimestamp": created, "annotations": annotations}}


def request(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {"name": "please", "namespace": "default", "uid": "r-1", "creationTimestamp": REQUEST},
        "spec": {"tierRef": {"name": "chat"}, "reason": "asked", **spec},
    }


def asked(*requests: dict[str, Any], of: VolumeRow = USED, body: dict[str, Any] | None = None) -> list[Any]:
    return wishes([of], volumes={of.volume_id: body or volume(of)}, deleting_tiers={}, requests=list(requests))


def test_a_request_ends_the_volumes_that_were_there_before_it() -> None:
    assert asked(request()) == [Ending(USED.volume_id, Trigger.REQUEST, "r-1")]
    assert asked(request(), body=volume(USED, AFTER)) == []


@pytest.mark.parametrize(
    "other",
    [
        request(tierRef={"name": "another"}),
        request(tierRef={"name": "chat", "uid": "of-an-earlier-tier"}),
        request(scope="Tenant", tenant="acme"),
        request(scope="OlderThan", olderThan="1h"),
        {**request(), "metadata": {**request()["metadata"], "namespace": "elsewhere"}},
        {**request(), "status": {"state": "Complete"}},
        {**request(), "status": {"state": "Failed"}},
        {**request(), "spec": {"nonsense": True}},
    ],
)
def test_a_request_about_something_else_or_that_is_done_ends_nothing(other: dict[str, Any]) -> None:
    assert asked(other) == []


def test_a_tier_that_is_merely_not_there_ends_nothing_and_one_that_is_being_deleted_does() -> None:
    """An etcd restore loses objects; nobody wished for it."""
    here = {USED.volume_id: volume(USED)}
    assert wishes([USED], volumes=here, deleting_tiers={}, requests=[]) == []
    assert wishes([USED], volumes={}, deleting_tiers={USED.tier_uid: False}, requests=[]) == []
    found = wishes([USED], volumes={}, deleting_tiers={USED.tier_uid: True}, requests=[])
    assert found == [Ending(USED.volume_id, Trigger.DELETION)]


@pytest.mark.parametrize("state", list(VolumeState))
def test_a_place_is_given_up_only_while_it_cannot_be_erased(state: VolumeState) -> None:
    of = replace(USED, state=state)
    found = asked(of=of, body=volume(of, **{"kvtier.dev/abandon": " the disk is gone "}))
    stuck = state in (VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED)
    assert found == ([GivingUp(of.volume_id, "the disk is gone")] if stuck else [])
    assert asked(of=of, body=volume(of, **{"kvtier.dev/abandon": "  "})) == []


def test_what_is_being_erased_is_ended_again_as_a_new_container_may_hold_it() -> None:
    of = replace(USED, state=VolumeState.ERASING)
    assert asked(request(), of=of) == [Ending(of.volume_id, Trigger.REQUEST, "r-1")]
