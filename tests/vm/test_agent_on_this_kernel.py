"""What needs a kernel with cgroup v2's memory controller, device mapper, btrfs and f2fs, which this host's own lacks."""

from __future__ import annotations

import pytest

from requirements import need_tool

pytestmark = pytest.mark.vm


def test_a_consumer_that_is_killed_for_want_of_memory_is_seen_and_erased(new_node):
    node = new_node()
    machine = node.boot("agent_oom.py")
    killed = machine.wait_for("killed")
    print(f"erased {killed['erased_after_s']:.2f} s after the kill")
    assert (killed["signal"], killed["oom_kills"]) == (9, 1)
    done = machine.wait_for("done")
    machine.wait_off()
    (receipt,) = done["chain"]["receipts"]
    assert (receipt["trigger"], receipt["technique"]) == ("Crash", "KeyDestroyed")
    node.cut(machine)


REFUSED = {
    "btrfs": ({"kind": "btrfs"}, "btrfs keeps old copies"),
    "f2fs": ({"kind": "f2fs"}, "f2fs keeps old copies"),
    "ext4 that journals data": ({"kind": "ext4", "options": "data=journal"}, "data=journal"),
    "ext4 that is not encrypted": ({"kind": "ext4", "encrypted": False}, "neither dm-crypt"),
}


def test_host_attested_takes_encrypted_ext4_and_no_file_system_whose_overwriting_proves_nothing(new_node, make_disk):
    for kind in ("btrfs", "f2fs"):
        need_tool(f"mkfs.{kind}")
    control = {"backend": "HostAttested", "name": "control", "inside": {"kind": "ext4", "encrypted": True}}
    attempts = [
        {"backend": "HostAttested", "name": name, "inside": {"encrypted": True} | inside}
        for name, (inside, _) in REFUSED.items()
    ]
    disks = (make_disk(160, "under.img"),)
    machine = new_node().boot("agent_refusals.py", disks=disks, attempts=[control, *attempts])
    machine.wait_for("tried")
    machine.wait_off()
    found = {event["name"]: event.fields for event in machine.events if event.tag == "attempt"}
    assert (found["control"]["error"], found["control"]["technique"]) == (None, "Overwrite")
    for name, (_, reason) in REFUSED.items():
        assert found[name]["error"] == "BackendUnavailable", found[name]
        assert reason in found[name]["text"]
