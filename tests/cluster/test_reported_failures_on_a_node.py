"""Kinds of failure that others reported of the same parts, on a real node. The report is named in each.

Those that one host shows are in tests/node/test_reported_failures.py; an agent that disk pressure locks out is in
test_acceptance_faults.py.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from api_client import Json
from controlplane import wait_until
from installed import NAMESPACE, TIERS, VOLUMES, Installed, Use

from kvtier_node.kernel.loop import backing_paths
from node import Node

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def use(installed: Installed) -> Iterator[Use]:
    with installed.use() as use:
        use.declare()
        use.start()
        yield use


def mounts_on_the_host(use: Use) -> list[str]:
    """Where the volume is mounted, in the mount namespace of the node itself: its place, and the pod's target."""
    lines = (use.node.inside / "proc" / "1" / "mountinfo").read_text().splitlines()
    return sorted(
        line.split()[4] for line in lines if line.split()[4].endswith(f"/{use.volume}/mnt") or use.uid in line
    )


def slots_as_the_pod_has_them(use: Use) -> Path:
    env = use.refreshed()["spec"]["containers"][0]["env"]
    (path,) = [each["value"] for each in env if each["name"] == "KVTIER_SLOT_DIR"]
    return use.node.inside / "proc" / str(use.container_pid()) / "root" / path[1:]


def test_contrast_2455_a_volume_outlives_the_container_that_mounted_it(use: Use, installed: Installed) -> None:
    """edgelesssys/contrast#2455: what a container mounts dies with its mount namespace. Here the host has it, by Bidirectional."""
    mounts = mounts_on_the_host(use)
    assert [path for path in mounts if path.endswith(f"/{use.volume}/mnt")]
    slots = slots_as_the_pod_has_them(use)
    with installed.without_agent():
        assert mounts_on_the_host(use) == mounts
        (slots / "probe").write_bytes(use.texts["plain"])
        assert (slots / "slot.rank_0").stat().st_size == 1 << 20
    assert (slots / "probe").read_bytes() == use.texts["plain"]
    assert use.look_up()["status"]["state"] == "InUse"
    assert use.refreshed()["status"]["containerStatuses"][0]["restartCount"] == 0
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")


def loop_of(use: Use) -> Path:
    """The loop device that has the volume's image below, by file system and inode."""
    info = use.image.stat()
    for path in Path("/sys/block").glob("loop*/loop"):
        device = Path("/dev") / path.parent.name
        if Node.below(str(device)) == (info.st_dev, info.st_ino):
            return path
    raise AssertionError(f"no loop device of {use.image}")


@pytest.mark.parametrize("image", ["there", "without its name"])
def test_anolisa_2965_kubernetes_109132_a_device_whose_path_says_nothing_is_given_back(
    use: Use, installed: Installed, image: str
) -> None:
    """agentic-os-org/ANOLISA#2965, kubernetes#109132: after the agent's container was replaced its loop devices have paths of a
    mount namespace that is gone, or `(deleted)`. They are found by device and inode."""
    loop = loop_of(use)
    if image != "there":
        use.image.unlink()
    installed.restart_agent()
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")
    # Whoever lists the machine's loop devices has each open for a moment, and the kernel waits for it.
    wait_until("the device is free", lambda: use.volume not in backing_paths().get(loop.parent.name, ""))


def test_util_linux_3197_a_device_that_was_made_after_the_container_started_is_used(installed: Installed) -> None:
    """util-linux#3197: a container's `/dev` has the nodes of its start. The agent's is the host's, so a new one is there."""
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(all_loops_taken(installed.node.base / "taken"))
        use = stack.enter_context(installed.use())
        use.declare()
        use.start()
        device = f"/dev/{loop_of(use).parent.name}"
        assert device not in taken
        theirs = os.stat(installed.node.inside / "proc" / str(installed.agent_pid()) / "root" / device[1:])
        assert theirs.st_rdev == os.stat(device).st_rdev
        use.node.kill(use.container_pid())
        use.expect_erased("Crash")


@contextlib.contextmanager
def all_loops_taken(folder: Path) -> Iterator[set[str]]:
    """Every loop device that there is has a file below: the kernel makes a new one for the next."""
    folder.mkdir()
    taken = set()
    try:
        for number in range(64):
            found = subprocess.run(["losetup", "-f"], capture_output=True, text=True, check=True).stdout.strip()
            if not os.path.exists(found):
                break
            file = folder / str(number)
            file.write_bytes(bytes(1 << 16))
            if subprocess.run(["losetup", found, file], check=False).returncode == 0:  # else another was faster
                taken.add(found)
        yield taken
    finally:
        for device in taken:
            subprocess.run(["losetup", "-d", device], check=True)


