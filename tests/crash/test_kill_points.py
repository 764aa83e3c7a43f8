"""SIGKILL of the agent at every system call that changes state, one by one, then recovery and every claim.

And SIGKILL of each of the agent's children at every such call of theirs; and EIO and ENOSPC in place of each call.
CI enumerates every kill point; of the injected errors it takes a sample, KVTIER_EXHAUSTIVE=1 takes all.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import claims
import pytest
import scenario
import tracing

from conftest import discard, new_base
from requirements import need_root, need_tool

EXHAUSTIVE = bool(os.environ.get("KVTIER_EXHAUSTIVE"))
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(autouse=True)
def _needs() -> None:
    need_root()
    need_tool("strace")
    need_tool("mkfs.ext4")


SHARDS = 8
CHILD_SHARDS = 4
SAMPLED = 12
"""Injected errors per shard and kind in CI."""
KILL = "signal=KILL"


def once(
    made: list[Path], backend: str, fault: str | None, wrap: Callable[[Path], str] | None = None
) -> tuple[tracing.Ending, list[tracing.Point], list[tracing.Point]]:
    """One life under one fault, and the claims after it. Returns how it ended, and the agent's and the child's calls."""
    base = new_base(made)

    def subject() -> None:
        if wrap is not None:
            sys.executable = wrap(base)
        scenario.live(base, backend)

    ending = tracing.run(subject, base / "trace", fault)
    points = tracing.points_of(base / "trace")
    child = tracing.points_of(base / "child.trace") if (base / "child.trace").exists() else []
    (base / "trace").unlink()
    claims.nothing_is_left_after_recovery(base, backend, encrypted=backend != "SealOnly")
    discard(base)
    made.remove(base)
    return ending, points, child


def undisturbed(made: list[Path], backend: str) -> list[tracing.Point]:
    """The agent's points in a life without faults, which must go well."""
    ending, points, _ = once(made, backend, None)
    assert ending.code == 0, ending.said
    assert len(points) > 100, "the trace saw too little"
    return points


@pytest.mark.parametrize("shard", range(SHARDS))
def test_sigkill_of_the_agent_at_any_call_leaves_nothing_readable(bases: list[Path], shard: int) -> None:
    points = undisturbed(bases, "Fscrypt")
    mine = points[shard::SHARDS]
    killed = 0
    for point in mine:
        try:
            ending, _, _ = once(bases, "Fscrypt", point.fault(KILL))
        except AssertionError as error:
            raise AssertionError(f"killed at {point.call} number {point.number} ({point.text}): {error}") from error
        killed += ending.killed
    print(f"agent: {killed} kills at {len(mine)} of {len(points)} points (shard {shard + 1} of {SHARDS})")
    assert killed >= len(mine) * 0.9, "the kills did not happen: the trace and the runs differ"


@pytest.mark.parametrize("shard", range(CHILD_SHARDS))
def test_sigkill_of_a_child_at_any_call_leaves_nothing_readable(bases: list[Path], shard: int) -> None:
    total = 0
    for invocation in itertools.count(1):
        _, _, points = once(
            bases, "Fscrypt", None, lambda base, k=invocation: tracing.child_fault(base, invocation=k, fault=None)
        )
        if not points:
            break
        for point in points[shard::CHILD_SHARDS]:
            try:
                once(
                    bases,
                    "Fscrypt",
                    None,
                    lambda base, k=invocation, p=point: tracing.child_fault(base, invocation=k, fault=p.fault(KILL)),
                )
            except AssertionError as error:
                raise AssertionError(
                    f"child {invocation} killed at {point.call} number {point.number} ({point.text}): {error}"
                ) from error
            total += 1
    print(f"children: {total} kills in {invocation - 1} children (shard {shard + 1} of {CHILD_SHARDS})")
    assert invocation > 5, "the stand-in for the interpreter was not used"


@pytest.mark.parametrize("errno", ["EIO", "ENOSPC"])
@pytest.mark.parametrize("shard", range(2))
def test_an_error_at_any_call_is_reported_and_leaves_nothing_readable(
    bases: list[Path], errno: str, shard: int
) -> None:
    points = undisturbed(bases, "Fscrypt")
    mine = points[shard::2]
    if not EXHAUSTIVE:
        mine = mine[:: max(1, len(mine) // SAMPLED)]
    raised = 0
    for point in mine:
        try:
            ending, _, _ = once(bases, "Fscrypt", point.fault(f"error={errno}"))
        except AssertionError as error:
            raise AssertionError(f"{errno} at {point.call} number {point.number} ({point.text}): {error}") from error
        assert not ending.killed
        raised += ending.code != 0
    print(f"{errno}: {len(mine)} of {len(points)} points, {raised} of them ended the life with an error")
    assert raised, "no injected error was noticed: the agent swallows them"


@pytest.mark.parametrize("shard", range(2))
def test_sigkill_at_any_call_on_a_plain_volume_leaves_nothing(bases: list[Path], shard: int) -> None:
    """SealOnly with a consumer that does not seal: the left-over is found and overwritten."""
    points = undisturbed(bases, "SealOnly")
    mine = points[shard::2]
    if not EXHAUSTIVE:
        mine = mine[::8]
    for point in mine:
        try:
            once(bases, "SealOnly", point.fault(KILL))
        except AssertionError as error:
            raise AssertionError(f"killed at {point.call} number {point.number} ({point.text}): {error}") from error
    print(f"plain volume: {len(mine)} of {len(points)} points (shard {shard + 1} of 2)")
