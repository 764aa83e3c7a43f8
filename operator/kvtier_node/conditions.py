"""The conditions of a tier on this node, one pure function each, from facts that were measured.

A condition is True only when something was measured that shows it, False when something was measured that refutes it, and
Unknown, with the reason, in all other cases. Nothing is inferred from what a manifest asks for. Who measures, and how often,
is left to `measuring`, `hardening`, `tier_check` and the agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from kvtier_api.meta import Condition, ConditionType, set_condition
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTier, KVCacheTierSpec, SaltPolicy
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.hardening import HostFacts
from kvtier_node.ledger import VolumeRow
from kvtier_node.measuring import VolumeMeasurement
from kvtier_node.sampling import SampleResult
from kvtier_node.tier_check import TierCheck

__all__ = ["Finding", "TierFacts", "VolumeFacts", "findings", "is_overdue", "to_conditions"]

_ENDING: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})
_USABLE: Final = frozenset({VolumeState.READY, VolumeState.IN_USE})


@dataclass(frozen=True)
class Finding:
    """One condition before it is written down. `status` None is Unknown."""

    type: ConditionType
    status: bool | None
    reason: Reason
    message: str


@dataclass(frozen=True)
class VolumeFacts:
    """A volume that has not ended: its record, its last measurement, and the last failure of its erasure."""

    row: VolumeRow
    measured: VolumeMeasurement | None = None
    failure: str = ""


@dataclass(frozen=True)
class TierFacts:
    """All that is known of a tier at `now`.

    `missed`, `plaintext`: receipt of the last erasure, if it was after its deadline, if it found plaintext.
    """

    tier: KVCacheTier
    now: datetime
    volumes: Sequence[VolumeFacts] = ()
    abandoned: int = 0
    check: TierCheck | None = None
    host: HostFacts | None = None
    missed: str = ""
    plaintext: str = ""
    manifest_problem: str = ""
    recovering: bool = False
    deleting: bool = False

    def in_state(self, states: Iterable[VolumeState]) -> list[VolumeFacts]:
        wanted = frozenset(states)
        return [volume for volume in self.volumes if volume.row.state in wanted]


def is_overdue(row: VolumeRow, now: datetime) -> bool:
    """Whether the volume's consumer ended longer ago than its deadline, and it is not erased yet."""
    if row.state not in _ENDING:
        return False
    since = datetime.fromisoformat(str(row.facts.get("died_at") or row.state_since))
    return now - since > timedelta(seconds=float(KVCacheTierSpec.model_validate(row.spec).scrub.deadline))


def provisioned(facts: TierFacts) -> Finding:
    """Volumes exist, with the marker of their own on the device of their own; or why none can be made."""

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.PROVISIONED, status, reason, message)

    failed = facts.in_state({VolumeState.FAILED})
    if failed:
        return found(False, Reason.PROVISIONING_FAILED, _each((v.row, v.row.reason) for v in failed))
    usable = facts.in_state(_USABLE)
    if not usable:
        return found(*_could_be_provisioned(facts))
    broken = [(v.row, v.measured.marker_error) for v in usable if v.measured and v.measured.marker_error]
    if broken:
        return found(False, Reason.PROVISIONING_FAILED, _each(broken))
    missing = _unmeasured(usable)
    if missing is not None:
        return found(None, *missing)
    return found(True, Reason.PROVISIONED, f"{len(usable)} volume(s), each with its own marker on its own device")


def _could_be_provisioned(facts: TierFacts) -> tuple[bool | None, Reason, str]:
    """Of a tier without a usable volume."""
    if facts.in_state({VolumeState.PLANNED, VolumeState.PROVISIONING}):
        return None, Reason.PROVISIONING, "a volume is being made"
    if facts.check is None:
        return None, Reason.NOT_YET_MEASURED, "the tier's path was not looked at yet"
    if facts.check.reason is not None:
        return False, facts.check.reason, facts.check.message
    return None, Reason.NO_VOLUMES, f"no volume; one can be made: {facts.check.message}"


def encrypted(facts: TierFacts) -> Finding:
    """What the kernel, or a sample of the slots where only the engine encrypts, says of each usable volume."""

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.ENCRYPTED, status, reason, message)

    usable = facts.in_state(_USABLE)
    if not usable:
        return found(None, Reason.NO_VOLUMES, "no volume is in use")
    seen = [(v.row, v.measured.encryption) for v in usable if v.measured and v.measured.encryption]
    plain = [(row, measured.reason) for row, measured in seen if measured.encrypted is False]
    if plain:
        sealed_only = any(row.backend is BackendName.SEAL_ONLY for row, _ in plain)
        return found(False, Reason.PLAINTEXT_FOUND if sealed_only else Reason.NOT_ENCRYPTED, _each(plain))
    missing = _unmeasured(usable)
    if missing is not None:
        return found(None, *missing)
    unclear = [(row, measured.reason) for row, measured in seen if measured.encrypted is None]
    if unclear:
        return found(None, Reason.NOT_YET_MEASURED, _each(unclear))
    reasons = {
        BackendName.SEAL_ONLY: Reason.SLOTS_SAMPLED_SEALED,
        BackendName.HOST_ATTESTED: Reason.HOST_VOLUME_MEASURED,
    }
    weakest = next((row for row, _ in seen if row.backend in reasons), seen[0][0])
    return found(
        True,
        reasons.get(weakest.backend, Reason.KERNEL_KEY_MEASURED),
        _each((row, measured.reason) for row, measured in seen),
    )


