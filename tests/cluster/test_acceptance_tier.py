"""A tier's life on a real node, as a person sees it: declared by kubectl, used by a labelled pod, shown, taken away."""

from __future__ import annotations

import signal
import stat
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from installed import TIERS, VOLUMES, Installed, Use

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def use(installed: Installed) -> Iterator[Use]:
    with installed.use(plain=False) as use:
        yield use


def test_a_labelled_pod_gets_its_slot_files_and_what_was_measured_is_shown(use: Use) -> None:
    use.declare(salt={"policy": "Shared"})
    use.start()
    (volume,) = [it for it in use.refreshed()["spec"]["volumes"] if "csi" in it]
    assert volume["csi"]["volumeAttributes"] == {"tier": "chat"}, "injected: the pod said nothing but its label"
    start, written = use.said()
    assert start["files"] == ["slot.rank_0", "slot.rank_1"]
    assert written["uid"] == 1000
    found = use.look_up()
    assert found["spec"]["backend"] == "Fscrypt"
    assert found["spec"]["consumer"] == {"podName": "engine", "podUid": use.uid, "uid": 1000, "gid": 1000}
    slots = use.node.inside / f"var/lib/kvtier/tiers/{use.api.namespace}/{use.volume}/mnt/slots"
    for rank in range(2):
        info = (slots / f"slot.rank_{rank}").stat()
        assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode), info.st_size) == (1000, 1000, 0o600, 1 << 20)
    for kind, reason in (
        ("Provisioned", "Provisioned"),
        ("Encrypted", "KernelKeyMeasured"),
        ("Scrubbed", "NothingLeft"),
    ):
        use.wait(kind, lambda kind=kind, reason=reason: use.condition(kind) == ("True", reason))  # type: ignore[misc]
    status = use.api.get(TIERS, "chat")["status"]
    assert status["volumes"]["inUse"] == 1
    assert status["bytesPerRank"] == 1 << 20
    use.wait("the events say it", lambda: {"TierDeclared", "StoreCreated", "StoreInUse"} <= use.reasons())


def test_the_tier_becomes_ready_when_its_engine_seals(use: Use) -> None:
    use.declare(salt={"policy": "Shared"})
    use.start()
    use.wait("Ready", lambda: use.condition("Ready") == ("True", "AllGuaranteesHold"))


def test_a_pod_that_ends_in_order_is_erased_too(use: Use) -> None:
    use.declare()
    use.start()
    use.node.kubectl("-n", use.api.namespace, "delete", "pod", use.pod_name, "--wait=false")
    use.expect_erased("Exit", "Crash")


def test_the_finalizer_holds_a_tier_until_its_places_are_erased(use: Use, installed: Installed) -> None:
    use.declare()
    use.start()
    pid = installed.agent_pid()
    with ExitStack() as stack:
        installed.node.kill(pid, signal.SIGSTOP)
        stack.callback(installed.node.kill, pid, signal.SIGCONT)
        use.node.kubectl("-n", use.api.namespace, "delete", "kvct", "chat", "--wait=false")
        use.wait("the tier says that it waits", lambda: "DeletionWaits" in use.reasons())
        held = use.api.get(TIERS, "chat")
        assert held["metadata"]["finalizers"] == ["kvtier.dev/erase"]
        assert use.condition("Ready") == ("False", "Deleting")
    use.wait("the tier is gone", lambda: use.api.find(TIERS, "chat") is None, limit_s=180)
    use.expect_erased("Deletion")
    use.wait("the volume's object goes with it", lambda: use.api.find(VOLUMES, use.volume) is None)


def test_a_namespace_that_is_deleted_with_its_tier_in_use_goes_once_all_is_erased(use: Use) -> None:
    use.declare()
    use.start()
    use.api.delete("namespaces", use.api.namespace)
    use.wait("the namespace is gone", lambda: use.api.find("namespaces", use.api.namespace) is None, limit_s=240)
    (receipt,) = [it for it in use.receipts().values() if it["volume_id"] == use.volume]
    assert receipt["deadline_met"]
    hits = use.hits()
    assert (hits["prompt"], hits["plain"]) == (0, 0)


def found_by_the_next_container(use: Use) -> dict[str, int]:
    """What stands in the slots when the container starts anew in its pod, after SIGKILL."""
    use.declare()
    use.start()
    use.node.kill(use.container_pid())
    use.wait("the next container has written", lambda: use.has_written(times=2), limit_s=180)
    _, _, again, _ = use.said()
    found: dict[str, int] = again["found"]
    return found


def test_a_container_that_restarts_in_its_pod_reads_nothing_that_the_engine_sealed(installed: Installed) -> None:
    with installed.use(plain=False, restart="Always") as use:
        assert found_by_the_next_container(use)["prompt"] == 0


def test_a_container_that_restarts_in_its_pod_reads_nothing_that_was_written_in_the_clear(installed: Installed) -> None:
    with installed.use(plain=True, restart="Always") as use:
        assert found_by_the_next_container(use)["plain"] == 0


def test_without_an_agent_pods_wait_and_those_that_run_go_on(use: Use, installed: Installed) -> None:
    use.declare()
    use.start()
    with installed.without_agent(), installed.use() as other:
        other.declare()
        other.create()
        other.wait("kubelet says why", lambda: "FailedMount" in other.kubelets_reasons())
        assert not other.said()
        assert use.refreshed()["status"]["phase"] == "Running"
        installed.bring_agent_back()
        other.wait("the pod has written", other.has_written, limit_s=300)  # kubelet asks again after up to two minutes
    assert use.look_up()["status"]["state"] == "InUse"
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")
