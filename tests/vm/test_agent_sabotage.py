"""Each guarantee taken out on purpose (`guests/agent_sabotage.py`): the claim that upholds it must fail, and say why."""

from __future__ import annotations

import hashlib

import pytest

pytestmark = [pytest.mark.vm, pytest.mark.slow]

INUSE, READY = 3, 2


def cut_and_boot_again(node, at, **first):
    """Cut at an arrow, and let the next boot recover: all under the claims of `AgentNode.cut`."""
    machine = node.boot(stop_at=at, **first)
    machine.wait_for("arrow", where=lambda event: event["n"] == at)
    node.cut(machine)
    machine = node.boot(rounds=0, **first)
    machine.wait_for_any("done", "exit")
    node.cut(machine)


@pytest.mark.parametrize(
    ("sabotage", "at", "red"),
    [
        ("ledger is not durable", READY, "on the disk and not in the ledger|did not survive"),
        ("record is not durable", READY, "record does not verify|without a record"),
        ("key is written to the disk", INUSE, "hits on the raw disk, .*hex"),
        ("another boot is not noticed", INUSE, "no consumer lives over a power cut"),
        ("leftovers are not erased", INUSE, "not today"),
    ],
    ids=lambda value: str(value).replace(" ", "-") if isinstance(value, str) and len(value) < 30 else "",
)
def test_the_claims_fail_without(new_node, sabotage, at, red):
    with pytest.raises(AssertionError, match=red):
        cut_and_boot_again(new_node(), at, sabotage=sabotage)


def test_the_claims_fail_if_an_effect_comes_before_its_record(new_node):
    node = new_node()
    machine = node.boot(sabotage="effect before record")
    machine.wait_for("made")
    node.cut(machine)
    machine = node.boot(rounds=0)
    machine.wait_for("opened")
    with pytest.raises(AssertionError, match="on the disk and not in the ledger"):
        node.cut(machine)


def test_the_claims_fail_if_somebody_is_served_before_recovery(new_node):
    node = new_node()
    machine = node.boot(stop_at=INUSE)
    machine.wait_for("arrow", where=lambda event: event["n"] == INUSE)
    node.cut(machine)
    machine = node.boot(sabotage="served before recovery")
    machine.wait_for("served")
    with pytest.raises(AssertionError, match="served before recovery"):
        node.cut(machine)


def test_the_kernel_still_has_the_key_of_a_held_volume_if_it_is_not_destroyed(new_node):
    machine = new_node().boot("agent_held.py", device=None, sabotage="key is kept")
    assert machine.wait_for("erased")["table"][0] == "crypt"
    assert machine.wait_for("after")["direct"] != "EIO"


def test_who_holds_a_volume_open_still_reads_plaintext_if_its_pages_are_not_dropped(new_node):
    machine = new_node().boot("agent_held.py", device=None, sabotage="pages are kept")
    after = machine.wait_for("after")
    assert (after["direct"], after["cached"]) == ("EIO", "canary")


def test_anothers_disk_is_written_to_if_devices_are_known_by_their_names(new_node, make_disk):
    disk, other = make_disk(64, "device.img"), make_disk(64, "other.img")
    with open(other, "r+b") as file:
        file.seek(20 << 20)
        file.write(b"somebody's only copy" * 1000)
    before = hashlib.sha256(other.read_bytes()).hexdigest()
    node = new_node(serials={disk.name: "KVTIER0001", other.name: "KVTIER0002"})
    machine = node.boot(disks=(disk,), device="/dev/ubdc", sabotage="devices are known by their names")
    machine.wait_for("written")
    node.cut(machine)
    machine = node.boot(rounds=0, disks=(other,), sabotage="devices are known by their names")
    machine.wait_for("done")
    machine.wait_off()
    assert hashlib.sha256(other.read_bytes()).hexdigest() != before
