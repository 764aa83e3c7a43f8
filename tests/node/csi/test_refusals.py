"""What is refused, with which gRPC code, and what `kubectl describe pod` then shows.

kubelet forgets a volume after a final code, and unpublish never comes (kubernetes#136591): so a refusal with a final code leaves
nothing behind, and while anything is left the code is one of those that mean "perhaps mounted".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import pytest

from csi_agent import CANARY, Kubelet, Pod
from kvtier_api.volume import VolumeState
from kvtier_node.csi.codes import NON_FINAL
from kvtier_node.csi.generated import csi_pb2 as pb

pytestmark = pytest.mark.root


def refused(kubelet: Kubelet, pod: Pod, **changes: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.publish(pod, **changes)
    return caught.value.code(), str(caught.value.details())


def nothing_left(kubelet: Kubelet) -> bool:
    return not kubelet.left_over() and all(row.is_terminal for row in kubelet.rows())


def test_who_may_not_have_a_volume_is_told_why_and_leaves_nothing(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    serving.declare_tier("picky", workloadSelector={"matchLabels": {"team": "search"}})
    serving.declare_tier("elsewhere", nodeSelector={"disk": "tape"})
    serving.declare_tier("going", metadata=", deletionTimestamp: 2026-01-01T00:00:00Z")
    serving.declare_tier("other", "another-namespace")
    expected = {
        "picky": (grpc.StatusCode.PERMISSION_DENIED, "spec.workloadSelector does not select this pod"),
        "elsewhere": (grpc.StatusCode.FAILED_PRECONDITION, "spec.nodeSelector (disk=tape) does not select node node-a"),
        "going": (grpc.StatusCode.FAILED_PRECONDITION, "is being deleted"),
        "other": (grpc.StatusCode.NOT_FOUND, "KVCacheTier default/other: there is none in the pod's namespace"),
    }
    for tier, (code, text) in expected.items():
        found = refused(serving, new_pod(tier=tier))
        assert found[0] is code, found
        assert text in found[1], found
    assert serving.rows() == []
    serving.declare_tier("picky", workloadSelector={"matchLabels": {"app": "vllm"}})
    serving.publish(new_pod(tier="picky"))


def test_another_pod_of_the_same_name_gets_nothing(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    pod = new_pod()
    serving.declare_pod(pod, uid="11111111-0000-4000-8000-222222222222")
    assert refused(serving, pod)[0] is grpc.StatusCode.NOT_FOUND
    assert serving.rows() == []


def test_a_user_that_only_the_image_names_is_refused_before_an_engine_meets_it(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.declare_pod(pod, users=[{"container": "vllm", "uid": None, "gid": None, "non_root": True}])
    found = refused(serving, pod)
    assert found[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert "set securityContext.runAsUser" in found[1]
    serving.declare_pod(
        pod,
        users=[
            {"container": "vllm", "uid": 1000, "gid": None, "non_root": True},
            {"container": "sidecar", "uid": 2000, "gid": None, "non_root": True},
        ],
    )
    assert "sidecar as uid 2000" in refused(serving, pod)[1]


def test_the_files_owner_is_the_pods_user_and_its_fs_group(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    pod = new_pod()
    serving.declare_pod(pod, users=[{"container": "c", "uid": 1234, "gid": 5, "non_root": False}], fs_group=5678)
    serving.publish(pod)
    slot = (serving.target(pod) / "slots" / "slot.rank_1").stat()
    assert (slot.st_uid, slot.st_gid) == (1234, 5678)


def test_foreign_data_in_the_tiers_directory_blocks_and_is_on_record(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    folder = serving.base / "tiers" / "chat"
    folder.mkdir(mode=0o755)
    (folder / "somebodys.bin").write_bytes(CANARY)
    pod = new_pod()
    for _ in range(2):
        found = refused(serving, pod)
        assert found[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert "'somebodys.bin'" in found[1]
    assert (folder / "somebodys.bin").read_bytes() == CANARY
    assert nothing_left(serving)
    from kvtier_node.ledger import Ledger

    with Ledger.open(serving.base / "state", create=False) as ledger:
        events = [event for event in ledger.events() if event.reason == "ForeignData"]
    assert [event.object for event in events] == ["KVCacheTier default/chat"]


def test_a_tier_below_another_ones_directory_is_refused_with_both_named_and_the_first_goes_on(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    path = serving.base / "tiers" / "chat"
    serving.declare_tier("nested", path=str(path / "b"))
    first = new_pod()
    serving.publish(first)
    for _ in range(2):
        code, text = refused(serving, new_pod(tier="nested"))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        for part in ("default/nested", f"{path}/b", "default/chat", f"{path},", "neither below nor above"):
            assert part in text
    assert not (path / "b").exists()
    assert len(serving.rows()) == 1
    serving.publish(new_pod())


def test_foreign_data_is_counted_for_the_alert_until_a_volume_of_the_tier_is_made(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    folder = serving.base / "tiers" / "chat"
    folder.mkdir(mode=0o755)
    (folder / "somebodys.bin").write_bytes(CANARY)
    pod = new_pod()
    refused(serving, pod)
    figure = partial(serving.figure, "kvtier_node_foreign_data", namespace="default", tier="chat")
    serving.wait("it is counted", lambda: figure() == 1)
    (folder / "somebodys.bin").unlink()
    serving.publish(pod)
    serving.wait("it is counted no more", lambda: figure() == 0)


def test_what_does_not_fit_is_said_with_both_numbers_and_leaves_nothing(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    serving.declare_tier("huge", sizePerRank="900Ti")
    found = refused(serving, new_pod(tier="huge"))
    assert found[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "are free" in found[1]
    assert nothing_left(serving)


def test_a_path_outside_the_allowed_roots_is_refused(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    serving.declare_tier("away", path="/var/elsewhere")
    found = refused(serving, new_pod(tier="away"))
    assert found[0] is grpc.StatusCode.PERMISSION_DENIED
    assert "under no allowed root" in found[1]


def test_without_an_api_server_a_new_pod_waits_and_one_that_has_its_volume_goes_on(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """Record-before-write: no volume that the API server does not know."""
    pod, other = new_pod(), new_pod()
    serving.publish(pod)
    (serving.cluster / "away").touch()
    assert refused(serving, other)[0] is grpc.StatusCode.UNAVAILABLE
    serving.publish(pod)
    serving.unpublish(pod)
    assert serving.row_of(pod).state is VolumeState.ERASED, "an erasure never waits for the API server"
    (serving.cluster / "away").unlink()
    serving.publish(other)


def test_a_volume_that_cannot_be_put_on_record_is_taken_back_whole(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.make_folders(pod)
    (serving.cluster / "hold").touch()
    call = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=60)
    serving.wait("it is provisioned", lambda: [row for row in serving.rows() if row.state is VolumeState.READY])
    assert serving.mounts() and str(serving.target(pod)) not in serving.mounts(), "nothing is shown before the record"
    serving.remove_folders(pod)  # the last step must now fail
    (serving.cluster / "hold").unlink()
    assert call.exception().code() not in (grpc.StatusCode.OK, *NON_FINAL)
    assert nothing_left(serving)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (
            lambda it: it.declare_tier(metadata=", uid: old, deletionTimestamp: 2026-01-01T00:00:00Z"),
            grpc.StatusCode.FAILED_PRECONDITION,
        ),
        (lambda it: (it.cluster / "default_chat.yaml").unlink(), grpc.StatusCode.NOT_FOUND),
        (lambda it: it.declare_tier(metadata=", uid: new"), grpc.StatusCode.ABORTED),
    ],
    ids=["deleting", "gone", "made anew"],
)
def test_a_tier_that_goes_before_its_new_volume_is_on_record_has_no_volume_afterwards(
    serving: Kubelet, new_pod: Callable[..., Pod], change: Callable[[Kubelet], None], code: grpc.StatusCode
) -> None:
    """The controller released it, for it saw no volume: who is told that nothing is left must be right."""
    serving.declare_tier(metadata=", uid: old")
    pod = new_pod()
    serving.make_folders(pod)
    (serving.cluster / "hold").touch()
    call = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=60)
    serving.wait("it is provisioned", lambda: (serving.cluster / "recording").exists())
    change(serving)
    (serving.cluster / "hold").unlink()
    assert call.exception().code() is code
    assert nothing_left(serving)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda it: it.ClearField("volume_id"), "volume_id"),
        (lambda it: it.ClearField("target_path"), "target_path"),
        (lambda it: it.ClearField("volume_capability"), "volume_capability"),
        (lambda it: setattr(it, "target_path", "/etc"), "not a path of a pod's CSI volume"),
        (lambda it: setattr(it, "target_path", it.target_path.replace("/mount", "/../../mount")), "not a path"),
        (lambda it: setattr(it, "volume_id", "../../x"), "volume_id"),
        (lambda it: setattr(it, "readonly", True), "readOnly"),
        (lambda it: it.volume_capability.block.SetInParent(), "only mounted volumes"),
        (lambda it: setattr(it.volume_capability.mount, "fs_type", "xfs"), "fsType"),
        (lambda it: it.volume_capability.mount.mount_flags.append("exec"), "mount_flags"),
        (lambda it: it.secrets.update(key="value"), "nodePublishSecretRef"),
        (lambda it: it.volume_context.pop("csi.storage.k8s.io/ephemeral"), "only ephemeral inline volumes"),
        (lambda it: it.volume_context.pop("csi.storage.k8s.io/pod.uid"), "podInfoOnMount"),
        (lambda it: it.volume_context.update({"csi.storage.k8s.io/pod.uid": "other"}), "another pod's"),
        (lambda it: it.volume_context.update(sizePerRank="900Ti"), "volumeAttributes.sizePerRank"),
        (lambda it: it.volume_context.pop("tier"), "volumeAttributes.tier: missing"),
        (lambda it: it.volume_context.update(tier="../../x"), "no name of a KVCacheTier"),
    ],
)
def test_a_call_that_cannot_be_right_is_an_invalid_argument(
    argument_kubelet: Kubelet, change: Callable[[pb.NodePublishVolumeRequest], object], text: str
) -> None:
    """Among them those that csi-sanity makes of NodePublishVolume."""
    pod = Pod(uid="33333333-0000-4000-8000-444444444444", name="engine")
    request = argument_kubelet.publish_request(pod)
    change(request)
    with pytest.raises(grpc.RpcError) as caught:
        argument_kubelet.node.NodePublishVolume(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in str(caught.value.details())


def test_unpublish_and_stats_want_an_id_and_a_path(argument_kubelet: Kubelet) -> None:
    """csi-sanity: "should fail when no volume id is provided", "... no target path is provided"."""
    node = argument_kubelet.node
    for call, request in (
        (node.NodeUnpublishVolume, pb.NodeUnpublishVolumeRequest()),
        (node.NodeUnpublishVolume, pb.NodeUnpublishVolumeRequest(volume_id="csi-1")),
        (node.NodeUnpublishVolume, pb.NodeUnpublishVolumeRequest(volume_id="csi-1", target_path="/tmp")),
        (node.NodeGetVolumeStats, pb.NodeGetVolumeStatsRequest()),
        (node.NodeGetVolumeStats, pb.NodeGetVolumeStatsRequest(volume_id="csi-1")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_an_ephemeral_driver_has_not_is_unimplemented(argument_kubelet: Kubelet) -> None:
    node = argument_kubelet.node
    for call, request in (
        (node.NodeStageVolume, pb.NodeStageVolumeRequest(volume_id="csi-1")),
        (node.NodeUnstageVolume, pb.NodeUnstageVolumeRequest(volume_id="csi-1")),
        (node.NodeExpandVolume, pb.NodeExpandVolumeRequest(volume_id="csi-1")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    (capability,) = node.NodeGetCapabilities(pb.NodeGetCapabilitiesRequest(), timeout=60).capabilities
    assert capability.rpc.type == pb.NodeServiceCapability.RPC.GET_VOLUME_STATS
    info = node.NodeGetInfo(pb.NodeGetInfoRequest(), timeout=60)
    assert (info.node_id, info.max_volumes_per_node) == ("node-a", 0)