def salt_enforced(facts: TierFacts) -> Finding:
    """Only an engine can show this, and none reports to a node agent yet."""

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.SALT_ENFORCED, status, reason, message)

    policy = facts.tier.spec.salt.policy
    if policy is SaltPolicy.SHARED:
        return found(False, Reason.SALT_SHARED, "salt.policy is Shared: tenants share cached blocks")
    if not facts.in_state({VolumeState.IN_USE}):
        return found(None, Reason.NO_VOLUMES, "no volume is in use")
    return found(
        None, Reason.ENGINE_NOT_OBSERVED, f"salt.policy is {policy.value}; no engine has reported how it treats salts"
    )


def retention_enforced(facts: TierFacts) -> Finding:
    """Blocks end with the engine's key epochs. Of that only the slots can be seen from here: that they look sealed.

    Which keys sealed them, and when those end, is in the engine's memory alone: the message says so.
    """

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.RETENTION_ENFORCED, status, reason, message)

    used = facts.in_state({VolumeState.IN_USE})
    if not used:
        return found(None, Reason.NO_VOLUMES, "no volume is in use")
    open_slots = [(v.row, why) for v in used if (why := _cannot_expire(v))]
    if open_slots:
        too_old = [(row, why) for row, why in open_slots if _age(row, facts.now) > _max_age(row)]
        if too_old:
            return found(False, Reason.MAX_AGE_EXCEEDED, _each(too_old))
        return found(False, Reason.ENGINE_CANNOT_EXPIRE, _each(open_slots))
    missing = _unmeasured(used)
    if missing is not None:
        return found(None, *missing)
    samples = [(v.row, v.measured.slots if v.measured is not None else None) for v in used]
    unused = [
        (row, it.why_unknown() if it else "no slot is used yet") for row, it in samples if not (it and it.ciphertext)
    ]
    if unused:
        return found(None, Reason.NOT_YET_MEASURED, _each(unused))
    return found(True, Reason.SLOTS_SAMPLED_SEALED, _each((row, _looks_sealed(it)) for row, it in samples if it))


def _looks_sealed(sample: SampleResult) -> str:
    seen = f"{sample.ciphertext} of {sample.ciphertext + sample.plaintext} sampled blocks in use"
    return (
        f"{seen} cannot be told from random bytes; that they are sealed under key epochs is the engine's word and was not"
        f" measured ({sample.sentence()})"
    )


def scrubbed(facts: TierFacts) -> Finding:
    """Whether something is left of a consumer that ended, now. That it went late is on its receipt, and said beside it."""

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.SCRUBBED, status, reason, message)

    ending = facts.in_state(_ENDING)
    late = [v for v in ending if is_overdue(v.row, facts.now)]
    if late:
        return found(False, Reason.DEADLINE_MISSED, _each((v.row, v.failure or "not erased yet") for v in late))
    failing = [(v.row, v.failure) for v in ending if v.failure]
    if failing:
        return found(False, Reason.ERASE_INCOMPLETE, _each(failing))
    if facts.abandoned:
        return found(False, Reason.ABANDONED, f"{facts.abandoned} place(s) were given up; nothing is claimed of them")
    if ending:
        return found(None, Reason.ERASING, _each((v.row, "being erased, within its deadline") for v in ending))
    text = "no volume of an ended consumer is on record as not erased"
    if facts.plaintext:
        text = f"{text}; the last erasure found plaintext, and overwrote it: {facts.plaintext}"
    if facts.missed:
        text = f"{text}; the last erasure was after its deadline: {facts.missed}"
    return found(True, Reason.NOTHING_LEFT, text)


def host_hardened(facts: TierFacts) -> Finding:
    """Every way from memory to a disk, measured; the first that is open gives the reason, the message has all."""

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.HOST_HARDENED, status, reason, message)

    if facts.host is None:
        return found(None, Reason.NOT_YET_MEASURED, "the host was not looked at yet")
    ways = (
        (facts.host.swap, Reason.SWAP_UNENCRYPTED),
        (facts.host.core_dumps, Reason.CORE_DUMPS_ENABLED),
        (facts.host.hibernation, Reason.HIBERNATION_POSSIBLE),
        (facts.host.snapshots, Reason.SNAPSHOTS_POSSIBLE),
    )
    open_ways = [(fact, reason) for fact, reason in ways if fact.ok is False]
    if open_ways:
        return found(False, open_ways[0][1], "; ".join(fact.reason for fact, _ in open_ways))
    unclear = [fact.reason for fact, _ in ways if fact.ok is None]
    if unclear:
        return found(None, Reason.MEASUREMENT_FAILED, "; ".join(unclear))
    return found(True, Reason.HOST_HARDENED, "; ".join(fact.reason for fact, _ in ways))


