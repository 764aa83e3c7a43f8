"""dm-crypt hides what was written from who holds the disk, and its key can be destroyed under a volume in use."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def lines():
    from uml.imagesearch import canary_lines

    return canary_lines(200, seed=4)


def write_canaries(boot, disk, lines, *, encrypted):
    args = {"encrypted": encrypted, "lines": [line.decode() for line in lines], "copies": 64}
    machine = boot("canary_writer.py", disks=[disk], args=args)
    key = bytes.fromhex(machine.wait_for("key")["hex"]) if encrypted else b""
    assert machine.wait_for("written")["reads_back"]
    machine.cut()
    return key


def test_control_without_encryption_finds_the_canary(boot, make_disk, lines):
    from uml.imagesearch import canary_needles, count, search

    disk = make_disk(64)
    write_canaries(boot, disk, lines, encrypted=False)
    hits = count(search(disk, canary_needles(lines)))
    assert len(hits) == len(lines)
    assert hits.total() >= 64 * len(lines)


def test_dm_crypt_hides_the_canary_and_its_key_from_the_raw_image(boot, make_disk, lines):
    from uml.imagesearch import canary_needles, key_needles, search

    disk = make_disk(64)
    key = write_canaries(boot, disk, lines, encrypted=True)
    assert disk.stat().st_blocks * 512 >= 64 * len(lines) * 64  # there is ciphertext to search
    assert search(disk, [*canary_needles(lines), *key_needles("volume key", key)]) == []


def test_after_a_cut_a_fresh_key_mounts_nothing(boot, make_disk, lines):
    disk = make_disk(64)
    write_canaries(boot, disk, lines, encrypted=True)
    machine = boot("canary_writer.py", disks=[disk], args={"encrypted": True, "attach": True})
    assert machine.wait_for("attached")["mounted"] is False
    machine.wait_off()


def test_control_without_encryption_the_disk_mounts_again(boot, make_disk, lines):
    disk = make_disk(64)
    write_canaries(boot, disk, lines, encrypted=False)
    machine = boot("canary_writer.py", disks=[disk], args={"encrypted": False, "attach": True})
    assert machine.wait_for("attached")["mounted"] is True
    machine.wait_off()


def test_the_key_dies_while_the_volume_is_mounted_and_held_in_another_namespace(boot, make_disk, lines):
    from uml.imagesearch import canary_needles, key_needles, search

    disk = make_disk(64)
    machine = boot("key_destroyer.py", disks=[disk], args={"lines": [line.decode() for line in lines]})
    key = machine.wait_for("key")["hex"]
    before = machine.wait_for("before")
    assert (before["key"], before["read"]) == (key, "")
    assert not machine.wait_for("umount")["ok"]
    assert not machine.wait_for("close")["ok"]
    assert not machine.wait_for("early_wipe")["ok"]  # refused unless suspended
    assert machine.wait_for("suspend")["ok"]
    assert machine.wait_for("wipe")["ok"]
    assert set(machine.wait_for("wiped")["key"]) == {"0"}
    assert not machine.wait_for("resume_without_key")["ok"]
    assert machine.wait_for("load_error")["ok"]
    assert machine.wait_for("resume")["ok"]
    after = machine.wait_for("after")
    assert after["read"] == "EIO"
    assert after["table"].split()[-1] == "error"
    machine.wait_for("done")
    machine.cut()
    assert search(disk, [*canary_needles(lines), *key_needles("volume key", bytes.fromhex(key))]) == []
