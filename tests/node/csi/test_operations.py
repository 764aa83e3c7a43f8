"""Two calls at once, calls whose time is over, and calls that come again: what goes on, what is joined, what is told to wait."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import grpc
import pytest

from csi_agent import Kubelet, Pod
from kvtier_api.erasure import Trigger
from kvtier_api.errors import ForeignData, InvalidResource, KernelError, NotFound, NotPermitted
from kvtier_api.volume import VolumeState
from kvtier_node.csi.codes import NON_FINAL, BadCall, code_of
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.operations import wait_limit_s
from kvtier_node.ledger import Ledger
from kvtier_node.pods.consumer import PodConsumer

pytestmark = pytest.mark.root


def unpublish_request(kubelet: Kubelet, pod: Pod) -> pb.NodeUnpublishVolumeRequest:
    return pb.NodeUnpublishVolumeRequest(volume_id=pod.volume_id, target_path=str(kubelet.target(pod)))


def test_a_second_call_for_the_same_volume_is_told_that_one_is_pending(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """CSI specification, "operation pending for volume"."""
    pod, other = new_pod(), new_pod()
    serving.make_folders(pod)
    (serving.cluster / "hold").touch()
    first = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=100)
    serving.wait("the first is at work", lambda: (serving.cluster / "recording").exists())
    for call, request in (
        (serving.node.NodePublishVolume, serving.publish_request(pod)),
        (serving.node.NodeUnpublishVolume, unpublish_request(serving, pod)),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=100)
        assert caught.value.code() is grpc.StatusCode.ABORTED
    (serving.cluster / "hold").unlink()
    first.result()
    serving.publish(other)
    assert len(serving.in_use()) == 2


def test_what_a_call_began_goes_on_after_its_deadline_and_the_next_call_joins_it(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """kubelet gives a call two minutes (operators.md 3.3 rule 3)."""
    pod = new_pod()
    serving.make_folders(pod)
    (serving.cluster / "hold").touch()
    with pytest.raises(grpc.RpcError) as caught:
        serving.publish(pod, timeout_s=8)
    assert caught.value.code() is grpc.StatusCode.ABORTED, "an answer comes before the caller's own deadline"
    assert "it goes on" in str(caught.value.details())
    joined = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=100)
    (serving.cluster / "hold").unlink()
    joined.result()
    assert len(serving.rows()) == 1


def test_a_caller_that_hangs_up_leaves_its_volume_to_the_next_call(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.make_folders(pod)
    (serving.cluster / "hold").touch()
    call = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=100)
    serving.wait("it is at work", lambda: (serving.cluster / "recording").exists())
    call.cancel()
    (serving.cluster / "hold").unlink()
    serving.wait("it is published all the same", serving.in_use)
    serving.wait("a later call finds it", lambda: not _fails(lambda: serving.publish(pod)))
    assert len(serving.rows()) == 1


def _fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.ABORTED
        return True
    return False


def test_a_publish_that_comes_again_waits_for_the_guardian_and_shows_nothing_that_ended_meanwhile(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """Else it takes off what shuts the target, and mounts there what is erased at once, for whoever still has the pod's mounts."""
    pod = new_pod()
    serving.publish(pod)
    row = serving.row_of(pod)
    (serving.cluster / "late").touch()
    time.sleep(2)  # the guardian begins its turn, and does not end it
    again = serving.node.NodePublishVolume.future(serving.publish_request(pod), timeout=100)
    with pytest.raises(grpc.FutureTimeoutError):
        again.result(timeout=3)
    consumer = PodConsumer.from_record(row.consumer)
    assert consumer is not None
    with Ledger.open(serving.base / "state", create=False) as ledger:
        ledger.note(row.volume_id, consumer=consumer.with_end(Trigger.DELETION).record())
    subprocess.run(["umount", "-l", str(serving.target(pod))], check=True)
    (serving.cluster / "late").unlink()
    assert again.exception().code() is grpc.StatusCode.ABORTED
    assert str(serving.target(pod)) not in serving.mounts()


def test_two_unpublish_calls_at_once_erase_once(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """kubernetes#90752."""
    pod = new_pod()
    serving.publish(pod)
    calls = [serving.node.NodeUnpublishVolume.future(unpublish_request(serving, pod), timeout=100) for _ in range(4)]
    codes = {call.code() for call in calls}
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.ABORTED}
    assert grpc.StatusCode.OK in codes
    serving.unpublish_until_ok(pod)
    assert len(serving.receipts()) == 1


def test_unpublish_waits_for_who_still_has_a_slot_open_and_says_so(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """fscrypt: while a file is open the kernel keeps its key; nothing is claimed until it is gone."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    with (serving.target(pod) / "slots" / "slot.rank_0").open("rb"):
        with pytest.raises(grpc.RpcError) as caught:
            serving.unpublish(pod, timeout_s=12)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "INCOMPLETELY_REMOVED" in str(caught.value.details())
        assert serving.row_of(pod).state is VolumeState.ERASING
        assert str(serving.target(pod)) not in serving.mounts(), "the way to it is closed at once"
        with pytest.raises(grpc.RpcError) as caught:
            serving.publish(pod)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "INCOMPLETELY_REMOVED" in str(caught.value.details())
    serving.unpublish_until_ok(pod)
    assert serving.row_of(pod).state is VolumeState.ERASED
    serving.publish(pod)
    assert serving.row_of(pod).state is VolumeState.IN_USE


def test_a_call_answers_before_kubelet_gives_up() -> None:
    assert wait_limit_s(None) < 120
    assert wait_limit_s(120.0) < 116
    assert 0 < wait_limit_s(1.0) < 1
    assert wait_limit_s(0.0) > 0


def test_no_final_code_leaves_while_anything_is_left() -> None:
    """kubernetes#136591; the codes are those of kubelet's `isFinalError` (pkg/volume/csi, csi_client.go)."""
    for error in (
        NotFound("x"),
        NotPermitted("x"),
        ForeignData("x"),
        KernelError("x"),
        InvalidResource("x"),
        BadCall("x"),
    ):
        assert code_of(error, state_left=False) not in NON_FINAL
        assert code_of(error, state_left=True) in NON_FINAL
    assert {code.name for code in NON_FINAL} == {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "UNAVAILABLE",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
    }
