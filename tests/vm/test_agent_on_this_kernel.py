"""What needs a kernel with cgroup v2's memory controller, device mapper, btrfs and f2fs, which this host's own lacks."""

from __future__ import annotations

import pytest

from requirements import need_tool

pytestmark = pytest.mark.vm


def test_a_consumer_that_is_killed_for_want_of_memory_is_seen_and_erased(new_node):
    node = new_node()
    machine = node.boot("agent_oom.py")
    killed = machine.wait_for("killed", 60)
    print(f"erased {killed['erased_after_s']:.2f} s after the kill")
    assert (killed["signal"], killed["oom_kills"]) == (9, 1)
    done = machine.wait_for("done")
    machine.wait_off()
    (receipt,) = done["chain"]["receipts"]
    assert (receipt["trigger"], receipt["technique"]) == ("Crash", "KeyDestroyed")
    node.cut(machine)


def attempt(new_node, make_disk, **inside):
    node = new_node()
    disks = (make_disk(160, "under.img"),)
    machine = node.boot(
        "agent_refusals.py", disks=disks, attempts=[{"backend": "HostAttested", "inside": {"encrypted": True} | inside}]
    )
    found = machine.wait_for("attempt", 60)
    machine.wait_for("tried")
    machine.wait_off()
    return found


@pytest.mark.parametrize(
    ("inside", "reason"),
    [
        ({"kind": "btrfs"}, "btrfs keeps old copies"),
        ({"kind": "f2fs"}, "f2fs keeps old copies"),
        ({"kind": "ext4", "options": "data=journal"}, "data=journal"),
        ({"kind": "ext4", "encrypted": False}, "neither dm-crypt"),
    ],
    ids=["btrfs", "f2fs", "ext4-that-journals-data", "ext4-that-is-not-encrypted"],
)
def test_host_attested_refuses_a_file_system_whose_overwriting_proves_nothing(new_node, make_disk, inside, reason):
    if inside["kind"] in ("btrfs", "f2fs"):
        need_tool(f"mkfs.{inside['kind']}")
    found = attempt(new_node, make_disk, **inside)
    assert found["error"] == "BackendUnavailable", found
    assert reason in found["text"]


def test_control_host_attested_takes_an_encrypted_file_system_that_overwrites_in_place(new_node, make_disk):
    found = attempt(new_node, make_disk, kind="ext4")
    assert found["error"] is None, found
    assert found["technique"] == "Overwrite"
