"""Pods with volumes that have no file system of their own: `SealOnly` and `HostAttested`, through the real CSI service."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from csi_agent import CANARY, Kubelet, Pod
from kvtier_api.erasure import Trigger
from kvtier_api.marker import check_marker
from kvtier_api.volume import VolumeState
from kvtier_node.backends import image
from kvtier_node.csi.codes import NON_FINAL
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.kernel import fscrypt, libc, loop
from kvtier_node.ledger import Ledger
from kvtier_node.receipts import Step, Technique

pytestmark = pytest.mark.root
MIB = 1 << 20
TECHNIQUES = {"SealOnly": Technique.PROCESS_DEATH, "HostAttested": Technique.OVERWRITE}
HOLD = "import os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR); print(flush=True); time.sleep(600)"


@pytest.fixture
def encrypted(kubelet: Kubelet) -> Iterator[Path]:
    """A directory with an fscrypt policy of the host's own; the allowed root itself is its mount."""
    root = kubelet.base / "tiers"
    picture = kubelet.base / "host.img"
    fd = os.open(picture, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 64 * MIB)
    device = loop.attach(fd)
    os.close(fd)
    image.make_file_system(device.path, features="encrypt")
    libc.mount(device.path, str(root), "ext4", 0, None)
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        key_id = fscrypt.add_key(top, bytearray(os.urandom(64)))
        (root / "secret").mkdir()
        below = os.open(root / "secret", os.O_RDONLY | os.O_DIRECTORY)
        fscrypt.set_policy(below, key_id)
        os.close(below)
        os.close(top)
        yield root / "secret"
    finally:
        if kubelet.process is not None:
            kubelet.stop_agent(signal.SIGKILL)
        subprocess.run(["umount", "-l", str(root)], check=False)
        loop.detach(device)


@pytest.fixture(params=["SealOnly", "HostAttested"])
def plain(request: pytest.FixtureRequest, kubelet: Kubelet) -> Kubelet:
    """An agent that serves, and a tier `chat` of that backend."""
    if request.param == "HostAttested":
        path = request.getfixturevalue("encrypted")
        kubelet.declare_tier(path=f"{path}/chat", encryption={"backend": "HostAttested"})
    else:
        kubelet.declare_tier(encryption={"backend": "SealOnly", "sealSlots": True})
    kubelet.start_agent()
    return kubelet


def slot(kubelet: Kubelet, pod: Pod, rank: int = 0) -> Path:
    return kubelet.target(pod) / "slots" / f"slot.rank_{rank}"


def seal(kubelet: Kubelet, pod: Pod) -> None:
    """What a sealing engine leaves."""
    with slot(kubelet, pod).open("r+b") as file:
        file.write(os.urandom(256 * 1024))
        file.flush()
        os.fsync(file.fileno())


