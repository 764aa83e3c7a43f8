"""A volume that somebody unmounts while it is in use: erased once the kernel shows that nobody can use it, and said until then."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState
from kvtier_node.backends import image
from kvtier_node.conditions import TierFacts, VolumeFacts, findings
from kvtier_node.guarding import look
from kvtier_node.kernel import mounts
from kvtier_node.kernel.loop import LoopDevice
from kvtier_node.live import LiveVolume
from kvtier_node.lost_mounts import LOST, has_lost_mount
from kvtier_node.measuring import measure_volume
from kvtier_node.recovery import Recovered
from kvtier_node.run import run_fenced
from node_host import Host, eventually
from unmounting import unmount_everywhere

pytestmark = pytest.mark.root


def unmount(live: LiveVolume, *spare: int) -> None:
    unmount_everywhere(f"{live.row.place}/mnt", spare=frozenset(spare))
    assert has_lost_mount(live.row)


def test_what_nobody_can_use_any_more_is_erased_though_its_consumer_lives(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    host.write_canary(consumer)
    assert not has_lost_mount(live.row)
    assert look(host.node, live).in_use
    unmount(live)
    seen = eventually("the erasure", lambda: (seen := look(host.node, live)).receipt and seen)
    assert "nobody can use it" in seen.why
    assert seen.receipt.trigger is Trigger.CRASH
    assert consumer.process.poll() is None
    host.assert_nothing_left(live)


def test_a_consumer_that_has_a_file_open_keeps_its_volume_and_the_conditions_say_so(host: Host) -> None:
    tier = host.tier("Fscrypt", ranks=1)
    live, consumer = host.in_use(tier)
    host.write_canary(consumer, keep_open=True)
    unmount(live)
    for _ in range(3):
        seen = look(host.node, live)
        assert (seen.in_use, seen.error) == (True, None)
        assert LOST in seen.why and "still mounted elsewhere, or a file of it is open" in seen.why
    consumer.do("os.pwrite(keep['fd'], b'it goes on', 0); os.fsync(keep['fd'])")
    measured = measure_volume(host.node, live.row)
    said = findings(TierFacts(tier, datetime.now(UTC), [VolumeFacts(live.row, measured)]))
    [provisioned] = [finding for finding in said if finding.type is ConditionType.PROVISIONED]
    assert (provisioned.status, provisioned.reason) == (False, Reason.PROVISIONING_FAILED)
    assert live.volume_id in provisioned.message and LOST in provisioned.message
    [encrypted] = [finding for finding in said if finding.type is ConditionType.ENCRYPTED]
    assert encrypted.status is None
    consumer.do("os.close(keep.pop('fd'))")
    eventually("the erasure", lambda: look(host.node, live).receipt)
    assert consumer.process.poll() is None
    host.assert_nothing_left(live)


def test_a_mount_in_another_namespace_keeps_it_and_the_end_of_that_one_erases_it(host: Host) -> None:
    live, _ = host.in_use(host.tier("Fscrypt", ranks=1))
    device = os.stat(f"{live.row.place}/mnt").st_dev
    code = (
        "import sys; from kvtier_node.kernel.namespaces import leave_mount_namespace; leave_mount_namespace();"
        " print(flush=True); sys.stdin.read()"
    )
    other = host.popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None
    other.stdout.readline()
    assert other.pid in [pid for pid, _ in mounts.mounts_elsewhere(device)]
    unmount(live, other.pid)
    for _ in range(3):
        assert look(host.node, live).in_use
    assert host.node.ledger.get(live.volume_id).state is VolumeState.IN_USE
    other.stdin.close()
    eventually("the erasure", lambda: look(host.node, live).receipt)
    host.assert_nothing_left(live)


def test_a_start_erases_it_though_the_process_on_record_lives(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    held, holder = host.in_use(host.tier("Fscrypt", ranks=1, name="held"))
    host.write_canary(holder, keep_open=True)
    host.drop_guardians()
    unmount(live)
    unmount(held)

    def start() -> Recovered | None:
        """None: a mount namespace that was copied a moment ago, by anybody, had it still; so it was adopted."""
        found = host.recover()
        if found.erased:
            return found
        host.drop_guardians()
        return None

    found = eventually("a start that erases it", start)
    assert [receipt.volume_id for receipt in found.erased] == [live.volume_id]
    assert [adopted.volume_id for adopted in found.adopted] == [held.volume_id]
    assert consumer.process.poll() is None
    holder.kill()
    eventually("the other's end", lambda: look(host.node, found.adopted[0]).receipt)
    host.assert_nothing_left(live)


def test_a_device_node_that_is_missing_proves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent in a container whose /dev has not got it."""
    live, _ = host.in_use(host.tier("Fscrypt", ranks=1))
    unmount(live)
    with monkeypatch.context() as patch:
        patch.setattr(image, "devices_of", lambda *_: [LoopDevice(999, f"{host.base}/no-such-node")])
        seen = look(host.node, live)
    assert seen.in_use and seen.error is not None
    assert host.node.ledger.get(live.volume_id).state is VolumeState.IN_USE
    eventually("the erasure", lambda: look(host.node, live).receipt)


def test_kvtier_run_says_it_while_its_command_runs(host: Host) -> None:
    mark = host.base / "said"
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if LOST in text:
            mark.touch()

    result = run_fenced(
        host.node,
        host.tier("Fscrypt", ranks=1),
        ["sh", "-c", f"for i in $(seq 600); do [ -e {mark} ] && exit 4; sleep 0.1; done"],
        say=say,
        on_started=lambda live, _: unmount(live),
    )
    assert (result.exit_code, result.error) == (4, None)
    assert result.receipt is not None
    [text] = [text for text in said if LOST in text]
    assert "somebody unmounted it: end the command" in text
    host.assert_nothing_left()


def test_a_place_that_cannot_be_read_is_no_lost_mount(host: Host) -> None:
    """Its file system may be away: then the volume is, too."""
    live, _ = host.in_use(host.tier("Fscrypt", ranks=1))
    plain, _ = host.in_use(host.tier("SealOnly", ranks=1, name="plain"))
    assert not has_lost_mount(plain.row)
    unmount(live)
    away = Path(f"{live.row.place}.away")
    os.rename(live.row.place, away)
    assert not has_lost_mount(live.row)
    assert look(host.node, live).in_use
    os.rename(away, live.row.place)
    eventually("the erasure", lambda: look(host.node, live).receipt)
