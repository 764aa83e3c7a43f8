"""NodePublishVolume and NodeUnpublishVolume on real fscrypt volumes, as kubelet calls them. Each rule names its report."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from csi_agent import CANARY, Kubelet, Pod
from kvtier_api.erasure import Trigger
from kvtier_api.marker import check_marker
from kvtier_api.volume import VolumeState

pytestmark = pytest.mark.root


def code(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    found = caught.value.code()
    assert isinstance(found, grpc.StatusCode)
    return found


def test_a_pod_gets_an_encrypted_volume_of_its_own_and_what_it_wrote_is_gone_after_unpublish(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    row = serving.row_of(pod)
    target = serving.target(pod)
    assert row.state is VolumeState.IN_USE
    assert os.stat(target).st_dev != os.stat(target.parent).st_dev
    marker = check_marker(f"{target}/.kvtier-marker.json", nonce=str(row.facts["nonce"]), pod_uid=pod.uid)
    slots = sorted((target / "slots").iterdir())
    assert [slot.name for slot in slots] == marker.slot_files
    assert {(slot.stat().st_uid, slot.stat().st_gid, slot.stat().st_mode & 0o777) for slot in slots} == {
        (1000, 1000, 0o600)
    }
    lines = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    (options,) = [fields[5] for fields in lines if fields[4] == str(target)]
    assert {"nodev", "nosuid", "noexec"} <= set(options.split(","))
    serving.write_canary(pod)
    (image,) = serving.images()
    assert CANARY not in image.read_bytes()
    serving.declare_pod(pod, ended_cleanly=True)
    serving.unpublish(pod)
    assert serving.row_of(pod).state is VolumeState.ERASED
    (receipt,) = serving.receipts()
    assert receipt.trigger is Trigger.EXIT
    assert receipt.volume_id == row.volume_id
    assert not target.exists()
    assert serving.left_over() == []
    assert list(serving.images()) == []


def test_publish_twice_gives_the_same_volume_and_writes_nothing_anew(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """kubelet calls again after a restart of its own."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    before = serving.row_of(pod)
    serving.publish(pod)
    assert serving.row_of(pod) == before
    assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)
    assert serving.mounts().count(str(serving.target(pod))) == 1


def test_a_mount_that_went_from_the_target_is_put_back(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """csi-driver#136: the mount is missing at a republish."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    os.system(f"umount -l {serving.target(pod)}")
    serving.publish(pod)
    assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)


def test_unpublish_is_ok_for_what_it_never_heard_of_and_twice_and_without_a_directory(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """kubernetes#90752, #121271: NotFound would keep the pod Terminating for ever."""
    pod = new_pod()
    serving.unpublish(pod)
    serving.publish(pod)
    serving.unpublish(pod)
    serving.unpublish(pod)
    serving.remove_folders(pod)
    serving.unpublish(pod)
    assert len(serving.receipts()) == 1


def test_unpublish_of_a_target_that_is_a_plain_empty_directory_is_ok(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """kubernetes#119921: after a reboot the target can be a plain directory."""
    pod = new_pod()
    serving.make_folders(pod)
    serving.target(pod).mkdir()
    serving.unpublish(pod)
    assert not serving.target(pod).exists()


def test_data_in_a_plain_target_is_neither_adopted_nor_removed(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """kubernetes#119921, zfs-localpv#88: an engine may have written there, and a tree is never removed."""
    pod = new_pod()
    serving.make_folders(pod)
    serving.target(pod).mkdir()
    (serving.target(pod) / "plaintext").write_bytes(CANARY)
    with pytest.raises(grpc.RpcError) as caught:
        serving.publish(pod)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "holds data" in caught.value.details()
    assert serving.rows() == []
    assert code(lambda: serving.unpublish(pod)) is grpc.StatusCode.FAILED_PRECONDITION
    assert (serving.target(pod) / "plaintext").read_bytes() == CANARY
    (serving.target(pod) / "plaintext").unlink()
    serving.publish(pod)


def test_unpublish_takes_off_a_mount_whose_device_is_dead(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """spiffe-csi#158, zfs-localpv#615: an error of the file system must not keep the pod."""
    pod = new_pod()
    serving.make_folders(pod)
    serving.target(pod).mkdir()
    # A FUSE mount whose daemon never answered: every stat of it is an error.
    fd = os.open("/dev/fuse", os.O_RDWR)
    from kvtier_node.kernel import libc

    libc.mount("dead", str(serving.target(pod)), "fuse", 0, f"fd={fd},rootmode=40000,user_id=0,group_id=0")
    os.close(fd)
    with pytest.raises(OSError):
        os.listdir(serving.target(pod))
    serving.unpublish(pod)
    assert not serving.target(pod).exists()


def test_a_pod_that_kubelet_forgot_is_erased_by_the_evidence_of_its_directory(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """kubernetes#127229, #92299: unpublish never came."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    os.system(f"umount -l {serving.target(pod)}")
    serving.remove_folders(pod)
    assert not serving.pod_folder(pod).exists()
    serving.wait("it is erased", lambda: serving.row_of(pod).state is VolumeState.ERASED)
    assert serving.receipts()[0].trigger is Trigger.CRASH


def test_a_pods_absence_from_the_api_alone_erases_nothing(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    serving.forget_pod(pod)
    serving.stop_agent()
    serving.start_agent()
    assert serving.row_of(pod).state is VolumeState.IN_USE
    assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)
    serving.unpublish(pod)
    assert serving.receipts()[0].trigger is Trigger.CRASH, "nobody saw how it ended"


def test_a_directory_of_pods_that_cannot_be_seen_is_no_proof_that_a_pod_is_gone(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    serving.stop_agent()
    (serving.root / "pods").rename(serving.root / "elsewhere")
    serving.start_agent()
    assert serving.row_of(pod).state is VolumeState.IN_USE
    (serving.root / "elsewhere").rename(serving.root / "pods")
    serving.unpublish(pod)
    assert serving.row_of(pod).state is VolumeState.ERASED


def test_files_that_a_restarted_container_unlinks_are_erased_while_the_pod_goes_on(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """A container that restarts in its pod brings no NodePublishVolume (operators.md 3.3 rule 7)."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    slot = serving.target(pod) / "slots" / "slot.rank_0"

    def used_bytes() -> int:
        found = os.statvfs(serving.target(pod))
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    before = used_bytes()
    slot.unlink()
    slot.write_bytes(b"")
    serving.wait("the old file's blocks are free", lambda: used_bytes() <= before - (1 << 20))
    assert serving.row_of(pod).state is VolumeState.IN_USE


def test_stats_are_those_of_the_volumes_own_file_system(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    from kvtier_node.csi.generated import csi_pb2 as pb

    pod = new_pod()
    serving.publish(pod)
    request = pb.NodeGetVolumeStatsRequest(volume_id=pod.volume_id, volume_path=str(serving.target(pod)))
    answer = serving.node.NodeGetVolumeStats(request, timeout=60)
    found = os.statvfs(serving.target(pod))
    by_unit = {usage.unit: usage for usage in answer.usage}
    assert by_unit[pb.VolumeUsage.BYTES].total == found.f_blocks * found.f_frsize
    assert by_unit[pb.VolumeUsage.BYTES].used >= 2 << 20
    assert by_unit[pb.VolumeUsage.INODES].total == found.f_files
    other = new_pod()
    serving.make_folders(other)
    request = pb.NodeGetVolumeStatsRequest(volume_id=other.volume_id, volume_path=str(serving.target(other)))
    assert code(lambda: serving.node.NodeGetVolumeStats(request, timeout=60)) is grpc.StatusCode.NOT_FOUND
