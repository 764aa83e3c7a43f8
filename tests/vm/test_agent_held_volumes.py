"""The key of a volume in use is destroyed under its users: the consumer alive, a file open, the mount leaked.

Reported for others: a mount that leaked into another mount namespace keeps a device busy for weeks, and lsof shows nothing
(netblue30/firejail#5640, systemd#39062, moby#27381).
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vm


@pytest.mark.parametrize("where", ["image", "device"])
def test_an_erasure_does_not_wait_for_who_holds_the_volume_open(new_node, make_disk, where):
    node = new_node()
    extra = (make_disk(64, "extra.img"),) if where == "device" else ()
    machine = node.boot("agent_held.py", disks=extra, device="/dev/ubdc" if extra else None)
    before = machine.wait_for("before")
    assert (before["direct"], before["cached"]) == ("canary", "canary")
    erased = machine.wait_for("erased")
    steps = {name: (ok, detail) for name, ok, detail in erased["steps"]}
    print(f"erased in {erased['took_s']:.2f} s: {steps}")
    assert erased["technique"] == "KeyDestroyed"
    assert steps["key-wiped"][0] is True and steps["key-removed"][0] is True
    assert steps["dm-remove"][0] is None and "mount elsewhere" in steps["dm-remove"][1]
    assert erased["table"] == ["error"]
    after = machine.wait_for("after")
    assert (after["direct"], after["cached"], after["dirty"]) == ("EIO", "EIO", "EIO")
    assert steps["cached-pages"][0] is True
    held = machine.wait_for("held")
    assert held["places"] == []
    assert len(held["left_over"]) == 1 and held["left_over"][0].startswith("dm device kvv-")
    done = machine.wait_for("done")
    machine.wait_off()
    if extra:
        assert done["blank"]
    node.cut(machine)  # the claims of every boot, the search of the raw disk among them
    node.disk = extra[0] if extra else node.disk
    assert node.hits() == []


def test_a_volume_that_somebody_unmounts_stays_while_a_file_is_open_and_goes_when_nobody_can_use_it(new_node):
    node = new_node()
    machine = node.boot("agent_unmounted.py")
    held = machine.wait_for("held")
    assert held["in_use"] == [True, True, True] and held["errors"] == []
    assert "its mount was taken off its place" in held["why"]
    assert held["key"], "who has a file open goes on using it"
    unused = machine.wait_for("unused")
    assert unused["erased"], (unused["why"], unused["error"])
    assert unused["lives"], "its consumer lives, and can't use it"
    assert "nobody can use it" in unused["why"]
    assert ["key-wiped", True] in unused["steps"]
    machine.wait_for("done")
    machine.wait_off()
    node.cut(machine)
