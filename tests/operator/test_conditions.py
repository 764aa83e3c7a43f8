"""Each condition of a tier, from what its nodes measured: a table of facts and the answer."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvtier_api.conditions import Finding
from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState
from kvtier_operator.conditions import Tier, findings, overdue_in_s
from kvtier_operator.facts import VolumeFacts
from kvtier_operator.places import Surroundings, places
from operator_facts import GOOD, NOW, a_node, a_tier, a_volume, around, said

S = VolumeState
LATE = NOW - timedelta(minutes=5)
JUST_NOW = NOW - timedelta(seconds=3)


def judge(volumes: list[VolumeFacts], where: Surroundings | None = None, **spec: Any) -> dict[str, Finding]:
    facts = a_tier(**spec)
    assert facts.spec is not None
    tier = Tier(facts.spec, NOW, places(volumes, where or around()), seen_ending(volumes))
    return {finding.type.value: finding for finding in findings(tier)}


def seen_ending(volumes: list[VolumeFacts]) -> dict[str, float]:
    return {it.uid: (NOW - it.state_since).total_seconds() for it in volumes if it.state_since is not None}


def with_(number: int = 1, state: S | None = S.IN_USE, **conditions: tuple[bool | None, str]) -> VolumeFacts:
    return a_volume(number, state, conditions={**GOOD, **said(**conditions)})


GONE = Surroundings({})
ROWS: list[tuple[str, list[VolumeFacts], Surroundings | None, str, bool | None, str]] = [
    ("no volume", [], None, "Ready", None, "NoVolumes"),
    ("no volume", [], None, "Provisioned", None, "NoVolumes"),
    ("no volume", [], None, "Encrypted", None, "NoVolumes"),
    ("no volume", [], None, "Scrubbed", True, "NothingLeft"),
    ("no volume", [], None, "HostHardened", None, "NoVolumes"),
    ("no volume", [], None, "Mapped", None, "NoVolumes"),
    ("all good", [a_volume()], None, "Ready", True, "AllGuaranteesHold"),
    ("all good", [a_volume()], None, "Encrypted", True, "KernelKeyMeasured"),
    ("all good", [a_volume()], None, "Mapped", None, "NotYetMeasured"),
    ("being made", [a_volume(state=S.PROVISIONING)], None, "Provisioned", None, "Provisioning"),
    ("being made on a silent node", [a_volume(state=S.PLANNED)], GONE, "Provisioned", None, "NodeUnreachable"),
    ("failed", [a_volume(state=S.FAILED, reason="mkfs: EIO")], None, "Provisioned", False, "ProvisioningFailed"),
    ("failed", [a_volume(state=S.FAILED)], None, "Ready", False, "ProvisioningFailed"),
    ("not measured yet", [a_volume(conditions={})], None, "Encrypted", None, "NotYetMeasured"),
    ("measurement failed", [with_(Encrypted=(None, "MeasurementFailed"))], None, "Encrypted", None, "MeasurementFailed"),
    ("one of two plain", [a_volume(), with_(2, Encrypted=(False, "PlaintextFound"))], None, "Encrypted", False, "PlaintextFound"),
    ("one of two plain", [a_volume(), with_(2, Encrypted=(False, "PlaintextFound"))], None, "Ready", False, "GuaranteeNotMet"),
    ("two kinds", [a_volume(), with_(2, Encrypted=(True, "HostVolumeMeasured"))], None, "Encrypted", True, "Measured"),
    ("a reason of a newer agent", [with_(Encrypted=(False, "QuantumBroken"))], None, "Encrypted", False, "GuaranteeNotMet"),
    ("silent node", [a_volume()], GONE, "Encrypted", None, "NodeUnreachable"),
    ("silent node", [a_volume()], GONE, "Scrubbed", None, "NodeUnreachable"),
    ("silent node", [a_volume()], GONE, "HostHardened", None, "NodeUnreachable"),
    ("silent node", [a_volume()], GONE, "Ready", None, "GuaranteeNotMet"),
    ("a False stays in silence", [with_(Encrypted=(False, "NotEncrypted"))], GONE, "Encrypted", False, "NotEncrypted"),
    ("node not ready", [a_volume()], around(a_node(ready=False)), "Scrubbed", None, "NodeUnreachable"),
    ("node unknown", [a_volume()], around(a_node(ready=None)), "Scrubbed", None, "NodeUnreachable"),
    ("agent not ready", [a_volume()], around(agents={"node-a": False}), "Scrubbed", None, "NodeUnreachable"),
    ("agent absent", [a_volume()], around(agents={}), "Scrubbed", None, "NodeUnreachable"),
    ("agent ready", [a_volume()], around(agents={"node-a": True}), "Scrubbed", True, "NothingLeft"),
    ("dying", [a_volume(state=S.DYING, state_since=JUST_NOW)], None, "Scrubbed", None, "Erasing"),
    ("dying for too long", [a_volume(state=S.DYING, state_since=LATE)], None, "Scrubbed", False, "DeadlineMissed"),
    ("node says so", [with_(state=S.ERASING, Scrubbed=(False, "EraseIncomplete"))], None, "Scrubbed", False, "EraseIncomplete"),
    ("erased", [a_volume(state=S.ERASED)], None, "Scrubbed", True, "NothingLeft"),
    ("erased on a node that is gone since", [a_volume(state=S.ERASED)], GONE, "Scrubbed", True, "NothingLeft"),
    ("erased late", [with_(state=S.ERASED, Scrubbed=(False, "DeadlineMissed"))], None, "Scrubbed", True, "NothingLeft"),
    ("late, not erased", [with_(state=S.ERASING, Scrubbed=(False, "DeadlineMissed"))], None, "Scrubbed", False, "DeadlineMissed"),
    ("not in the node's ledger", [with_(Scrubbed=(None, "NotInLedger"))], None, "Scrubbed", None, "NotInLedger"),
    ("not in the node's ledger", [with_(Scrubbed=(None, "NotInLedger"))], None, "Encrypted", None, "NotInLedger"),
    ("not in the node's ledger", [with_(Scrubbed=(None, "NotInLedger"))], None, "Ready", None, "GuaranteeNotMet"),
    ("not in a ledger, and the node is gone since", [with_(Scrubbed=(None, "NotInLedger"))], GONE, "Scrubbed", None, "NodeUnreachable"),
    ("given up", [a_volume(state=S.ABANDONED, reason="shredded")], None, "Scrubbed", False, "Abandoned"),
    ("unreadable", [a_volume(state=None, problem="status.state: no such state")], None, "Scrubbed", None, "MeasurementFailed"),
    ("unreadable", [a_volume(state=None, problem="status.state: no such state")], None, "Provisioned", None, "MeasurementFailed"),
    ("no engine reports", [with_(SaltEnforced=(None, "EngineNotObserved"))], None, "SaltEnforced", None, "EngineNotObserved"),
    ("engine ignores", [with_(SaltEnforced=(False, "EngineIgnoresSalt"))], None, "SaltEnforced", False, "EngineIgnoresSalt"),
    ("stock", [with_(RetentionEnforced=(False, "EngineCannotExpire"))], None, "RetentionEnforced", False, "EngineCannotExpire"),
    ("foreign data", [with_(Mapped=(False, "ForeignData"))], None, "Mapped", False, "ForeignData"),
    ("foreign data is discovery's", [with_(Mapped=(False, "ForeignData"))], None, "Ready", True, "AllGuaranteesHold"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "volumes", "where", "type_", "status", "reason"), ROWS, ids=[f"{row[3]}: {row[0]}" for row in ROWS]
)
def test_a_condition_says_what_was_measured(
    name: str, volumes: list[VolumeFacts], where: Surroundings | None, type_: str, status: bool | None, reason: str
) -> None:
    found = judge(volumes, where)[type_]
    assert (found.status, found.reason.value) == (status, reason), found.message


def test_every_type_is_there_at_the_first_visit_and_ready_comes_first() -> None:
    assert list(judge([])) == [it.value for it in ConditionType if it is not ConditionType.COMPLETE]


def test_a_shared_policy_is_said_and_spares_ready() -> None:
    found = judge([a_volume()], salt={"policy": "Shared"})
    assert found["SaltEnforced"].reason is Reason.SALT_SHARED
    assert found["SaltEnforced"].status is False
    assert found["Ready"].status is True


def test_a_reboot_that_lost_the_keys_of_a_silent_node_is_scrubbing() -> None:
    found = judge([a_volume()], around(a_node(ready=False, boot_id="boot-2")))
    assert (found["Scrubbed"].status, found["Scrubbed"].reason) == (True, Reason.NOTHING_LEFT)
    assert "boot-2" in found["Scrubbed"].message


def test_an_overdue_volume_is_looked_at_when_its_deadline_passes() -> None:
    facts = a_tier()
    assert facts.spec is not None
    volume = a_volume(state=S.DYING, state_since=JUST_NOW)
    tier = Tier(facts.spec, NOW, places([volume], around()), seen_ending([volume]))
    wait_s = overdue_in_s(tier)
    assert wait_s is not None
    assert 0 < wait_s <= 40
    later = replace(tier, ending_s={volume.uid: 3 + wait_s})
    assert {it.type: it for it in findings(later)}[ConditionType.SCRUBBED].reason is Reason.DEADLINE_MISSED


def test_a_message_stays_short_with_a_thousand_volumes() -> None:
    found = judge([with_(number, Encrypted=(False, "NotEncrypted")) for number in range(1000)])
    assert "and 995 more" in found["Encrypted"].message
    assert len(found["Encrypted"].message) < 4000
