"""A pod's blocks after a crash, on a real node: whatever is killed, the bytes are gone, proven, and everybody is told.

Each test: a pod that is labelled for a tier writes through the engine, and in the clear beside it; something is killed by
SIGKILL; the node recovers. Then `Use.expect_erased` holds: record, verified receipt, `Scrubbed=True`, events, and not one hit in
the backing image or in any file of kubelet's, of kvtier's or of the logs.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest
from controlplane import wait_until
from installed import Installed, Use

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def use(installed: Installed) -> Iterator[Use]:
    """A pod that has written, with what it wrote not to be found but where it was not kvtier's."""
    with installed.use() as use:
        use.declare()
        use.start()
        hits = use.hits()
        assert (hits["prompt"], hits["plain"]) == (0, 0)
        assert hits["control"] > 0, "the search itself finds nothing"
        yield use


def test_sigkill_of_the_container(use: Use) -> None:
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")


def test_sigkill_of_the_pods_sandbox(use: Use) -> None:
    use.node.kill(use.node.tasks()[use.node.sandbox(use.uid)])
    use.expect_erased("Crash", "Exit")  # kubelet then ends the container in order, by SIGTERM


def test_a_pod_deleted_by_force_and_at_once(use: Use) -> None:
    use.node.kubectl("-n", use.api.namespace, "delete", "pod", use.pod_name, "--force", "--grace-period=0")
    use.expect_erased("Crash", "Exit")


def test_sigkill_of_the_agent_ends_no_pod_and_the_volume_is_adopted(use: Use, installed: Installed) -> None:
    restarts = installed.agent_restarts()
    installed.node.kill(installed.agent_pid())
    installed.wait_agent(restarts=restarts + 1)
    assert use.look_up()["status"]["state"] == "InUse"
    assert use.refreshed()["status"]["containerStatuses"][0]["restartCount"] == 0
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")


def test_the_pod_ends_while_the_agent_is_dead(use: Use, installed: Installed) -> None:
    restarts = installed.agent_restarts()
    pid = use.container_pid()
    installed.node.kill(installed.agent_pid())
    installed.node.kill(pid)
    installed.wait_agent(restarts=restarts + 1)
    use.expect_erased("Crash")


def test_sigkill_of_kubelet_and_the_pod_ends_meanwhile(use: Use) -> None:
    pid = use.container_pid()
    use.node.kill_and_wait("kubelet")
    use.node.kill(pid)
    use.node.start_kubelet()
    use.node.wait_ready()
    use.expect_erased("Crash")


def test_sigkill_of_containerd_and_the_pod_ends_meanwhile(use: Use) -> None:
    pid = use.container_pid()
    use.node.kill_and_wait("containerd")
    use.node.kill(pid)
    use.node.start_containerd()
    use.node.wait_ready()
    use.expect_erased("Crash")


def test_sigkill_of_agent_kubelet_containerd_and_pod_at_once(use: Use, installed: Installed) -> None:
    restarts = installed.agent_restarts()
    mortal = [installed.agent_pid(), use.container_pid(), use.node.pids["kubelet"], use.node.pids["containerd"]]
    for pid in mortal:
        use.node.kill(pid)
    wait_until("both are gone", lambda: not {"kubelet", "containerd"} & set(use.node.pids))
    use.node.start_containerd()
    use.node.start_kubelet()
    use.node.wait_ready()
    installed.wait_agent(restarts=restarts + 1)
    use.expect_erased("Crash")


def test_the_machine_goes_down_at_once_and_comes_back(use: Use, installed: Installed) -> None:
    """Every process and mount of the node is gone, and `/run` is empty. The boot id is the same: it is the host's.

    The controller was on that node, and saw nothing of the erasure: the agent tells it.
    """
    restarts = installed.agent_restarts()
    use.node.crash()
    hits = use.hits()
    assert (hits["prompt"], hits["plain"]) == (0, 0), "at once, before anything recovers"
    use.node.boot()
    installed.wait_agent(restarts=restarts + 1)
    use.expect_erased("Crash", "Reboot")


def test_a_frozen_agent_keeps_a_new_pod_waiting(installed: Installed) -> None:
    """Fail closed: while nobody makes the volume, nothing of the pod runs; once somebody does, it does."""
    with installed.use() as use, contextlib.ExitStack() as stack:
        use.declare()
        pid = installed.agent_pid()
        installed.node.kill(pid, signal.SIGSTOP)
        stack.callback(_go_on, installed, pid)
        use.create()
        use.wait("the pod is on the node", lambda: bool(use.refreshed()["spec"].get("nodeName")))
        with pytest.raises(TimeoutError):
            wait_until("the pod runs", lambda: bool(use.said()), limit_s=5)
        stack.close()
        use.wait("the pod has written", use.has_written, limit_s=240)
        use.look_up()
        use.node.kill(use.container_pid())
        use.expect_erased("Crash")


def _go_on(installed: Installed, pid: int) -> None:
    installed.node.kill(pid, signal.SIGCONT)