def mapped(facts: TierFacts) -> Finding:
    """A node agent looks into the tier's own directory; stores elsewhere are for discovery to find."""
    if facts.check is not None and facts.check.reason is Reason.FOREIGN_DATA:
        return Finding(ConditionType.MAPPED, False, Reason.FOREIGN_DATA, facts.check.message)
    message = "what lies in the tier's directory is on record; stores elsewhere were not looked for"
    return Finding(ConditionType.MAPPED, None, Reason.NOT_YET_MEASURED, message)


_PARTS: Final[tuple[Callable[[TierFacts], Finding], ...]] = (
    provisioned,
    encrypted,
    salt_enforced,
    retention_enforced,
    scrubbed,
    host_hardened,
    mapped,
)


def ready(facts: TierFacts, parts: Sequence[Finding]) -> Finding:
    """True when every condition that the tier needs is True.

    Not needed: Mapped, which is discovery's; SaltEnforced where the policy is Shared.
    """

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.READY, status, reason, message)

    away = _not_serving(facts)
    if away is not None:
        return found(*away)
    spared = {ConditionType.MAPPED}
    if facts.tier.spec.salt.policy is SaltPolicy.SHARED:
        spared.add(ConditionType.SALT_ENFORCED)
    needed = [part for part in parts if part.type not in spared]
    false = [part for part in needed if part.status is False]
    if (
        false and false[0].type is ConditionType.PROVISIONED
    ):  # no volume can be made: that is what one wants to read first
        return found(False, false[0].reason, false[0].message)
    if false:
        return found(False, Reason.GUARANTEE_NOT_MET, _named(false))
    if not facts.in_state(_USABLE):
        return found(None, Reason.NO_VOLUMES, next(p.message for p in parts if p.type is ConditionType.PROVISIONED))
    unclear = [part for part in needed if part.status is None]
    if unclear:
        return found(None, Reason.GUARANTEE_NOT_MET, _named(unclear))
    return found(True, Reason.ALL_GUARANTEES_HOLD, "every condition that the tier needs is True")


def _not_serving(facts: TierFacts) -> tuple[bool | None, Reason, str] | None:
    """What stands above all measurements, if anything does."""
    if facts.manifest_problem:
        return False, Reason.INVALID_SPEC, f"the last good manifest is in force; now: {facts.manifest_problem}"
    if facts.deleting:
        return False, Reason.DELETING, "the manifest was removed; the tier's volumes are being erased"
    if facts.recovering:
        return None, Reason.RECOVERING, "the agent finishes what a crash or restart left"
    return None


def findings(facts: TierFacts) -> list[Finding]:
    """All of them, Ready first."""
    parts = [part(facts) for part in _PARTS]
    return [ready(facts, parts), *parts]


def to_conditions(found: Iterable[Finding], before: Sequence[Condition], facts: TierFacts) -> list[Condition]:
    """As they are written down: an unchanged status keeps its transition time."""
    conditions: list[Condition] = list(before)
    for finding in found:
        conditions = set_condition(
            conditions,
            finding.type,
            finding.status,
            finding.reason,
            finding.message,
            generation=facts.tier.metadata.generation,
            now=facts.now,
        )
    return conditions


def _each(reasons: Iterable[tuple[VolumeRow, str]]) -> str:
    return "; ".join(f"{row.volume_id}: {reason}" for row, reason in reasons)[:2000]


def _named(parts: Iterable[Finding]) -> str:
    words = {True: "True", False: "False", None: "Unknown"}
    return "; ".join(f"{part.type.value} is {words[part.status]} ({part.reason.value})" for part in parts)


def _unmeasured(volumes: Iterable[VolumeFacts]) -> tuple[Reason, str] | None:
    failed = [(v.row, v.measured.error) for v in volumes if v.measured is not None and v.measured.error]
    if failed:
        return Reason.MEASUREMENT_FAILED, _each(failed)
    missing = [v.row for v in volumes if v.measured is None]
    return (Reason.NOT_YET_MEASURED, _each((row, "not measured yet") for row in missing)) if missing else None


def _cannot_expire(volume: VolumeFacts) -> str:
    """Why blocks of this volume do not end with their epoch; empty if nothing says so."""
    if not KVCacheTierSpec.model_validate(volume.row.spec).encryption.seal_slots:
        return "sealSlots is false: the engine's blocks have no key of their own to drop"
    sample = volume.measured.slots if volume.measured is not None else None
    if sample is not None and sample.plaintext:
        return f"the engine does not seal: {sample.sentence()}"
    return ""


def _age(row: VolumeRow, now: datetime) -> timedelta:
    return now - datetime.fromisoformat(row.state_since)


def _max_age(row: VolumeRow) -> timedelta:
    return timedelta(seconds=float(KVCacheTierSpec.model_validate(row.spec).retention.max_age))
