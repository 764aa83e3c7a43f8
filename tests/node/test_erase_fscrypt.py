"""Crash-erase with a key of kvtier's own: ciphertext from the first write, and a key that is gone for good after the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.errors import EraseIncomplete
from kvtier_api.volume import VolumeState
from kvtier_node.backends.dmcrypt import DmCrypt
from kvtier_node.backends.image import make_file_system, read_back
from kvtier_node.guarding import look
from kvtier_node.kernel import fscrypt, libc, loop
from kvtier_node.kernel.fscrypt import KeyStatus
from kvtier_node.receipts import Receipt, Step, Technique
from kvtier_node.sampling import Range
from leftovers import eventually_given_back
from node_host import CANARY, MIB, Host, eventually, raw_count
from unmounting import unmount_everywhere

pytestmark = pytest.mark.root


def steps(receipt: Receipt) -> dict[str, Step]:
    return {step.name: step for step in receipt.steps}


def leak(host: Host) -> subprocess.Popen[bytes]:
    """Another mount namespace with a copy of every mount, kept by a process that has nothing open."""
    process = host.popen(["unshare", "-m", "--propagation", "private", "sleep", "300"])
    here = os.readlink("/proc/self/ns/mnt")
    eventually("its own namespace", lambda: os.readlink(f"/proc/{process.pid}/ns/mnt") != here)
    return process


def test_the_search_finds_the_canary_on_an_unencrypted_image(host: Host) -> None:
    """The control: without it, "not found" would prove nothing."""
    path, mount = host.base / "plain.img", host.base / "plain"
    mount.mkdir()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 32 * MIB)
    device = loop.attach(fd)
    os.close(fd)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", device.path], check=True)
    libc.mount(device.path, str(mount), "ext4", 0, None)
    (mount / "slot.rank_0").write_bytes(CANARY * 4096)
    os.sync()
    assert raw_count(path) >= 4096


def test_no_canary_is_ever_in_the_image_while_it_lives_and_after_sigkill(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    assert consumer.do("answer = os.read(os.open(f'{slots}/slot.rank_0', os.O_RDONLY), 64)") == repr(CANARY)
    image = os.open(host.image(live), os.O_RDONLY)  # also when its name is gone
    try:
        assert raw_count(f"/proc/self/fd/{image}") == 0
        used = sum(any(os.pread(image, 4096, at)) for at in range(0, os.fstat(image).st_size, 4096))
        assert used * 4096 > len(CANARY) * 4096, "nothing was written at all"
        consumer.kill()
        seen = eventually("erased", lambda: look(host.node, live).receipt)
        assert raw_count(f"/proc/self/fd/{image}") == 0
        # Where consumers' bytes lay. The superblock may come back: another test's copy of the mount table, which ends later
        # than the discard, writes it once more into an image that only this test's descriptor still keeps.
        for offset, length in live.row.facts["data_ranges"]:
            assert not any(os.pread(image, length, offset)), "the image was not discarded"
    finally:
        os.close(image)
    assert seen.trigger is Trigger.CRASH and seen.technique is Technique.KEY_DESTROYED
    assert "reports ABSENT" in steps(seen)["key-removed"].detail
    assert steps(seen)["read-back"].ok and steps(seen)["discard"].ok
    assert " 0 plaintext" in steps(seen)["read-back"].detail and " 0 ciphertext" not in steps(seen)["read-back"].detail
    assert seen.deadline_met is True
    host.assert_nothing_left(live)


def test_the_bytes_cannot_be_read_with_the_old_image_after_the_key_is_gone(host: Host) -> None:
    """An image that somebody copied before the end (a snapshot) holds nothing that can be read after it."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    os.sync()
    stolen = host.base / "stolen.img"
    stolen.write_bytes(host.image(live).read_bytes())
    consumer.kill()
    host.erase(live)
    mount = host.base / "stolen"
    mount.mkdir()
    fd = os.open(stolen, os.O_RDWR)
    device = loop.attach(fd)
    os.close(fd)
    libc.mount(device.path, str(mount), "ext4", 0, None)
    [name] = [name for name in os.listdir(mount / "slots") if (mount / "slots" / name).stat().st_blocks][:1]
    assert not name.startswith("slot.")
    with pytest.raises(OSError, match="Required key not available"):
        (mount / "slots" / name).read_bytes()


