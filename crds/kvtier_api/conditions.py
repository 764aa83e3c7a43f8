"""What every writer of a tier's conditions shares: a finding, the rule of `Ready`, and how findings are written down.

Who measures, and what a measurement means, is left to the node agent; how those of many nodes add up, to the controller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from kvtier_api.meta import Condition, ConditionType, set_condition
from kvtier_api.reasons import Reason
from kvtier_api.tier import SaltPolicy

__all__ = ["Finding", "ready_of", "written_down"]

_WORDS: Final = {True: "True", False: "False", None: "Unknown"}


@dataclass(frozen=True)
class Finding:
    """One condition before it is written down. `status` None is Unknown."""

    type: ConditionType
    status: bool | None
    reason: Reason
    message: str


def ready_of(parts: Sequence[Finding], *, policy: SaltPolicy, usable: bool) -> Finding:
    """True when every condition that the tier needs is True; `usable`: a volume is there to be used.

    Not needed: Mapped, which is discovery's; SaltEnforced where the policy is Shared.
    """

    def found(status: bool | None, reason: Reason, message: str) -> Finding:
        return Finding(ConditionType.READY, status, reason, message)

    spared = {ConditionType.MAPPED}
    if policy is SaltPolicy.SHARED:
        spared.add(ConditionType.SALT_ENFORCED)
    needed = [part for part in parts if part.type not in spared]
    false = [part for part in needed if part.status is False]
    for part in false:
        if part.type is ConditionType.PROVISIONED:
            return found(False, part.reason, part.message)
    if false:
        return found(False, Reason.GUARANTEE_NOT_MET, _named(false))
    if not usable:
        return found(None, Reason.NO_VOLUMES, next(p.message for p in parts if p.type is ConditionType.PROVISIONED))
    unclear = [part for part in needed if part.status is None]
    if unclear:
        return found(None, Reason.GUARANTEE_NOT_MET, _named(unclear))
    return found(True, Reason.ALL_GUARANTEES_HOLD, "every condition that the tier needs is True")


def written_down(
    found: Iterable[Finding], before: Sequence[Condition], *, generation: int | None, now: datetime
) -> list[Condition]:
    """`before` with the findings in it; an unchanged status keeps its transition time."""
    conditions = list(before)
    for finding in found:
        conditions = set_condition(
            conditions,
            finding.type,
            finding.status,
            finding.reason,
            finding.message,
            generation=generation,
            now=now,
        )
    return conditions


def _named(parts: Iterable[Finding]) -> str:
    return "; ".join(f"{part.type.value} is {_WORDS[part.status]} ({part.reason.value})" for part in parts)
