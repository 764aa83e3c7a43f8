"""The agent is killed at each step of a publish and of an unpublish, and comes back; kubelet asks again, as it does.

What must hold then: the pod has its volume or can have one, nothing of an ended volume is readable, nothing is left mounted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

import grpc
import pytest

from csi_agent import CANARY, STEPS, Kubelet, Pod
from kvtier_api.volume import VolumeState
from kvtier_node.kernel.processes import boot_id
from kvtier_node.ledger import Ledger

pytestmark = pytest.mark.root

PUBLISH = ["before:provision", "after:provision", "after:start", "after:attach"]
UNPUBLISH = ["before:detach", "after:detach", "before:erase", "after:erase", "after:clean"]


def end_it(kubelet: Kubelet, pod: Pod) -> None:
    """kubelet's end of a pod, and what must be true then."""
    kubelet.unpublish_until_ok(pod)
    assert all(row.state is VolumeState.ERASED for row in kubelet.rows())
    assert kubelet.left_over() == []
    assert not kubelet.target(pod).exists()
    assert list(kubelet.images()) == []


@pytest.mark.parametrize("step", PUBLISH)
def test_sigkill_while_a_volume_is_published_and_the_next_publish_has_it(
    kubelet: Kubelet, new_pod: Callable[..., Pod], step: str
) -> None:
    pod = new_pod()
    kubelet.declare_tier()
    kubelet.start_agent(die=step)
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.publish(pod)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "kubelet takes this as 'perhaps mounted'"
    kubelet.died()
    kubelet.start_agent()
    living = [row for row in kubelet.rows() if not row.is_terminal]
    assert all(row.state is VolumeState.IN_USE for row in living), "recovery has finished every unfinished arrow"
    kubelet.publish(pod)
    kubelet.write_canary(pod)
    assert len(kubelet.in_use()) == 1
    end_it(kubelet, pod)


@pytest.mark.parametrize("step", UNPUBLISH)
def test_sigkill_while_a_volume_is_taken_back_and_it_is_erased_all_the_same(
    kubelet: Kubelet, new_pod: Callable[..., Pod], step: str
) -> None:
    pod = new_pod()
    kubelet.declare_tier()
    kubelet.start_agent()
    kubelet.publish(pod)
    kubelet.write_canary(pod)
    kubelet.stop_agent()
    kubelet.start_agent(die=step)
    with contextlib.suppress(grpc.RpcError):
        kubelet.unpublish(pod)
    kubelet.died()
    kubelet.start_agent()
    end_it(kubelet, pod)
    assert len(kubelet.receipts()) == 1


def test_every_step_that_can_die_is_tried() -> None:
    assert {step.partition(":")[2] for step in PUBLISH + UNPUBLISH} == set(STEPS)


def test_sigkill_between_publish_and_unpublish_keeps_the_volume_and_its_key(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """Mounts and keys survive the agent; a volume is adopted by evidence."""
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    key = serving.row_of(pod).key_id
    with (serving.target(pod) / "slots" / "slot.rank_0").open("r+b") as used:
        serving.stop_agent(signal.SIGKILL)
        used.write(CANARY[::-1])  # the engine goes on without an agent
        used.flush()
        serving.start_agent()
        assert serving.row_of(pod).state is VolumeState.IN_USE
        assert serving.row_of(pod).key_id == key
    end_it(serving, pod)


def test_after_a_reboot_the_same_id_gets_a_new_volume(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """kubernetes#119921, #127229: the pod is the same, its volume's keys are gone. Here only the record says another boot."""
    pod = new_pod()
    serving.publish(pod)
    first = serving.row_of(pod)
    serving.stop_agent(signal.SIGKILL)
    os.system(f"umount -l {serving.target(pod)}")
    with Ledger.open(serving.base / "state", create=False) as ledger:
        ledger.note(first.volume_id, boot_id="11111111-2222-3333-4444-555555555555")
    assert serving.target(pod).is_dir(), "a plain directory"
    serving.start_agent()
    with Ledger.open(serving.base / "state", create=False) as ledger:
        assert ledger.get(first.volume_id).state is VolumeState.ERASED
    serving.publish(pod)
    second = serving.row_of(pod)
    assert second.volume_id != first.volume_id
    assert second.boot_id == boot_id()
    end_it(serving, pod)


def test_an_agent_killed_at_any_moment_leaves_nothing_that_the_next_one_does_not_finish(
    kubelet: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """Moments at random; the seed is in the output."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    kubelet.declare_tier()
    for _ in range(int(os.environ.get("KVTIER_CSI_KILLS", "3"))):
        pod = new_pod()
        kubelet.make_folders(pod)
        kubelet.start_agent()
        calls = [kubelet.node.NodePublishVolume.future(kubelet.publish_request(pod), timeout=100)]
        time.sleep(chance.uniform(0, 2.0))
        kubelet.stop_agent(signal.SIGKILL)
        calls[0].cancel()
        kubelet.start_agent()
        end_it(kubelet, pod)
        kubelet.stop_agent()
