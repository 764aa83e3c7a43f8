"""`spec.device`: a whole block device as a volume. Nothing of anybody else's is ever written to, under whatever name it comes."""

from __future__ import annotations

import hashlib
import subprocess

import pytest

pytestmark = pytest.mark.vm

MIB = 1 << 20
SIZE_MIB = 64


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(path, at, data):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def refusals(node, disks, *attempts):
    machine = node.boot("agent_refusals.py", disks=tuple(disks), attempts=list(attempts))
    machine.wait_for("tried")
    machine.wait_off()
    return [event.fields for event in machine.events if event.tag == "attempt"]


SIGNS = {
    "a btrfs superblock": 64 * 1024,
    "an mdraid 1.2 superblock": 4096,
    "a backup of a partition table": SIZE_MIB * MIB - 512,
    "an mdraid 0.90 superblock": SIZE_MIB * MIB - 64 * 1024,
}


def test_a_device_with_one_block_of_anybodys_at_either_end_is_refused_and_untouched(new_node, make_disk):
    disks = [make_disk(SIZE_MIB, f"device-{at}.img") for at in SIGNS.values()]
    for disk, at in zip(disks, SIGNS.values(), strict=True):
        write(disk, at, b"_BHRfS_M" + bytes(100))
    before = [digest(disk) for disk in disks]
    attempts = [
        {"backend": backend, "device": f"/dev/ubd{letter}", "name": f"{what}, {backend}"}
        for letter, what in zip("cdef", SIGNS, strict=True)
        for backend in ("DmCrypt", "Auto")
    ]
    found = refusals(new_node(), disks, *attempts)
    assert {attempt["name"]: attempt["error"] for attempt in found} == {
        attempt["name"]: "ForeignData" for attempt in attempts
    }
    assert [attempt["device"] in result["text"] for attempt, result in zip(attempts, found, strict=True)] == [True] * 8
    assert [digest(disk) for disk in disks] == before


def test_a_device_that_is_too_small_is_refused_with_both_numbers_and_untouched(new_node, make_disk):
    disk = make_disk(8, "device.img")
    before = digest(disk)
    (found,) = refusals(new_node(), [disk], {"backend": "DmCrypt", "device": "/dev/ubdc"})
    assert found["error"] == "InsufficientSpace"
    assert str(8 * MIB) in found["text"] and str(35 * MIB) in found["text"]
    assert digest(disk) == before


def cut_in_use(node, disk):
    machine = node.boot(disks=(disk,), device="/dev/ubdc")
    checked = machine.wait_for("checked")
    assert checked["text"] == "DmCrypt: device mapper opened a plain dm-crypt device", (
        "its own volume is no foreign data"
    )
    machine.wait_for("written")
    node.cut(machine)
    assert digest(disk) != hashlib.sha256(bytes(SIZE_MIB * MIB)).hexdigest()
    return digest(disk)


def discard_step(machine):
    (receipt,) = next(event for event in machine.events if event.tag == "recovered")["chain"]["receipts"]
    return {name: (ok, detail) for name, ok, detail in receipt["steps"]}["discard"]


def test_after_a_power_cut_the_same_device_is_blanked_and_used_again(new_node, make_disk):
    from uml.agentnode import after_a_power_cut

    disk = make_disk(SIZE_MIB, "device.img")
    node = new_node(serials={disk.name: "KVTIER0001"})
    cut_in_use(node, disk)
    machine = node.boot(disks=(disk,), device="/dev/ubdc")
    after_a_power_cut(machine)
    assert discard_step(machine)[0] is True
    assert {receipt["device_serial"] for receipt in machine.events[-2]["chain"]["receipts"]} == {"KVTIER0001"}
    node.cut(machine)
    assert not any(disk.read_bytes())


def test_a_device_that_nothing_but_its_name_identifies_is_left_alone_after_a_power_cut(new_node, make_disk):
    disk = make_disk(SIZE_MIB, "device.img")
    node = new_node()
    before = cut_in_use(node, disk)
    machine = node.boot(rounds=0, disks=(disk,))
    machine.wait_for("done")
    machine.wait_off()
    ok, detail = discard_step(machine)
    assert ok is None and "can't be told" in detail
    node.cut(machine)
    assert digest(disk) == before
    (found,) = refusals(node, [disk], {"backend": "DmCrypt", "device": "/dev/ubdc"})
    assert found["error"] == "ForeignData"
    assert digest(disk) == before


def test_another_disk_under_the_same_name_is_untouched_by_the_recovery(new_node, make_disk):
    disk, other = make_disk(SIZE_MIB, "device.img"), make_disk(SIZE_MIB, "other.img")
    write(other, 20 * MIB, b"somebody's only copy" * 1000)
    node = new_node(serials={disk.name: "KVTIER0001", other.name: "KVTIER0002"})
    cut_in_use(node, disk)
    before = digest(other)
    machine = node.boot(rounds=0, disks=(other,))
    machine.wait_for("done")
    machine.wait_off()
    assert discard_step(machine)[0] is None
    node.cut(machine)
    assert digest(other) == before


def test_the_same_disk_put_to_another_use_before_the_recovery_is_untouched(new_node, make_disk):
    disk = make_disk(SIZE_MIB, "device.img")
    node = new_node(serials={disk.name: "KVTIER0001"})
    cut_in_use(node, disk)
    subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-F", str(disk)], check=True, capture_output=True)
    before = digest(disk)
    machine = node.boot(rounds=0, disks=(disk,))
    recovered = machine.wait_for("recovered")
    machine.wait_off()
    assert len(recovered["failed"]) == 1 and "somebody's now" in recovered["failed"][0]
    assert [row["state"] for row in recovered["rows"]] == ["Erasing"]
    assert digest(disk) == before