def test_a_file_that_is_held_open_keeps_the_erasure_incomplete_and_nothing_is_claimed(host: Host) -> None:
    """The kernel says `incompletely removed`. So does kvtier, however often it is asked, until the holder has ended."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer, keep_open=True)
    for _ in range(3):
        with pytest.raises(EraseIncomplete, match="INCOMPLETELY_REMOVED"):
            host.erase(live, Trigger.REQUEST)
        assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASING
        assert host.node.ledger.receipts() == []
        assert os.path.exists(host.image(live))
    assert host.mounts() == [], "the fence comes first, whatever is held"
    consumer.kill()
    receipt = host.erase(live, Trigger.REQUEST)
    assert receipt.technique is Technique.KEY_DESTROYED
    host.assert_nothing_left(live)


def test_the_deadline_runs_from_the_death_over_all_attempts(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", scrub={"deadline": "1s"}))
    host.write_canary(consumer, keep_open=True)
    from kvtier_node.erasing import Death, erase

    death = Death.now()
    with pytest.raises(EraseIncomplete):
        erase(host.node, live, Trigger.CRASH, death=death)
    eventually("more than the deadline", lambda: Death.now().monotonic - death.monotonic > 1.2)
    consumer.kill()
    receipt = erase(host.node, live, Trigger.CRASH)
    assert receipt.deadline_met is False
    assert receipt.duration_s is not None and receipt.duration_s > 1
    assert receipt.consumer_died_at == death.at


def test_a_mount_that_leaked_into_another_namespace_does_not_keep_the_key(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    leaked = leak(host)
    consumer.kill()
    receipt = host.erase(live)
    assert "reports ABSENT" in steps(receipt)["key-removed"].detail
    assert f"pid {leaked.pid}" in steps(receipt)["mounts-elsewhere"].detail
    assert steps(receipt)["mounts-elsewhere"].ok is None
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED
    there = f"/proc/{leaked.pid}/root{live.row.place}/mnt"
    assert not any(name.startswith("slot.") for name in os.listdir(f"{there}/slots")) if os.path.isdir(there) else True
    leaked.kill()
    leaked.wait()
    eventually("the loop device went with the mount", lambda: host.loops() == [])


def test_a_key_that_only_a_leaked_mount_still_has_is_destroyed_at_the_next_attempt(host: Host) -> None:
    """A crash between the unmount and the removal of the key: nothing is mounted here any more, and the key is present."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    leaked = leak(host)
    consumer.kill()
    live.close_watch()
    libc.umount2(f"{live.row.place}/mnt", 2)
    slots = f"/proc/{leaked.pid}/root{live.row.place}/mnt/slots"
    assert Path(slots, "slot.rank_0").read_bytes().startswith(CANARY), "the leaked mount reads it in the clear"
    host.drop_guardians()
    [receipt] = host.recover().erased
    assert "reports ABSENT" in steps(receipt)["key-removed"].detail
    with pytest.raises(OSError):
        Path(slots, "slot.rank_0").read_bytes()