def hold(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def container(plain: Kubelet, new_pod: Callable[..., Pod]) -> Iterator[tuple[Pod, subprocess.Popen[str]]]:
    """A pod with a volume, and a process that has a slot of it open."""
    pod = new_pod()
    plain.publish(pod)
    process = hold(slot(plain, pod))
    yield pod, process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def assert_gone(kubelet: Kubelet, pod: Pod) -> None:
    row = kubelet.row_of(pod)
    assert row.state is VolumeState.ERASED
    kubelet.wait("its place is removed, after the record", lambda: not os.path.lexists(row.place))
    assert not kubelet.target(pod).exists()
    assert str(kubelet.target(pod)) not in kubelet.mounts()


def test_a_pod_has_it_and_it_is_gone_after_unpublish(plain: Kubelet, new_pod: Callable[..., Pod]) -> None:
    pod, other = new_pod(), new_pod()
    plain.publish(pod)
    plain.publish(other)
    row, target = plain.row_of(pod), plain.target(pod)
    marker = check_marker(f"{target}/.kvtier-marker.json", nonce=str(row.facts["nonce"]), pod_uid=pod.uid)
    assert marker.own_device is False
    assert sorted(path.name for path in (target / "slots").iterdir()) == marker.slot_files
    lines = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    (options,) = [fields[5] for fields in lines if fields[4] == str(target)]
    assert {"nodev", "nosuid", "noexec"} <= set(options.split(","))
    seal(plain, pod)
    seal(plain, other)
    plain.publish(pod)
    assert plain.row_of(pod).volume_id == row.volume_id
    plain.declare_pod(pod, ended_cleanly=True)
    plain.unpublish(pod)
    [receipt] = plain.receipts()
    assert (receipt.technique, receipt.trigger) == (TECHNIQUES[row.backend], Trigger.EXIT)
    assert all(step.ok is not False for step in receipt.steps)
    assert_gone(plain, pod)
    assert plain.row_of(other).state is VolumeState.IN_USE, "the other pod's volume is as it was"
    plain.unpublish(other)
    plain.unpublish(other)
    assert_gone(plain, other)


def test_its_usage_is_that_of_its_own_files(plain: Kubelet, new_pod: Callable[..., Pod]) -> None:
    pod = new_pod()
    plain.publish(pod)
    request = pb.NodeGetVolumeStatsRequest(volume_id=pod.volume_id, volume_path=str(plain.target(pod)))
    [usage] = plain.node.NodeGetVolumeStats(request, timeout=60).usage
    assert usage.unit == pb.VolumeUsage.BYTES
    assert 2 * MIB <= usage.used <= 2 * MIB + 64 * 1024


def test_while_a_container_has_a_slot_open_nothing_is_overwritten_or_claimed(
    plain: Kubelet, container: tuple[Pod, subprocess.Popen[str]]
) -> None:
    pod, process = container
    plain.write_canary(pod)
    path = Path(f"/proc/{process.pid}/fd")
    with pytest.raises(grpc.RpcError) as caught:
        plain.unpublish(pod, timeout_s=6.0)
    assert caught.value.code() in NON_FINAL
    assert plain.row_of(pod).state is not VolumeState.ERASED
    assert plain.receipts() == []
    [fd] = [link for link in path.iterdir() if os.readlink(link).endswith("slot.rank_0")]
    assert fd.read_bytes().startswith(CANARY)
    process.kill()
    process.wait()
    plain.unpublish_until_ok(pod)
    assert plain.receipts()[0].technique is Technique.OVERWRITE
    assert_gone(plain, pod)


def test_a_request_ends_who_has_it_and_erases_it_and_the_pod_finds_an_empty_directory(
    plain: Kubelet, container: tuple[Pod, subprocess.Popen[str]]
) -> None:
    pod, process = container
    with Ledger.open(plain.base / "state", create=False) as ledger:
        ledger.add_request("default/chat", "All", "customer left")
    assert process.wait(60) == -signal.SIGTERM
    plain.wait("the erasure", lambda: plain.row_of(pod).state is VolumeState.ERASED)
    assert plain.receipts()[0].trigger is Trigger.REQUEST
    assert list(plain.target(pod).iterdir()) == []
    with pytest.raises(OSError, match="Read-only"):
        os.open(plain.target(pod) / "file", os.O_CREAT | os.O_WRONLY)
    plain.unpublish(pod)
    assert_gone(plain, pod)


@pytest.mark.parametrize("pod_ends", [False, True], ids=["the pod goes on", "the pod ended meanwhile"])
def test_an_agent_that_was_killed_finds_it_again(plain: Kubelet, new_pod: Callable[..., Pod], pod_ends: bool) -> None:
    pod = new_pod()
    plain.publish(pod)
    seal(plain, pod)
    before = slot(plain, pod).read_bytes()
    plain.stop_agent(signal.SIGKILL)
    if pod_ends:
        os.system(f"umount -l {plain.target(pod)}")
        plain.remove_folders(pod)
    plain.start_agent()
    if pod_ends:
        plain.wait("the erasure", lambda: plain.row_of(pod).state is VolumeState.ERASED)
        assert plain.receipts()[0].trigger is Trigger.CRASH
    else:
        assert plain.row_of(pod).state is VolumeState.IN_USE
        assert slot(plain, pod).read_bytes() == before
        plain.unpublish(pod)
    assert_gone(plain, pod)


@pytest.mark.parametrize("step", ["after:provision", "after:start", "after:attach"])
def test_sigkill_in_a_publish_and_the_next_one_has_it(kubelet: Kubelet, new_pod: Callable[..., Pod], step: str) -> None:
    pod = new_pod()
    kubelet.declare_tier(encryption={"backend": "SealOnly", "sealSlots": True})
    kubelet.start_agent(die=step)
    with pytest.raises(grpc.RpcError):
        kubelet.publish(pod)
    kubelet.died()
    kubelet.start_agent()
    kubelet.publish(pod)
    seal(kubelet, pod)
    assert len(kubelet.in_use()) == 1
    kubelet.unpublish_until_ok(pod)
    assert_gone(kubelet, pod)


@pytest.mark.parametrize("step", ["after:detach", "before:erase", "after:erase"])
def test_sigkill_in_an_unpublish_and_it_is_erased_all_the_same(
    kubelet: Kubelet, new_pod: Callable[..., Pod], step: str
) -> None:
    pod = new_pod()
    kubelet.declare_tier(encryption={"backend": "SealOnly", "sealSlots": True})
    kubelet.start_agent()
    kubelet.publish(pod)
    kubelet.write_canary(pod)
    kubelet.stop_agent()
    kubelet.start_agent(die=step)
    with contextlib.suppress(grpc.RpcError):  # once it is on record, the answer may be sooner than the death
        kubelet.unpublish(pod)
    kubelet.died()
    kubelet.start_agent()
    kubelet.unpublish_until_ok(pod)
    [receipt] = kubelet.receipts()
    assert receipt.technique is Technique.OVERWRITE
    assert_gone(kubelet, pod)


def test_an_engine_that_does_not_seal_is_found_out_and_overwritten(
    kubelet: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    kubelet.declare_tier(encryption={"backend": "SealOnly", "sealSlots": True})
    kubelet.start_agent()
    pod = new_pod()
    kubelet.publish(pod)
    kubelet.write_canary(pod)
    kubelet.unpublish(pod)
    [receipt] = kubelet.receipts()
    found: dict[str, Step] = {step.name: step for step in receipt.steps}
    assert receipt.technique is Technique.OVERWRITE
    assert found["read-back"].ok is False and found["read-back-after-overwrite"].ok
    assert_gone(kubelet, pod)


def test_a_tier_that_does_not_ask_for_sealing_gets_no_volume_without_a_layer(
    kubelet: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    kubelet.declare_tier(encryption={"backend": "SealOnly", "sealSlots": False})
    kubelet.declare_tier("clear", encryption={"backend": "HostAttested"})
    kubelet.start_agent()
    for tier, text in (
        ("chat", "sealSlots"),
        ("clear", "neither dm-crypt under the file system nor an fscrypt policy"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.publish(new_pod(tier=tier))
        assert caught.value.code() not in NON_FINAL
        assert text in str(caught.value.details())
    assert kubelet.rows() == []
