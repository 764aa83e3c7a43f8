"""A pod's volume that somebody unmounted: erased on the kernel's word, for an unpublish that may never come."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from csi_agent import Kubelet, Pod
from kvtier_api.erasure import Trigger
from kvtier_api.volume import VolumeState
from kvtier_node.ledger import Ledger
from unmounting import unmount_everywhere

pytestmark = pytest.mark.root


def state(kubelet: Kubelet, pod: Pod) -> VolumeState:
    return kubelet.row_of(pod).state


@pytest.mark.parametrize("agent", ["runs", "was down"])
def test_nothing_is_mounted_and_nothing_open_so_it_is_erased_without_an_unpublish(
    serving: Kubelet, new_pod: Callable[..., Pod], agent: str
) -> None:
    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    if agent == "was down":
        serving.stop_agent()
    unmount_everywhere(serving.target(pod))
    if agent == "was down":
        serving.start_agent()
    serving.wait("the erasure", lambda: state(serving, pod) is VolumeState.ERASED)
    [receipt] = serving.receipts()
    assert receipt.trigger is Trigger.CRASH
    with pytest.raises(OSError, match="Read-only"):  # what the pod's next container would find: not kubelet's disk
        os.open(serving.target(pod) / "file", os.O_CREAT | os.O_WRONLY)
    serving.unpublish(pod)
    assert not serving.target(pod).exists()
    assert not serving.left_over()


def test_a_container_that_has_a_slot_open_keeps_it_and_its_end_erases_it(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    fd = os.open(serving.target(pod) / "slots" / "slot.rank_0", os.O_RDWR)
    try:
        unmount_everywhere(serving.target(pod))
        missing = (serving.base / "agent.log").read_text().count("cannot-erase-yet")
        other = new_pod()
        serving.publish(other)  # the agent goes on, and has looked at both
        serving.unpublish(other)
        assert state(serving, pod) is VolumeState.IN_USE
        os.pwrite(fd, b"it goes on", 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    serving.wait("the erasure", lambda: state(serving, pod) is VolumeState.ERASED)
    assert (serving.base / "agent.log").read_text().count("cannot-erase-yet") == missing
    serving.unpublish(pod)


def test_a_request_ends_who_has_a_slot_open_though_the_mount_is_gone_from_its_place(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """As when an erasure took the mount off, and a container that was just starting opened a slot in its own namespace."""
    pod = new_pod()
    serving.publish(pod)
    slot = serving.target(pod) / "slots" / "slot.rank_0"
    holder = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 3<>"$0"; echo open; exec sleep 600', str(slot)], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        unmount_everywhere(serving.target(pod))
        with Ledger.open(serving.base / "state", create=False) as ledger:
            ledger.add_request("default/chat", "All", "customer left")
        assert holder.wait(60) == -signal.SIGTERM
    finally:
        holder.kill()
        holder.wait()
    serving.wait("the erasure", lambda: state(serving, pod) is VolumeState.ERASED)
    assert serving.receipts()[0].trigger is Trigger.REQUEST
    serving.unpublish(pod)
    assert not serving.left_over()


def test_a_target_that_is_mounted_still_keeps_it_until_unpublish(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """Only the mount at the place was taken off: the pod goes on."""
    pod = new_pod()
    serving.publish(pod)
    os.system(f"umount -l {serving.row_of(pod).place}/mnt")
    other = new_pod()
    serving.publish(other)
    serving.unpublish(other)
    serving.write_canary(pod)
    assert state(serving, pod) is VolumeState.IN_USE
    assert "cannot-erase-yet" not in (serving.base / "agent.log").read_text()
    serving.unpublish(pod)
    assert state(serving, pod) is VolumeState.ERASED