def test_a_mount_laid_over_the_volume_does_not_hide_its_key(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    leaked = leak(host)
    libc.mount("tmpfs", f"{live.row.place}/mnt", "tmpfs", 0, None)
    consumer.kill()
    receipt = host.erase(live)
    assert f"fscrypt key {live.row.key_id}: the kernel reports ABSENT" in steps(receipt)["key-removed"].detail
    leaked.kill()
    leaked.wait()
    eventually("the loop device went with the mount", lambda: host.loops() == [])
    host.assert_nothing_left(live)


def test_a_mount_laid_over_the_slots_keeps_no_key_and_is_told(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    libc.mount("tmpfs", live.slots_path, "tmpfs", 0, None)
    consumer.kill()
    receipt = host.erase(live)
    assert f"fscrypt key {live.row.key_id}: the kernel reports ABSENT" in steps(receipt)["key-removed"].detail
    assert steps(receipt)["data-ranges"].ok is None
    assert steps(receipt)["read-back"].ok and " 0 ciphertext" not in steps(receipt)["read-back"].detail
    host.assert_nothing_left(live)


def test_an_image_whose_name_is_gone_is_still_erased_and_given_back(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    os.unlink(host.image(live))
    consumer.kill()
    receipt = host.erase(live)
    assert "reports ABSENT" in steps(receipt)["key-removed"].detail
    assert steps(receipt)["read-back"].ok is None
    host.assert_nothing_left(live)


def test_another_image_that_has_the_number_of_one_that_is_gone_is_not_taken_for_it(own_disk: Host) -> None:
    """A crash came after the image was removed; another tier's image has its inode number, and a loop device."""
    host = own_disk  # where nobody else takes the number
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    consumer.kill()
    made = host.image(live).stat()
    live.close_watch()
    unmount_everywhere(f"{live.row.place}/mnt")
    [own] = loop.find_by_backing(made.st_dev, made.st_ino)
    loop.detach(own)
    assert eventually_given_back(own)
    os.unlink(host.image(live))
    theirs = file_with_number(made.st_ino, host.image(live).parent).rename(host.root / "another-volume.img")
    fd = os.open(theirs, os.O_RDWR)
    os.ftruncate(fd, MIB)
    device = loop.attach(fd)
    os.close(fd)
    assert "no loop device has the image" in steps(host.erase(live))["key-removed"].detail
    assert loop.find_by_backing(made.st_dev, made.st_ino) == [device]
    loop.detach(device)
    assert not os.path.lexists(live.row.place)
    assert not os.path.lexists(f"{host.state}/volumes/{live.volume_id}.lock")


def test_an_image_that_was_renamed_on_its_loop_device_is_not_claimed_to_be_gone(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    consumer.kill()
    elsewhere = host.image(live).rename(host.base / "elsewhere.img")
    with pytest.raises(EraseIncomplete, match="may hold it under another name") as raised:
        host.erase(live)
    assert str(elsewhere) in str(raised.value)
    assert host.node.ledger.receipts() == []
    elsewhere.rename(host.image(live))
    assert host.erase(live).technique is Technique.KEY_DESTROYED
    host.assert_nothing_left(live)


def file_with_number(inode: int, folder: Path) -> Path:
    """A new file that the file system gave the number of one that is gone."""
    made: list[Path] = []
    while not made or made[-1].stat().st_ino != inode:
        assert len(made) < 4096, f"inode {inode} was not given again"
        made.append(folder / f"new-{len(made)}")
        made[-1].touch()
    for path in made[:-1]:
        path.unlink()
    return made[-1]


def test_a_second_name_of_the_image_does_not_keep_the_key(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    key_id = live.row.key_id
    assert key_id is not None
    host.write_canary(consumer)
    os.link(host.image(live), host.base / "second-name.img")
    root = os.open(f"{live.row.place}/mnt", os.O_RDONLY)
    try:
        consumer.kill()
        with pytest.raises(Exception, match="2 names"):
            host.erase(live)
        assert fscrypt.key_status(root, key_id) is KeyStatus.ABSENT
    finally:
        os.close(root)
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASING
    os.unlink(host.base / "second-name.img")
    assert host.erase(live).technique is Technique.KEY_DESTROYED


def test_an_unused_volume_is_erased_like_any_other_and_once(host: Host) -> None:
    live = host.provision(host.tier("Fscrypt"))
    receipt = host.erase(live, Trigger.REQUEST)
    assert "reports ABSENT" in steps(receipt)["key-removed"].detail
    again = host.node.ledger.receipts()
    assert [item.id for item in again] == [receipt.id]


def test_plaintext_in_the_raw_image_is_found_overwritten_and_stays_on_record(host: Host) -> None:
    """As if encryption had failed: bytes in the clear where a slot lies. The receipt no longer claims a destroyed key."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    offset = live.row.facts["data_ranges"][0][0]
    consumer.kill()
    live.close_watch()
    libc.umount2(f"{live.row.place}/mnt", 0)
    with open(host.image(live), "r+b") as image:
        image.seek(offset)
        image.write(CANARY * 64)
    assert raw_count(host.image(live)) == 64
    receipt = host.erase(live)
    assert steps(receipt)["read-back"].ok is False and "1 plaintext" in steps(receipt)["read-back"].detail
    assert steps(receipt)["overwrite"].ok and steps(receipt)["read-back-after-overwrite"].ok
    assert receipt.technique is Technique.OVERWRITE
    assert any("plaintext was found" in line for line in receipt.not_covered)


def test_an_image_that_was_never_given_a_byte_is_not_said_to_be_read_back(host: Host) -> None:
    """A crash between its creation and its preallocation: `DmCrypt` asks for the whole of it, which is nothing."""
    fd = os.open(host.base / "empty.img", os.O_RDWR | os.O_CREAT)
    try:
        [step] = read_back(fd, [Range(0, 0)])
    finally:
        os.close(fd)
    assert step.ok is None and "nothing was looked at" in step.detail


def test_cached_pages_of_no_file_are_not_said_to_be_dropped(host: Host) -> None:
    """`DmCrypt` asks for them where a mount elsewhere keeps the volume. The question is the same for any ext4."""
    path, mount = host.base / "held.img", host.base / "held"
    mount.mkdir()
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 16 * MIB)
    device = loop.attach(fd)
    os.close(fd)
    make_file_system(device.path, features="^has_journal")
    libc.mount(device.path, str(mount), "ext4", 0, None)
    (mount / "slots").mkdir()
    [step] = DmCrypt._drop_pages(device.path)
    assert step.ok is None, step.detail
    (mount / "slots" / "slot.rank_0").write_bytes(CANARY)
    [step] = DmCrypt._drop_pages(device.path)
    assert step.ok is True and "1 files, 0 pages left" in step.detail


def test_no_key_byte_is_in_any_argument_environment_file_or_log(host: Host) -> None:
    """Every process that runs while a key is made, by the kernel's own log of exec and write."""
    trace = host.base / "trace"
    manifest = host.tier("Fscrypt").model_dump_json(by_alias=True, exclude_none=True)
    code = """
    import sys
    from kvtier_api.documents import load_documents
    from kvtier_api.erasure import Trigger
    from kvtier_node.erasing import erase
    from kvtier_node.provisioning import provision
    from kvtier_node.recovery import open_node
    node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
    live = provision(node, load_documents(sys.argv[3])[0], uid=0, gid=0)
    erase(node, live, Trigger.EXIT)
    """
    import textwrap

    subprocess.run(
        ["strace", "-f", "-qq", "-v", "-xx", "-s", "65536", "-o", str(trace),
         "-e", "trace=getrandom,execve,write,pwrite64,sendto,sendmsg,writev,pwritev",
         sys.executable, "-c", textwrap.dedent(code), host.state, str(host.root), manifest],
        check=True, timeout=120,
    )  # fmt: skip
    keys, said = [], []
    for line in trace.read_text().splitlines():
        if "getrandom(" in line and ", 64, 0) = 64" in line:
            raw = line.split('getrandom("')[1].split('"')[0]
            keys.append(bytes.fromhex(raw.replace("\\x", "")))
        else:
            said.append(line.replace("\\x", ""))
    assert len(keys) >= 2, "the probe's key and the volume's"
    everything = "\n".join(said)
    stored = b"".join(
        path.read_bytes() for path in [*Path(host.state).rglob("*"), *host.root.rglob("*")] if path.is_file()
    )
    for key in keys:
        for part in (key, key[:32], key[32:]):
            assert part.hex() not in everything
            assert part.hex().encode().hex() not in everything
            assert part not in stored and part.hex().encode() not in stored


def test_the_consumer_is_killed_in_the_middle_of_its_writes(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    child = int(
        consumer.do(f"""
            answer = os.fork()
            if answer == 0:
                fd = os.open(f"{{slots}}/slot.rank_1", os.O_RDWR)
                while True:
                    os.pwrite(fd, {CANARY!r} * 16384, 0)
                    os.fdatasync(fd)
        """)
    )
    eventually("it writes", lambda: live.watch is not None and live.watch.holders() == 1)
    consumer.kill()
    assert look(host.node, live).in_use, "the forked writer still uses it"
    os.kill(child, signal.SIGKILL)
    receipt = eventually("erased", lambda: look(host.node, live).receipt)
    assert receipt.technique is Technique.KEY_DESTROYED
    host.assert_nothing_left(live)
