"""Recovery with a file system that is not there, after another boot, between two small steps, and with trouble in one of many."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.errors import EraseIncomplete
from kvtier_api.volume import VolumeState
from kvtier_node.erasing import abandon
from kvtier_node.kernel import libc
from kvtier_node.receipts import Technique
from kvtier_node.recovery import guard
from node_host import Host

pytestmark = pytest.mark.root
EARLIER = "11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize("backend", ["SealOnly", "Fscrypt"])
@pytest.mark.parametrize("beneath", [False, True], ids=["bare", "same path beneath"])
def test_a_place_whose_file_system_is_not_mounted_is_not_claimed_erased(
    own_disk: Host, backend: str, beneath: bool
) -> None:
    host = own_disk
    live, consumer = host.in_use(host.tier(backend))
    consumer.do("open(f'{slots}/slot.rank_0', 'r+b').write(os.urandom(8192))")
    consumer.kill()
    host.drop_guardians()
    if backend == "Fscrypt":
        libc.umount2(f"{live.row.place}/mnt", 0)
        host.python(
            "import sys; from kvtier_node.kernel import loop; loop.detach(loop.LoopDevice(sys.argv[1], int(sys.argv[1][9:])))",
            live.row.device or "",
        )
    device = next(device for device in host.loops())
    libc.umount2(str(host.root), 2)  # MNT_DETACH: a stranger's namespace may have a copy of what is below
    if beneath:
        (host.root / "demo").mkdir()
    for _ in range(2):
        [(failed, error)] = host.recover().failed
        assert failed.volume_id == live.volume_id
        assert isinstance(error, EraseIncomplete) and "may not be mounted" in str(error)
        assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASING
        host.drop_guardians()
    assert host.node.ledger.receipts() == []
    if beneath:
        (host.root / "demo").rmdir()
    libc.mount(device, str(host.root), "ext4", 0, None)
    assert [receipt.volume_id for receipt in host.recover().erased] == [live.volume_id]
    assert os.listdir(host.root / "demo") == []


def test_a_directory_that_somebody_removed_is_not_claimed_erased(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.kill()
    host.drop_guardians()
    shutil.rmtree(live.row.place)
    [(_, error)] = host.recover().failed
    assert isinstance(error, EraseIncomplete) and "not by kvtier's hand" in str(error)
    host.drop_guardians()
    again = guard(host.node, host.node.ledger.get(live.volume_id))
    assert again is not None
    receipt = abandon(host.node, again, "the disk was replaced")
    assert receipt.technique is Technique.NOTHING
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ABANDONED
    assert host.recover().failed == []


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly"])
def test_after_a_power_cut_the_key_is_lost_and_the_receipt_says_so(host: Host, backend: str) -> None:
    live, consumer = host.in_use(host.tier(backend))
    host.write_canary(consumer)
    os.sync()
    consumer.kill()
    host.drop_guardians()
    if backend == "Fscrypt":  # nothing of the earlier boot is mounted after a cut
        libc.umount2(f"{live.row.place}/mnt", 0)
    host.node.ledger.note(live.volume_id, boot_id=EARLIER)
    [receipt] = host.recover().erased
    assert receipt.trigger is Trigger.POWER_LOSS
    names = [step.name for step in receipt.steps]
    if backend == "Fscrypt":
        assert receipt.technique is Technique.KEY_LOST
        assert "boot-id" in names
    else:
        assert receipt.technique is Technique.OVERWRITE, "unsealed bytes do not go with the power"
    host.assert_nothing_left(live)


def test_a_consumer_of_an_earlier_boot_is_dead_even_if_its_number_lives(host: Host) -> None:
    live, _consumer = host.in_use(host.tier("SealOnly"))
    host.drop_guardians()
    host.node.ledger.note(live.volume_id, boot_id=EARLIER)
    found = host.recover()
    assert found.adopted == []
    assert [receipt.trigger for receipt in found.erased] == [Trigger.POWER_LOSS]


def test_a_crash_between_the_record_and_the_removal_is_tidied_up(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    kept = {path.name: path.read_bytes() for path in Path(live.row.place).iterdir() if path.is_file()}
    host.erase(live)
    os.mkdir(live.row.place)
    for name, content in kept.items():
        Path(live.row.place, name).write_bytes(content)
    Path(live.row.place, ".place.json.0123456789abcdef.tmp").write_bytes(b"cut short")
    host.reopen()
    found = host.recover()
    assert (found.erased, found.failed) == ([], [])
    assert os.listdir(host.root / "demo") == []
    assert len(host.node.ledger.receipts()) == 1


def test_what_appears_at_the_place_of_an_erased_volume_is_foreign_and_stops_nothing(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    host.erase(live)
    os.mkdir(live.row.place)
    Path(live.row.place, "somebody's").write_text("data")
    host.reopen()
    other, consumer = host.in_use(host.tier("SealOnly", name="other"))
    consumer.kill()
    host.drop_guardians()
    assert [receipt.volume_id for receipt in host.recover().erased] == [other.volume_id]
    assert Path(live.row.place, "somebody's").read_text() == "data"
    assert any(event.object == live.row.place for event in host.node.ledger.events())


def test_a_root_that_is_no_longer_allowed_stops_no_start(host: Host) -> None:
    from kvtier_node.recovery import open_node, recover

    host.erase(host.provision(host.tier("SealOnly", name="gone")))
    live, consumer = host.in_use(host.tier("SealOnly", name="kept"))
    consumer.kill()
    host.drop_guardians()
    host.node.ledger.close()
    (host.base / "others").mkdir()
    host.node = open_node(host.state, [str(host.base / "others")], name="node-a")
    found = recover(host.node)
    assert [failed.volume_id for failed, _ in found.failed] == [live.volume_id]
    assert "allowed root" in str(found.failed[0][1])
    found.failed[0][0].guardian.close()


def test_one_volume_that_cannot_be_erased_keeps_no_other_from_it(host: Host) -> None:
    first, one = host.in_use(host.tier("SealOnly", name="a"))
    second, two = host.in_use(host.tier("SealOnly", name="b"))
    os.mkdir(f"{first.slots_path}/m")
    host.python(
        "import sys; from kvtier_node.kernel import libc; libc.mount('tmpfs', sys.argv[1], 'tmpfs', 0, None)",
        f"{first.slots_path}/m",
    )
    one.kill()
    two.kill()
    host.drop_guardians()
    found = host.recover()
    assert [live.volume_id for live, _ in found.failed] == [first.volume_id]
    assert [receipt.volume_id for receipt in found.erased] == [second.volume_id]


def test_recovery_that_is_killed_is_finished_by_the_next(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    consumer.kill()
    host.drop_guardians()
    host.node.ledger.close()
    done = host.python(
        """
        import os, signal, sys
        from kvtier_node.recovery import open_node, recover
        def observer(transition):
            if transition.after == "Erasing":
                os.kill(os.getpid(), signal.SIGKILL)
        recover(open_node(sys.argv[1], [sys.argv[2]], name="node-a", observers=[observer]))
        """,
        host.state,
        str(host.root),
        check=False,
    )
    assert done.returncode == -9
    host.reopen()
    [receipt] = host.recover().erased
    assert receipt.trigger is Trigger.CRASH, "the first reason is kept"
    host.assert_nothing_left(live)
