"""SIGKILL of the agent, and of its children, with dm-crypt: what is left in the kernel is found and ended by the next agent.

The host's own kernel has no device mapper, so what tests/crash does for `Fscrypt` is done here for `DmCrypt`: each arrow, times
at random, and each call of a child that changes device mapper or a mount. KVTIER_CUT_SEED seeds the times.
"""

from __future__ import annotations

import os
import random

import pytest

from requirements import need_tool

pytestmark = [pytest.mark.vm, pytest.mark.slow]

SEED = int(os.environ.get("KVTIER_CUT_SEED", "20260401"))
KILLS = int(os.environ.get("KVTIER_KILLS", "64" if os.environ.get("KVTIER_EXHAUSTIVE") else "8"))
KILLS_EACH = 8
SHARDS = 2
LIFE_ARROWS = 7


def killed(node, kills=(), child_shard=(0, 0)):
    """Run the kills in one boot; every claim after each; the `killed` events."""
    from uml.agentnode import nothing_left

    machine = node.boot("agent_kills.py", kills=list(kills), child_shard=list(child_shard))
    machine.wait_for("finished", 550)
    machine.wait_off()
    found = [event for event in machine.events if event.tag == "killed"]
    for event in found:
        assert event["rebuilt"] is None, event["fault"]
        assert event["failed"] == [], event["fault"]
        nothing_left(event)
        for receipt in event["last"]:
            assert receipt["technique"] in ("KeyDestroyed", "Nothing"), event["fault"]
            assert receipt["trigger"] in ("Crash", "Restart", "Exit", "Request"), event["fault"]
    node.cut(machine)  # the keys of all these lives, and the canaries, on the raw disk
    return found


def test_an_agent_that_is_killed_at_an_arrow_is_followed_by_one_that_ends_what_it_left(new_node, count):
    found = killed(new_node(), [{"arrow": arrow} for arrow in range(LIFE_ARROWS)])
    assert [event["signal"] for event in found] == [0] + [9] * LIFE_ARROWS
    last = [event["last"][0] for event in found[1:]]
    assert [receipt["trigger"] for receipt in last] == ["Restart"] * 3 + ["Crash"] * 4
    count("kills of the agent at arrows", LIFE_ARROWS)


@pytest.mark.parametrize("shard", range(-(-KILLS // KILLS_EACH)))
def test_an_agent_that_is_killed_at_random_is_followed_by_one_that_ends_what_it_left(new_node, count, shard):
    source = random.Random(SEED * 1000 + 500 + shard)
    kills = [{"after": source.random()} for _ in range(min(KILLS_EACH, KILLS - shard * KILLS_EACH))]
    found = killed(new_node(), kills)
    in_time = sum(event["signal"] == 9 for event in found)  # the others came after the life's end
    assert in_time > len(kills) // 2
    count(f"kills of the agent at random (seed {SEED})", in_time)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_child_that_is_killed_at_a_call_that_changes_the_kernel_leaves_nothing(new_node, count, shard):
    need_tool("strace")
    found = killed(new_node(), child_shard=(shard, SHARDS))[1:]
    points = {event["fault"]["point"]: event["fault"]["name"] for event in found}
    print(f"shard {shard}: {points}")
    assert len(points) >= 5
    killed_at = {event["fault"]["point"] for event in found if event["child_was_killed"]}
    assert killed_at == set(points)
    count("kill points in children, all enumerated", len(points))
    half_made = [
        event
        for event in found
        if (event["fault"]["name"], event["fault"]["child"], event["child_was_killed"]) == ("DM_DEV_SUSPEND", 3, True)
    ]
    for event in half_made:  # cryptsetup had loaded the key, and not yet made its table the live one
        steps = {name: detail for name, _, detail in event["last"][0]["steps"]}
        assert "has no table" in steps["key-removed"]
