"""Crash-erase without a key of kvtier's own: sealed slots die with their process; what was not sealed is overwritten."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.errors import BackendUnavailable, EraseIncomplete
from kvtier_api.volume import VolumeState
from kvtier_node.backends import BACKENDS
from kvtier_node.guarding import fulfil_requests, look
from kvtier_node.live import LiveVolume, request_of
from kvtier_node.receipts import Receipt, Step, Technique
from node_host import MIB, Consumer, Host, eventually, raw_count

pytestmark = pytest.mark.root


def steps(receipt: Receipt) -> dict[str, Step]:
    return {step.name: step for step in receipt.steps}


def seal(consumer: Consumer, name: str = "slot.rank_0", size: int = MIB) -> None:
    """What a sealing engine leaves: bytes that look random."""
    consumer.do(f"""
        fd = os.open(f"{{slots}}/{name}", os.O_WRONLY)
        os.pwrite(fd, os.urandom({size}), 0); os.fsync(fd); os.close(fd)
    """)


def measured(live: LiveVolume, host: Host) -> bool | None:
    with host.node.places.open(live.row.place) or pytest.fail("no place") as place:
        return BACKENDS[live.row.backend].measure(place, request_of(live.row), None).encrypted


class Disk:
    """The blocks of a file on the disk, found while it exists and read afterwards, whoever has them then."""

    def __init__(self, path: str) -> None:
        self.keeper = os.open(path, os.O_RDONLY)

    def count(self) -> int:
        return raw_count(f"/proc/self/fd/{self.keeper}")

    def close(self) -> None:
        os.close(self.keeper)


def test_sealed_slots_end_with_their_process(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    assert measured(live, host) is None, "nothing was written yet: nothing to claim"
    seal(consumer)
    assert measured(live, host) is True
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None
    assert receipt.technique is Technique.PROCESS_DEATH
    assert steps(receipt)["read-back"].ok and " 0 plaintext" in steps(receipt)["read-back"].detail
    assert "overwrite" not in steps(receipt)
    host.assert_nothing_left(live)


def test_an_engine_that_does_not_seal_is_found_out_while_it_runs_and_overwritten_after_its_end(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    seal(consumer)
    host.write_canary(consumer)
    assert raw_count(f"{live.slots_path}/slot.rank_0") == 4096
    assert measured(live, host) is False
    consumer.kill()
    receipt = host.erase(live)
    assert steps(receipt)["read-back"].ok is False and "did not seal" in steps(receipt)["read-back"].detail
    assert steps(receipt)["read-back-after-overwrite"].ok
    assert receipt.technique is Technique.OVERWRITE
    host.assert_nothing_left(live)


def test_what_was_not_sealed_is_overwritten_before_the_file_goes(host: Host) -> None:
    """The order, seen from outside: with `read_back` done and nothing released yet, the canary is gone from the disk."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    consumer.kill()
    live.close_watch()
    backend, request = BACKENDS[live.row.backend], request_of(live.row)
    with host.node.places.open(live.row.place) or pytest.fail("no place") as place:
        backend.destroy_key(place, request, None)
        assert raw_count(f"{live.slots_path}/slot.rank_0") == 4096
        backend.read_back(place, request, [])
        assert raw_count(f"{live.slots_path}/slot.rank_0") == 0
        assert Path(live.slots_path, "slot.rank_0").stat().st_size == 4 * MIB
        assert any(Path(live.slots_path, "slot.rank_0").read_bytes()[: MIB // 4])


def test_without_verify_a_volume_that_only_the_engine_encrypts_is_sampled_all_the_same(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", scrub={"verify": "None"}))
    host.write_canary(consumer)
    consumer.kill()
    assert host.erase(live).technique is Technique.OVERWRITE


def test_a_few_bytes_of_plaintext_beside_the_slots_are_found(host: Host) -> None:
    """A stock engine's `.tmp` of less than a block."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    seal(consumer)
    consumer.do("open(f'{slots}/x.tmp', 'w').write('short')")
    assert measured(live, host) is False
    consumer.kill()
    assert host.erase(live).technique is Technique.OVERWRITE


def test_what_is_less_than_a_block_is_overwritten_and_not_called_measured(host: Host) -> None:
    """Nine files of 4000 bytes: too few to tell random bytes by. The step after the overwrite looked at nothing."""
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1))
    consumer.do("os.unlink(f'{slots}/slot.rank_0')")
    consumer.do("for i in range(9): open(f'{slots}/part.{i}', 'wb').write(b'biopsy positive ' * 250)")
    consumer.kill()
    receipt = host.erase(live)
    assert steps(receipt)["read-back"].ok is False and "9 plaintext" in steps(receipt)["read-back"].detail
    assert steps(receipt)["overwrite"].ok and "36000 bytes of 9 files" in steps(receipt)["overwrite"].detail
    after = steps(receipt)["read-back-after-overwrite"]
    assert after.ok is None
    assert "nothing was looked at" in after.detail and "9 end(s) of files" in after.detail


def test_ends_beside_whole_blocks_are_named_where_the_blocks_were_measured(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    consumer.do("open(f'{slots}/x.tmp', 'w').write('short')")
    consumer.kill()
    after = steps(host.erase(live))["read-back-after-overwrite"]
    assert after.ok is True and "1 end(s) of files, less than a block each, can't be judged" in after.detail


@pytest.mark.parametrize("backend", ["SealOnly", "HostAttested"])
def test_a_volume_in_which_nothing_was_written_is_not_said_to_be_read_back(
    host: Host, encrypted_root: Path, backend: str
) -> None:
    live, consumer = host.in_use(host.tier(backend, path=encrypted_root / "demo"))
    if backend == "HostAttested":  # else its overwrite gives it blocks to read
        consumer.do("for rank in (0, 1): open(f'{slots}/slot.rank_{rank}', 'w').write('short')")
    consumer.kill()
    receipt = host.erase(live)
    assert steps(receipt)["read-back"].ok is None and "nothing was looked at" in steps(receipt)["read-back"].detail
    assert steps(receipt)["remove"].ok


@pytest.mark.parametrize("backend", ["SealOnly", "HostAttested"])
def test_no_step_is_good_that_had_no_file_to_work_on(host: Host, encrypted_root: Path, backend: str) -> None:
    live, consumer = host.in_use(host.tier(backend, path=encrypted_root / "demo"))
    consumer.do("for rank in (0, 1): os.unlink(f'{slots}/slot.rank_{rank}')")
    consumer.kill()
    found = steps(host.erase(live))
    named = {"discard", "read-back"} | ({"overwrite"} if backend == "HostAttested" else set())
    assert {name: found[name].ok for name in named} == dict.fromkeys(named)


def test_that_plaintext_was_on_the_disk_is_told_in_plain_words(host: Host) -> None:
    """The erasure made it good. Copies that were made before that are nobody's to erase, and an event says it, too."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    consumer.kill()
    receipt = host.erase(live)
    assert receipt.not_covered[0].startswith("plaintext was found in the volume and overwritten; copies of it")
    [event] = [event for event in host.node.ledger.events() if event.reason == "PlaintextFound"]
    assert event.object == live.volume_id and "did not seal" in event.message
    sealed, other = host.in_use(host.tier("SealOnly", name="sealed"))
    seal(other)
    other.kill()
    assert not any("plaintext was found" in line for line in host.erase(sealed).not_covered)


def test_the_finding_stays_on_record_when_an_attempt_is_cut_short(host: Host) -> None:
    """Plaintext was found and overwritten, then it failed. The next attempt finds none; its receipt must not say so."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    consumer.kill()
    # A mount inside the volume: the overwrite is done, the removal is refused.
    os.mkdir(f"{live.slots_path}/below")
    host.python(
        "import sys; from kvtier_node.kernel import libc; libc.mount('tmpfs', sys.argv[1], 'tmpfs', 0, None)",
        f"{live.slots_path}/below",
    )
    with pytest.raises(Exception, match="another mount"):
        host.erase(live)
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASING
    host.python(
        "import sys; from kvtier_node.kernel import libc; libc.umount2(sys.argv[1], 0)", f"{live.slots_path}/below"
    )
    receipt = host.erase(live)
    assert receipt.technique is Technique.OVERWRITE
    assert any(step.name == "read-back" and step.ok is False for step in receipt.steps)
    assert any("plaintext was found" in line for line in receipt.not_covered), "also when an earlier attempt found it"


@pytest.fixture
def layered(host: Host) -> Host:
    """The allowed root on overlayfs. It stands for btrfs and zfs: what was overwritten may still be somewhere."""
    for name in ("lower", "upper", "work"):
        (host.base / name).mkdir()
    host.python(
        """
        import sys
        from kvtier_node.kernel import libc
        base = sys.argv[1]
        libc.mount("overlay", f"{base}/tiers", "overlay", 0, f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work")
        """,
        str(host.base),
    )
    return host


def test_where_old_copies_may_be_kept_no_overwrite_is_offered(layered: Host) -> None:
    with pytest.raises(BackendUnavailable, match="overlay keeps old copies"):
        layered.provision(layered.tier("HostAttested"))


def test_where_old_copies_may_be_kept_an_overwrite_is_not_claimed_and_nothing_is_removed(layered: Host) -> None:
    """Sealed slots are fine there. Plaintext that was written all the same can't be called erased, at no attempt."""
    host = layered
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    consumer.kill()
    for _ in range(3):
        with pytest.raises(EraseIncomplete, match="old-copies"):
            host.erase(live)
        assert os.path.exists(f"{live.slots_path}/slot.rank_0"), "removed before it was claimed"
        assert host.node.ledger.receipts() == []
    assert raw_count(f"{live.slots_path}/slot.rank_0") == 0
    sealed, other = host.in_use(host.tier("SealOnly", name="sealed"))
    seal(other)
    other.kill()
    assert host.erase(sealed).technique is Technique.PROCESS_DEATH


@pytest.mark.parametrize("how", ["held open", "mapped and closed", "forked child"])
def test_a_request_does_not_overwrite_under_a_process_that_goes_on_writing(host: Host, how: str) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    child = int(
        consumer.do(f"""
            answer = os.fork()
            if answer == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                fd = os.open(f"{{slots}}/slot.rank_0", os.O_RDWR)
                if {how!r} == "mapped and closed":
                    keep["map"] = mmap.mmap(fd, 4096); os.close(fd)
                if {how!r} == "forked child" and os.fork():
                    os._exit(0)
                while True:
                    time.sleep(60)
        """)
    )
    eventually("the child has it", lambda: live.watch is not None and live.watch.holders() == 1)
    host.node.ledger.add_request("default/demo", "All", "test")
    assert fulfil_requests(host.node, [live]) == []
    assert consumer.process.wait(10) != 0, "the consumer on record was ended"
    assert host.node.ledger.get(live.volume_id).state is VolumeState.IN_USE
    assert fulfil_requests(host.node, [live]) == []
    [event] = [event for event in host.node.ledger.events() if event.reason == "EraseIncomplete"]
    assert "open or mapped" in event.message
    if how != "forked child":
        os.kill(child, 9)

    def nobody_has_it() -> bool:
        for name in os.listdir("/proc") if how == "forked child" else []:
            if name.isdecimal() and child_of(live, name):
                os.kill(int(name), 9)
        return live.watch is not None and live.watch.holders() == 0

    eventually("nobody has it", nobody_has_it)
    [receipt] = fulfil_requests(host.node, [live])
    assert receipt.trigger is Trigger.REQUEST
    assert host.node.ledger.open_requests() == []


def child_of(live: LiveVolume, pid: str) -> bool:
    try:
        return any(
            os.readlink(f"/proc/{pid}/fd/{name}").startswith(live.slots_path)
            for name in os.listdir(f"/proc/{pid}/fd")
            if int(pid) != os.getpid()
        )
    except OSError:
        return False


# HostAttested


def test_without_a_key_of_its_own_it_overwrites_and_the_receipt_says_so(host: Host, encrypted_root: Path) -> None:
    live, consumer = host.in_use(host.tier("HostAttested", path=encrypted_root / "demo"))
    host.write_canary(consumer)
    consumer.kill()
    receipt = host.erase(live)
    assert receipt.technique is Technique.OVERWRITE
    assert steps(receipt)["key-removed"].ok is None
    assert steps(receipt)["overwrite"].ok and steps(receipt)["read-back"].ok
    assert any("key of the host's volume still exists" in line for line in receipt.not_covered)
    assert not os.path.lexists(live.row.place)


def test_an_unlinked_slot_file_is_overwritten_before_its_blocks_are_let_go(host: Host, encrypted_root: Path) -> None:
    live, consumer = host.in_use(host.tier("HostAttested", path=encrypted_root / "demo"))
    host.write_canary(consumer)
    disk = Disk(f"{live.slots_path}/slot.rank_0")
    assert raw_count(host.base / "host.img") == 0
    consumer.do("os.unlink(f'{slots}/slot.rank_0')")
    assert live.watch is not None
    assert live.watch.refresh() == 0, "another has it open"
    disk.close()
    assert live.watch.refresh() == 1
    consumer.kill()
    host.erase(live)


def test_the_directory_must_be_encrypted_and_is_measured(host: Host, encrypted_root: Path) -> None:
    with pytest.raises(BackendUnavailable, match="neither dm-crypt under the file system nor"):
        host.provision(host.tier("HostAttested", path=host.root / "in-the-clear"))


def test_a_data_journal_is_refused_where_an_overwrite_must_be_claimed(host: Host, encrypted_root: Path) -> None:
    (encrypted_root / "journaled").mkdir()
    marked = subprocess.run(["chattr", "+j", str(encrypted_root / "journaled")], capture_output=True, check=False)
    if marked.returncode == 0:
        with pytest.raises(BackendUnavailable, match="data=journal"):
            host.provision(host.tier("HostAttested", path=encrypted_root / "journaled"))
