"""The agent loses its power at every arrow of its ledger and at random, with dm-crypt; then it boots on the same disk.

Guarantees Crash-erase, Fence and Record-before-write. KVTIER_CUTS is the number of cuts at random (50), KVTIER_CUT_SEED
their seed; both are printed with what each cut hit.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vm, pytest.mark.slow]

CUTS = int(os.environ.get("KVTIER_CUTS", "50"))
SEED = int(os.environ.get("KVTIER_CUT_SEED", "20260401"))
CUTS_EACH = 5
SHARDS = -(-CUTS // CUTS_EACH)
LIFE_ARROWS = 7
GUESTS = Path(__file__).parent / "guests"


def test_a_life_without_a_cut_takes_every_arrow_and_leaves_nothing_on_the_disk(new_node):
    from uml.agentnode import LIFE, after_a_power_cut, arrows

    node = new_node()
    machine = node.boot(rounds=2)
    after_a_power_cut(machine)
    assert tuple(arrows(machine)) == LIFE * 2
    assert len(LIFE) == LIFE_ARROWS
    receipts = machine.events[-2]["chain"]["receipts"]
    assert {(receipt["trigger"], receipt["technique"]) for receipt in receipts} == {("Crash", "KeyDestroyed")}
    node.cut(machine)
    assert len(node.keys) == 4  # two volumes, and a probe before each


@pytest.mark.parametrize("arrow", range(LIFE_ARROWS))
def test_a_cut_at_an_arrow_leaves_nothing_readable_and_is_erased_by_the_next_boot(new_node, count, arrow):
    from uml.agentnode import LIFE, after_a_power_cut

    node = new_node()
    machine = node.boot(stop_at=arrow)
    assert machine.wait_for("arrow", where=lambda event: event["n"] == arrow)["after"] == LIFE[arrow]
    node.cut(machine)
    machine = node.boot()
    after_a_power_cut(machine)
    assert machine.events[1].tag == "opened" and [row["state"] for row in machine.events[1]["rows"]] == [LIFE[arrow]]
    node.cut(machine)
    count("cuts at arrows", 1)


@pytest.mark.parametrize(
    ("first", "recovery"),
    [
        (1, ["Erasing", "Erased"]),  # half made
        (3, ["Dying", "Erasing", "Erased"]),  # in use
    ],
    ids=["Provisioning", "InUse"],
)
def test_cuts_during_each_recovery_after_a_cut_only_delay_the_erasure(new_node, count, first, recovery):
    from uml.agentnode import after_a_power_cut, arrows

    node = new_node()
    machine = node.boot(stop_at=first)
    machine.wait_for("arrow", where=lambda event: event["n"] == first)
    node.cut(machine)
    for state in recovery:
        # The recovery of each boot goes on where the one before was cut: its first arrow is the next one.
        machine = node.boot(stop_at=0)
        machine.wait_for("arrow")
        assert arrows(machine) == [state]
        assert not any(event.tag in ("recovered", "served") for event in machine.events)
        node.cut(machine)
    machine = node.boot()
    after_a_power_cut(machine)
    node.cut(machine)
    count("cuts at arrows", 1)
    count("cuts at arrows of a recovery", len(recovery))


@pytest.mark.parametrize(("arrow", "state"), [(2, "Failed"), (3, "Erasing"), (4, "Erased")])
def test_a_cut_at_an_arrow_of_a_provisioning_that_failed_is_erased_by_the_next_boot(
    new_node, make_disk, count, arrow, state
):
    from uml.agentnode import after_a_power_cut

    node = new_node()
    small = make_disk(8, "small.img")
    machine = node.boot(stop_at=arrow, disks=(small,), device="/dev/ubdc", may_fail=True)
    assert machine.wait_for("arrow", where=lambda event: event["n"] == arrow)["after"] == state
    node.cut(machine)
    machine = node.boot()
    after_a_power_cut(machine)
    assert [row["state"] for row in machine.events[1]["rows"]] == [state]
    node.cut(machine)
    assert not any(small.read_bytes())
    count("cuts at arrows", 1)


def test_a_cut_at_the_arrow_that_abandons_a_volume_in_use_leaves_it_abandoned_and_unreadable(new_node, count):
    node = new_node()
    machine = node.boot(stop_at=4, abandon=True)
    assert machine.wait_for("arrow", where=lambda event: event["n"] == 4)["after"] == "Abandoned"
    node.cut(machine)
    machine = node.boot(rounds=0)
    done = machine.wait_for("done")
    machine.wait_off()
    assert [row["state"] for row in done["rows"]] == ["Abandoned"]
    (receipt,) = done["chain"]["receipts"]
    assert (receipt["technique"], receipt["trigger"], done["chain"]["ok"]) == ("Nothing", "Request", True)
    assert done["places"] == [done["rows"][0]["volume"]]  # an administrator said so: kvtier leaves it alone
    assert node.hits() == []


@pytest.fixture(scope="module")
def span_s(uml_kernel, tmp_path_factory):
    """Seconds from a guest's first word to the end of one life, on this machine and under its load now."""
    from uml.agentnode import CANARIES, make_node_disk
    from uml.machine import Machine

    work = tmp_path_factory.mktemp("span")
    args = {"rounds": 1, "lines": [line.decode() for line in CANARIES], "backend": "DmCrypt", "kind": "ext4"}
    disks = [make_node_disk(work / "node.img")]
    with Machine(work, GUESTS / "agent_life.py", uml_kernel, disks=disks, args=args) as machine:
        up = machine.wait_for("up")
        return machine.wait_for("done").at_s - up.at_s


@pytest.mark.parametrize("shard", range(SHARDS))
def test_cuts_at_random_leave_nothing_readable_and_nothing_unerased(new_node, span_s, count, shard):
    from uml.agentnode import after_a_power_cut

    source = random.Random(SEED * 1000 + shard)
    kind = "xfs" if shard % 4 == 3 else "ext4"
    node = new_node(kind=kind)
    number = min(CUTS_EACH, CUTS - shard * CUTS_EACH)
    for cut in range(number):
        # Each boot finds what the cut before left: so recoveries are cut as often as lives.
        machine = node.boot(rounds=1000)
        machine.wait_for("up")
        delay_s = source.uniform(0, 1.3 * span_s)
        assert machine.cut_after(delay_s), machine.console[-4000:]
        last = machine.events[-1]
        print(f"seed {SEED} shard {shard} cut {cut} on {kind}: {delay_s:.3f} s of {span_s:.3f} s,", last.tag, end=" ")
        print({name: value for name, value in last.fields.items() if name in ("n", "before", "after")})
        node.cut(machine)
    machine = node.boot()
    after_a_power_cut(machine)
    node.cut(machine)
    count(f"cuts at random (seed {SEED})", number)
    count("keys searched for", len(node.keys))


def test_control_without_encryption_the_canaries_are_found_and_the_next_boot_overwrites_them(new_node):
    from uml.agentnode import CANARIES

    node = new_node(backend="SealOnly")
    machine = node.boot()
    machine.wait_for("written")
    machine.cut()
    assert len({hit.name for hit in node.hits()}) == len(CANARIES)
    machine = node.boot(rounds=0)
    machine.wait_for("done")
    machine.wait_off()
    assert node.hits() == []
