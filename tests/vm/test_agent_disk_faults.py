"""The agent on a disk that logs each write, replayed to every barrier, and on a disk that lies about flushes.

Guarantee Record-before-write, and that the ledger opens, whatever of its last writes is left. The disk's log holds every byte
that was ever written, so it is also searched: no plaintext and no key reached the disk at any time.
"""

from __future__ import annotations

import os

import pytest

pytestmark = [pytest.mark.vm, pytest.mark.slow]

EXHAUSTIVE = bool(os.environ.get("KVTIER_EXHAUSTIVE"))
SEED = int(os.environ.get("KVTIER_CUT_SEED", "20260401"))
SHARDS = 2
LIFE_ARROWS = 7


def record(boot, disk, log, backend="DmCrypt"):
    """The arrows of one recorded life, and the keys that were in use."""
    from uml.agentnode import CANARIES

    lines = [line.decode() for line in CANARIES]
    args = {"rounds": 1, "lines": lines, "backend": backend, "kind": "ext4"}
    machine = boot("agent_log_recorder.py", disks=[disk, log], args=args)
    machine.wait_for("recorded")
    machine.wait_off()
    return machine


@pytest.mark.parametrize("shard", range(SHARDS))
def test_at_every_barrier_the_ledger_opens_and_whatever_lies_there_is_on_record(boot, make_disk, count, shard):
    from uml.agentnode import LIFE, arrows, canary_needles_and_keys, everything_is_erased, recorded_before_written
    from uml.imagesearch import search

    disk, log = make_disk(96), make_disk(256, "log.img")
    machine = record(boot, disk, log)
    assert tuple(arrows(machine)) == LIFE
    for searched in (disk, log):
        assert search(searched, canary_needles_and_keys(machine)) == []

    args = {"disk_bytes": disk.stat().st_size, "shard": shard, "shards": SHARDS, "seed": SEED + shard}
    machine = boot("agent_log_replayer.py", disks=[log], args=args | {"recover_every": 1 if EXHAUSTIVE else 3})
    machine.wait_for("replayed", 500)
    machine.wait_off()
    states = [event for event in machine.events if event.tag == "state"]
    for state in states:
        acknowledged = [mark.split(":")[1:] for mark in state["marks"] if mark.startswith("arrow:")]
        assert state["rebuilt"] is None, state.fields
        assert state["ledger_was_there"] or "opened" not in state["marks"], state.fields
        assert state["arrows"][: len(acknowledged)] == acknowledged, state.fields
        assert len(state["arrows"]) <= len(acknowledged) + 1
        rows = {row["volume"]: row["state"] for row in state["rows"]}
        for place in state["places"]:
            recorded_before_written(place, rows)
    recoveries = 0
    for before, event in zip(machine.events, machine.events[1:], strict=False):
        if event.tag == "recovered":
            recoveries += 1
            everything_is_erased(event, before)
    torn = sum(state["torn"] > 0 for state in states)
    count("barriers replayed (FLUSH, FUA)", len(states) - torn)
    count(f"torn states replayed (seed {SEED})", torn)
    count("recoveries on replayed states", recoveries)
    assert len(states) - torn > 40
    assert recoveries > 10
    assert {tuple(arrow[1] for arrow in state["arrows"]) for state in states} >= {LIFE[:3], LIFE}


def test_control_without_encryption_the_log_of_the_disk_holds_the_canaries(boot, make_disk):
    from uml.agentnode import CANARIES, canary_needles_and_keys
    from uml.imagesearch import count, search

    disk, log = make_disk(96), make_disk(256, "log.img")
    machine = record(boot, disk, log, backend="SealOnly")
    assert len(count(search(log, canary_needles_and_keys(machine)))) == len(CANARIES)


# From the start, and from each kind of effect: the place, the volume, the consumer, the erasure. All with KVTIER_EXHAUSTIVE.
@pytest.mark.parametrize("arrow", range(-1, LIFE_ARROWS) if EXHAUSTIVE else (-1, 1, 2, 3, 5))
def test_a_disk_that_lies_about_flushes_from_an_arrow_on_leaves_the_ledger_of_that_arrow(new_node, count, arrow):
    from uml.agentnode import LIFE, after_a_power_cut

    node = new_node()
    machine = node.boot(lie_at=arrow)
    last = machine.wait_for_any("ended", "failed")
    assert any(event.tag == "lying" for event in machine.events)
    print(f"lying from {LIFE[arrow] if arrow >= 0 else 'the start'}: the life {last.tag} {last.fields}")
    node.cut(machine, claims=False)
    machine = node.boot()
    after_a_power_cut(machine)
    opened = next(event for event in machine.events if event.tag == "opened")
    # Everything that was acknowledged before the lie is there, and nothing of what came after.
    assert [row["state"] for row in opened["rows"]] == ([LIFE[arrow]] if arrow >= 0 else [])
    node.cut(machine)
    count("lies of a disk about flushes", 1)
