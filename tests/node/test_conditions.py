"""Conditions as pure functions, in tables: True only where something was measured that shows it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvtier_api.documents import parse_object
from kvtier_api.meta import ConditionType, find_condition
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.backends.base import Measurement
from kvtier_node.conditions import Finding, TierFacts, VolumeFacts, findings, is_overdue, to_conditions
from kvtier_node.hardening import Fact, HostFacts
from kvtier_node.ledger import VolumeRow
from kvtier_node.measuring import VolumeMeasurement
from kvtier_node.sampling import SampleResult
from kvtier_node.tier_check import TierCheck

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
GOOD, BAD, UNCLEAR = Fact(True, "good"), Fact(False, "bad"), Fact(None, "unclear")
HARD = HostFacts(GOOD, GOOD, GOOD, GOOD)
CAN = TierCheck(None, "Fscrypt: tried", BackendName.FSCRYPT)
T = ConditionType


def tier(**spec: Any) -> KVCacheTier:
    body = {"path": "/var/lib/kvtier/tiers/chat", "sizePerRank": "1Gi", "ranks": 1, **spec}
    return parse_object(
        {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheTier", "metadata": {"name": "chat"}, "spec": body},
        kind=KVCacheTier,
    )


def text(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def row(
    state: VolumeState = VolumeState.IN_USE,
    *,
    backend: BackendName = BackendName.FSCRYPT,
    since: timedelta = timedelta(minutes=1),
    **spec: Any,
) -> VolumeRow:
    return VolumeRow(
        volume_id="kvv-" + "0" * 20,
        tier_uid="default/chat",
        tier_namespace="default",
        tier_name="chat",
        node="n",
        boot_id="b",
        backend=backend,
        cipher="c",
        place="/p",
        size_bytes=1,
        ranks=1,
        bytes_per_rank=1,
        state=state,
        reason="because",
        spec=tier(**spec).spec.model_dump(mode="json", by_alias=True),
        state_since=text(NOW - since),
    )


def sample(*, empty: int = 0, ciphertext: int = 0, plaintext: int = 0) -> SampleResult:
    return SampleResult(empty + ciphertext + plaintext, empty, ciphertext, plaintext, [0] * bool(plaintext), True)


def measured(encrypted: bool | None, slots: SampleResult | None, **more: Any) -> VolumeMeasurement:
    return VolumeMeasurement(NOW, Measurement(encrypted, "as the kernel says"), slots, **more)


SEALED = measured(True, sample(empty=1, ciphertext=9))
PLAIN = measured(True, sample(ciphertext=9, plaintext=1))
UNUSED = measured(True, sample(empty=9))
FAILED = VolumeMeasurement(NOW, error="EIO")


def facts(*volumes: VolumeFacts, **more: Any) -> TierFacts:
    return TierFacts(**({"tier": tier(), "now": NOW, "volumes": volumes, "check": CAN, "host": HARD} | more))


def used(seen: VolumeMeasurement | None = SEALED, **more: Any) -> VolumeFacts:
    return VolumeFacts(row(**more), seen)


def of(type_: ConditionType, it: TierFacts) -> Finding:
    return next(found for found in findings(it) if found.type is type_)


def ending(state: VolumeState = VolumeState.ERASING, failure: str = "", **more: Any) -> VolumeFacts:
    return VolumeFacts(row(state, **more), None, failure)


SHORT = timedelta(seconds=1)
CASES = [
    # Provisioned
    (T.PROVISIONED, facts(used()), True, Reason.PROVISIONED),
    (T.PROVISIONED, facts(used(None)), None, Reason.NOT_YET_MEASURED),
    (T.PROVISIONED, facts(used(FAILED)), None, Reason.MEASUREMENT_FAILED),
    (T.PROVISIONED, facts(used(replace(SEALED, marker_error="no marker"))), False, Reason.PROVISIONING_FAILED),
    (T.PROVISIONED, facts(VolumeFacts(row(VolumeState.PROVISIONING))), None, Reason.PROVISIONING),
    (T.PROVISIONED, facts(VolumeFacts(row(VolumeState.FAILED))), False, Reason.PROVISIONING_FAILED),
    (T.PROVISIONED, facts(), None, Reason.NO_VOLUMES),
    (T.PROVISIONED, facts(check=None), None, Reason.NOT_YET_MEASURED),
    (T.PROVISIONED, facts(check=TierCheck(Reason.FOREIGN_DATA, "x")), False, Reason.FOREIGN_DATA),
    (T.PROVISIONED, facts(check=TierCheck(Reason.INSUFFICIENT_SPACE, "x")), False, Reason.INSUFFICIENT_SPACE),
    # what exists counts, whether or not another one would fit
    (T.PROVISIONED, facts(used(), check=TierCheck(Reason.INSUFFICIENT_SPACE, "x")), True, Reason.PROVISIONED),
    # Encrypted
    (T.ENCRYPTED, facts(used()), True, Reason.KERNEL_KEY_MEASURED),
    (T.ENCRYPTED, facts(used(backend=BackendName.HOST_ATTESTED)), True, Reason.HOST_VOLUME_MEASURED),
    (T.ENCRYPTED, facts(used(backend=BackendName.SEAL_ONLY)), True, Reason.SLOTS_SAMPLED_SEALED),
    (T.ENCRYPTED, facts(used(), used(backend=BackendName.SEAL_ONLY)), True, Reason.SLOTS_SAMPLED_SEALED),
    (T.ENCRYPTED, facts(used(measured(False, None))), False, Reason.NOT_ENCRYPTED),
    (
        T.ENCRYPTED,
        facts(used(measured(False, None), backend=BackendName.SEAL_ONLY)),
        False,
        Reason.PLAINTEXT_FOUND,
    ),
    (T.ENCRYPTED, facts(used(measured(None, None))), None, Reason.NOT_YET_MEASURED),
    (T.ENCRYPTED, facts(used(None)), None, Reason.NOT_YET_MEASURED),
    (T.ENCRYPTED, facts(used(FAILED)), None, Reason.MEASUREMENT_FAILED),
    (T.ENCRYPTED, facts(used(), used(FAILED)), None, Reason.MEASUREMENT_FAILED),
    (T.ENCRYPTED, facts(used(FAILED), used(measured(False, None))), False, Reason.NOT_ENCRYPTED),
    (T.ENCRYPTED, facts(), None, Reason.NO_VOLUMES),
    (T.ENCRYPTED, facts(ending()), None, Reason.NO_VOLUMES),
    # SaltEnforced: never True here, whatever was asked for
    (T.SALT_ENFORCED, facts(used()), None, Reason.ENGINE_NOT_OBSERVED),
    (T.SALT_ENFORCED, facts(), None, Reason.NO_VOLUMES),
    (T.SALT_ENFORCED, facts(used(), tier=tier(salt={"policy": "Shared"})), False, Reason.SALT_SHARED),
    # RetentionEnforced
    (T.RETENTION_ENFORCED, facts(used()), True, Reason.SLOTS_SAMPLED_SEALED),
    (T.RETENTION_ENFORCED, facts(used(UNUSED)), None, Reason.NOT_YET_MEASURED),
    (T.RETENTION_ENFORCED, facts(used(), used(UNUSED)), None, Reason.NOT_YET_MEASURED),
    (T.RETENTION_ENFORCED, facts(used(PLAIN)), False, Reason.ENGINE_CANNOT_EXPIRE),
    (T.RETENTION_ENFORCED, facts(used(), used(PLAIN)), False, Reason.ENGINE_CANNOT_EXPIRE),
    (
        T.RETENTION_ENFORCED,
        facts(used(PLAIN, since=timedelta(hours=2), retention={"maxAge": "1h"})),
        False,
        Reason.MAX_AGE_EXCEEDED,
    ),
    (T.RETENTION_ENFORCED, facts(used(encryption={"sealSlots": False})), False, Reason.ENGINE_CANNOT_EXPIRE),
    (T.RETENTION_ENFORCED, facts(used(None)), None, Reason.NOT_YET_MEASURED),
    (T.RETENTION_ENFORCED, facts(used(FAILED)), None, Reason.MEASUREMENT_FAILED),
    (T.RETENTION_ENFORCED, facts(), None, Reason.NO_VOLUMES),
    (T.RETENTION_ENFORCED, facts(VolumeFacts(row(VolumeState.READY), SEALED)), None, Reason.NO_VOLUMES),
    # Scrubbed
    (T.SCRUBBED, facts(), True, Reason.NOTHING_LEFT),
    (T.SCRUBBED, facts(used()), True, Reason.NOTHING_LEFT),
    (T.SCRUBBED, facts(ending(since=SHORT)), None, Reason.ERASING),
    (T.SCRUBBED, facts(ending(since=SHORT, failure="open file")), False, Reason.ERASE_INCOMPLETE),
    (T.SCRUBBED, facts(ending(since=timedelta(minutes=1))), False, Reason.DEADLINE_MISSED),
    (T.SCRUBBED, facts(ending(VolumeState.DYING, since=timedelta(minutes=1))), False, Reason.DEADLINE_MISSED),
    (T.SCRUBBED, facts(ending(since=timedelta(minutes=1), scrub={"deadline": "5m"})), None, Reason.ERASING),
    (T.SCRUBBED, facts(abandoned=1), False, Reason.ABANDONED),
    (T.SCRUBBED, facts(missed="receipt kvr-1"), True, Reason.NOTHING_LEFT),
    # HostHardened
    (T.HOST_HARDENED, facts(), True, Reason.HOST_HARDENED),
    (T.HOST_HARDENED, facts(host=None), None, Reason.NOT_YET_MEASURED),
    (T.HOST_HARDENED, facts(host=replace(HARD, swap=BAD)), False, Reason.SWAP_UNENCRYPTED),
    (T.HOST_HARDENED, facts(host=replace(HARD, core_dumps=BAD)), False, Reason.CORE_DUMPS_ENABLED),
    (T.HOST_HARDENED, facts(host=replace(HARD, hibernation=BAD)), False, Reason.HIBERNATION_POSSIBLE),
    (T.HOST_HARDENED, facts(host=replace(HARD, snapshots=BAD)), False, Reason.SNAPSHOTS_POSSIBLE),
    (T.HOST_HARDENED, facts(host=replace(HARD, swap=UNCLEAR)), None, Reason.MEASUREMENT_FAILED),
    (T.HOST_HARDENED, facts(host=replace(HARD, swap=UNCLEAR, snapshots=BAD)), False, Reason.SNAPSHOTS_POSSIBLE),
    # Mapped: nobody looks for stores here
    (T.MAPPED, facts(used()), None, Reason.NOT_YET_MEASURED),
    (T.MAPPED, facts(check=TierCheck(Reason.FOREIGN_DATA, "x")), False, Reason.FOREIGN_DATA),
    # Ready
    (T.READY, facts(), None, Reason.NO_VOLUMES),
    (T.READY, facts(used()), None, Reason.GUARANTEE_NOT_MET),  # no engine reports its salts
    (T.READY, facts(used(), tier=tier(salt={"policy": "Shared"})), True, Reason.ALL_GUARANTEES_HOLD),
    (T.READY, facts(used(PLAIN), tier=tier(salt={"policy": "Shared"})), False, Reason.GUARANTEE_NOT_MET),
    (T.READY, facts(used(), host=replace(HARD, swap=BAD)), False, Reason.GUARANTEE_NOT_MET),
    (T.READY, facts(check=TierCheck(Reason.PATH_NOT_ALLOWED, "x")), False, Reason.PATH_NOT_ALLOWED),
    (T.READY, facts(used(), deleting=True), False, Reason.DELETING),
    (T.READY, facts(used(), recovering=True), None, Reason.RECOVERING),
    (T.READY, facts(used(), manifest_problem="line 3"), False, Reason.INVALID_SPEC),
]


@pytest.mark.parametrize(("type_", "it", "status", "reason"), CASES)
def test_a_condition_says_what_was_measured(
    type_: ConditionType, it: TierFacts, status: bool | None, reason: Reason
) -> None:
    found = of(type_, it)
    assert (found.status, found.reason) == (status, reason), found.message
    assert found.message


def test_every_tier_has_all_eight_conditions() -> None:
    assert [found.type for found in findings(facts())] == [
        T.READY, T.PROVISIONED, T.ENCRYPTED, T.SALT_ENFORCED, T.RETENTION_ENFORCED, T.SCRUBBED, T.HOST_HARDENED, T.MAPPED,
    ]  # fmt: skip


def test_nothing_is_true_of_a_volume_that_was_not_measured() -> None:
    true = {found.type for found in findings(facts(used(None), host=None, check=None)) if found.status}
    assert true <= {T.SCRUBBED}  # the ledger itself is what that one measures


def test_ready_names_each_condition_that_is_missing() -> None:
    message = of(T.READY, facts(used(PLAIN), host=replace(HARD, swap=BAD))).message
    assert "RetentionEnforced is False (EngineCannotExpire)" in message
    assert "HostHardened is False (SwapUnencrypted)" in message


def test_the_deadline_runs_from_the_death_and_not_from_the_last_attempt() -> None:
    late = row(VolumeState.ERASING, since=timedelta(seconds=1))
    died = replace(late, facts={"died_at": text(NOW - timedelta(minutes=1))})
    assert (is_overdue(late, NOW), is_overdue(died, NOW)) == (False, True)
    assert not is_overdue(replace(died, state=VolumeState.IN_USE), NOW)


def test_a_status_that_did_not_change_keeps_its_transition_time() -> None:
    before = to_conditions(findings(facts()), [], facts())
    later = replace(facts(used()), now=NOW + timedelta(hours=1))
    after = to_conditions(findings(later), before, later)
    ready, provisioned = find_condition(after, "Ready"), find_condition(after, "Provisioned")
    assert ready is not None and ready.last_transition_time == NOW
    assert provisioned is not None and provisioned.last_transition_time == NOW + timedelta(hours=1)


def test_sealed_slots_are_said_to_be_what_was_measured_and_no_more() -> None:
    message = of(T.RETENTION_ENFORCED, facts(used())).message
    assert "9 of 9 sampled blocks in use cannot be told from random bytes" in message
    assert "is the engine's word and was not measured" in message
    assert "no slot is used yet" not in of(T.RETENTION_ENFORCED, facts(used(UNUSED))).message, "9 blocks were written"
    nothing = measured(None, sample())
    assert "no slot is used yet" in of(T.RETENTION_ENFORCED, facts(used(nothing))).message


def test_that_the_last_erasure_found_plaintext_is_said_beside_that_nothing_is_left() -> None:
    found = of(T.SCRUBBED, facts(plaintext="receipt kvr-1"))
    assert found.status is True and "found plaintext, and overwrote it: receipt kvr-1" in found.message