def test_vllm_54002_51317_a_container_starts_again_though_the_old_one_left_its_region(installed: Installed) -> None:
    """vllm-project/vllm#54002, #51317: `/dev/shm/vllm_offload_*` outlives the container in its pod, and each new one fails on it.

    It is erased between the two; a container that is faster than that fails once, and not the one after it.
    """
    with installed.use(restart="Always", workload="vllm_region.py") as use:
        use.declare()
        use.start()
        for _ in range(2):
            use.wait("the agent has seen who has the region", lambda: region_is_held(use))
            before = use.container_pid()
            use.node.kill(before)
            wait_for_the_next(use, before)
        use.node.kubectl("-n", use.api.namespace, "delete", "pod", use.pod_name, "--wait=false")
        use.expect_erased("Crash", "Exit")


def wait_for_the_next(use: Use, pid: int) -> list[Json]:
    """What the container after that of `pid` said, once it has written."""
    use.wait("the next container has written", lambda: bool(use.said_by_the_next(pid)), limit_s=240)
    return use.said_by_the_next(pid)


def region_is_held(use: Use) -> bool:
    """The agent keeps a descriptor of the pod's /dev/shm from when it saw a region there with a process that has it."""
    inside = use.node.inside / "proc"
    theirs = (inside / str(use.container_pid()) / "root" / "dev" / "shm").stat()
    found = []
    for link in (inside / str(use.installed.agent_pid()) / "fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(link.stat())
    return any(os.path.samestat(theirs, info) for info in found)


# -- a restart of the machine


@dataclass
class Rebooted:
    """`stay` are pods that the node starts anew, with the pid of their first process; `forgotten` one that the API deleted while the node was down."""

    stay: list[tuple[Use, int]]
    forgotten: Use


@pytest.fixture(scope="module")
def rebooted(installation: Installed) -> Iterator[Rebooted]:
    """The machine went down at once with three pods, and came back: kubelet's directory is as it was, and nothing is mounted."""
    if installation.agent_pod() is None:
        installation.install()
    node = installation.node
    with contextlib.ExitStack() as stack:
        stay = [stack.enter_context(installation.use(restart="Always")) for _ in range(2)]
        forgotten = stack.enter_context(installation.use())
        for use in (*stay, forgotten):
            use.declare()
            use.create()
        for use in (*stay, forgotten):
            use.wait_started()
            use.look_up()
        pids = [use.container_pid() for use in stay]
        restarts = installation.agent_restarts()
        node.crash()
        where = ("-n", forgotten.api.namespace)
        node.kubectl(*where, "delete", "pod", forgotten.pod_name, "--force", "--grace-period=0")
        node.boot()
        installation.wait_agent(restarts=restarts + 1)
        yield Rebooted(list(zip(stay, pids, strict=True)), forgotten)


def test_kubernetes_92299_a_volume_that_kubelet_never_unpublishes_is_erased(rebooted: Rebooted) -> None:
    """kubernetes#92299: the pod is gone from the API when the node is back, so that nobody ever asks to take its volume away."""
    rebooted.forgotten.expect_erased("Crash", "Exit", "Reboot", told=frozenset())


def test_kubernetes_120853_a_target_that_is_an_empty_directory_by_now_is_taken_away(rebooted: Rebooted) -> None:
    """kubernetes#120853: after a restart kubelet unpublishes what is a plain, empty directory. It hears OK, and the pod goes."""
    use = rebooted.forgotten
    folder = use.node.base / "lib" / "kubelet" / "pods" / use.uid
    use.wait("kubelet has let go of the pod", lambda: not folder.exists(), limit_s=240)


def test_calico_9279_k8s_csi_s3_149_each_pod_is_given_its_own_volume_again(rebooted: Rebooted) -> None:
    """calico#9279, yandex-cloud/k8s-csi-s3#149: after a restart a pod finds another's directory, or a plain one of the node's disk."""
    for use, pid in rebooted.stay:
        before = use.volume
        again, written = wait_for_the_next(use, pid)
        assert again["files"] == ["slot.rank_0", "slot.rank_1"]
        assert set(again["found"].values()) == {0}
        assert written["volume"] != before
        use.expect_erased("Crash", "Reboot", told=frozenset())
        assert use.look_up()["metadata"]["name"] == written["volume"]
        assert written["volume"] not in [other.volume for other, _ in rebooted.stay if other is not use]


# -- the end of kvtier's own namespace


def test_kopf_75_a_tier_waits_when_kvtiers_namespace_is_deleted_first_and_ends_when_it_is_back(
    use: Use, installed: Installed
) -> None:
    """nolar/kopf#75: the operator is gone before what carries its finalizer. Nothing is released meanwhile; it ends with the next."""
    node = installed.node
    node.kubectl("delete", "namespace", NAMESPACE, "--timeout=240s")
    node.kubectl("-n", use.api.namespace, "delete", "kvct", "chat", "--wait=false")
    assert use.api.get(TIERS, "chat")["metadata"]["finalizers"] == ["kvtier.dev/erase"]
    assert (use.api.find(VOLUMES, use.volume) or {})["status"]["state"] == "InUse"
    assert mounts_on_the_host(use)
    assert use.refreshed()["status"]["phase"] == "Running"
    installed.install()
    use.wait("the tier is gone", lambda: use.api.find(TIERS, "chat") is None, limit_s=240)
    use.expect_erased("Deletion")
