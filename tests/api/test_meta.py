"""Conditions, selectors and times."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from kvtier_api.meta import (
    Condition,
    ConditionStatus,
    ConditionType,
    LabelOperator,
    LabelRequirement,
    LabelSelector,
    find_condition,
    set_condition,
    unknown_conditions,
)
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTierSpec
from kvtier_api.volume import VolumeState

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
LATER = NOON + timedelta(minutes=5)
READY = ConditionType.READY


def test_transition_time_moves_only_when_the_status_does() -> None:
    first = set_condition([], READY, True, Reason.ALL_GUARANTEES_HOLD, generation=1, now=NOON)
    same = set_condition(first, READY, True, Reason.MEASURED, "again", generation=2, now=LATER)
    assert (same[0].last_transition_time, same[0].reason, same[0].observed_generation) == (NOON, "Measured", 2)
    flipped = set_condition(same, READY, False, Reason.GUARANTEE_NOT_MET, generation=2, now=LATER)
    assert (flipped[0].last_transition_time, flipped[0].status) == (LATER, "False")
    assert first[0].status == "True", "the list that was given is not changed"


def test_other_conditions_and_their_order_are_kept() -> None:
    found = unknown_conditions([READY, ConditionType.ENCRYPTED, ConditionType.MAPPED], generation=1, now=NOON)
    found = set_condition(found, ConditionType.ENCRYPTED, True, Reason.KERNEL_KEY_MEASURED, generation=1, now=LATER)
    assert [(it.type, it.status) for it in found] == [
        ("Ready", "Unknown"),
        ("Encrypted", "True"),
        ("Mapped", "Unknown"),
    ]
    assert find_condition(found, "Mapped") is found[2]
    assert find_condition(found, "Scrubbed") is None


def test_a_condition_is_written_as_metav1_condition() -> None:
    here = timezone(timedelta(hours=2))
    (condition,) = set_condition(
        [], READY, None, Reason.NOT_YET_MEASURED, generation=4, now=datetime(2026, 1, 31, 14, 0, 0, 999, tzinfo=here)
    )
    assert condition.model_dump(mode="json", exclude_none=True) == {
        "type": "Ready",
        "status": "Unknown",
        "observedGeneration": 4,
        "lastTransitionTime": "2026-01-31T12:00:00Z",
        "reason": "NotYetMeasured",
        "message": "",
    }


def test_a_newer_writers_reason_and_fields_are_read() -> None:
    condition = Condition.model_validate(
        {"type": "Ready", "status": "True", "reason": "Newer", "lastTransitionTime": "2026-01-31T12:00:00Z", "x": 1}
    )
    assert (condition.reason, condition.status) == ("Newer", ConditionStatus.TRUE)


@pytest.mark.parametrize(
    ("operator", "values", "labels", "selected"),
    [
        ("In", ["a"], {"app": "a"}, True),
        ("In", ["a"], {"app": "b"}, False),
        ("In", ["a"], {}, False),
        ("NotIn", ["a"], {"app": "a"}, False),
        ("NotIn", ["a"], {"app": "b"}, True),
        ("NotIn", ["a"], {}, True),
        ("Exists", None, {"app": ""}, True),
        ("Exists", None, {}, False),
        ("DoesNotExist", None, {}, True),
        ("DoesNotExist", None, {"app": "a"}, False),
    ],
)
def test_label_requirements(operator: str, values: list[str] | None, labels: dict[str, str], selected: bool) -> None:
    requirement = LabelRequirement(key="app", operator=LabelOperator(operator), values=values)
    assert LabelSelector(match_expressions=[requirement]).selects(labels) is selected


def test_labels_and_requirements_are_all_needed() -> None:
    exists = LabelRequirement(key="team", operator=LabelOperator.EXISTS)
    selector = LabelSelector(match_labels={"app": "a"}, match_expressions=[exists])
    assert selector.selects({"app": "a", "team": "x", "other": "y"})
    assert not selector.selects({"app": "a"})
    assert not selector.selects({"team": "x"})
    assert LabelSelector().selects({})


def test_a_tier_without_selectors_takes_every_node_and_workload() -> None:
    spec = KVCacheTierSpec.model_validate({"sizePerRank": "1Gi", "ranks": 1, "path": "/a"})
    assert spec.selects_node({})
    assert spec.selects_workload({})
    narrow = spec.model_copy(update={"node_selector": {"disk": "nvme"}})
    assert narrow.selects_node({"disk": "nvme", "zone": "a"})
    assert not narrow.selects_node({"disk": "hdd"})


def test_final_states() -> None:
    assert {state for state in VolumeState if state.is_final} == {VolumeState.ERASED, VolumeState.ABANDONED}
