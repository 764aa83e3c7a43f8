"""What goes wrong around a node: an API server that is away, a node that is cut off, a disk that is full.

Each on a real node with kvtier as its chart installs it. The claim is the same in all: the node erases by itself and at once,
nothing is claimed that was not measured, and when the fault is over everybody is told.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_client import Json
from controlplane import wait_until
from installed import NAMESPACE, TIERS, VOLUMES, Installed, Use

from node import NODE

pytestmark = [pytest.mark.root, pytest.mark.slow]

AGENT = f"system:serviceaccount:{NAMESPACE}:kvtier-node"


@contextlib.contextmanager
def uses(installed: Installed, count: int) -> Iterator[list[Use]]:
    """Pods that have written, each of a tier and a namespace of its own."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(installed.use()) for _ in range(count)]
        for use in found:
            use.declare()
            use.create()
        for use in found:
            use.wait_started()
        yield found


def receipt_of(use: Use) -> Json | None:
    """The receipt of the volume in this node's own chain, which is verified as a whole; the API server is not asked."""
    return next((it for it in use.receipts().values() if it["volume_id"] == use.volume), None)


def wait_erased(use: Use) -> None:
    wait_until(f"{use.volume} is erased on the node", lambda: receipt_of(use) is not None, pause_s=0.5)


def told_of(use: Use) -> list[str]:
    """Records of erasures that the agent made, in their order, by the API server's own audit log."""
    done = use.node.plane.writes(AGENT, resources=("kvcacheerasures",))
    return [path.rsplit("/", 1)[1] for _, path, code in done if code == 201]


def test_an_api_server_that_is_away_delays_no_erasure_and_hears_of_each_once_and_in_order(installed: Installed) -> None:
    """First it answers nobody, for longer than the agent waits for an answer; then it is gone, and comes back as it was.

    A watch of the agent has no such limit: it goes on when the API server does, and is begun anew when its connection is lost.
    """
    plane = installed.node.plane
    with uses(installed, 3) as (frozen, *gone):
        pids = {use.volume: use.container_pid() for use in (frozen, *gone)}
        away = installed.agent_said("api-away")
        with plane.frozen("kube-apiserver"):
            installed.node.kill(pids[frozen.volume])
            wait_erased(frozen)
            wait_until("the agent waits no longer", lambda: news_of(installed, away))
        frozen.expect_erased("Crash")
        plane.stop("kube-apiserver", kill=True)
        try:
            for use in gone:
                installed.node.kill(pids[use.volume])
                wait_erased(use)
        finally:
            plane.start_apiserver()
        for use in gone:
            use.expect_erased("Crash")
        ours = {use.volume for use in (frozen, *gone)}
        chain = [receipt["id"] for receipt in gone[0].receipts().values() if receipt["volume_id"] in ours]
        assert [name for name in told_of(frozen) if name in chain] == chain
        installed.wait_agent()


def news_of(installed: Installed, before: list[Json]) -> bool:
    return any(line not in before for line in installed.agent_said("api-away"))


def test_a_node_that_is_cut_off_is_unknown_and_ends_what_was_asked_for_when_it_is_back(installed: Installed) -> None:
    """The controller still reaches the API server; kubelet and the agent do not. Nobody takes their silence for an end."""
    plane = installed.node.plane
    with uses(installed, 2) as (deleted, forced):
        agent = installed.agent_pod()
        assert agent is not None
        plane.stop("kube-controller-manager", kill=True)
        plane.start_controller_manager("--node-monitor-grace-period=12s", "--node-monitor-period=2s")
        try:
            with installed.node.cut_off(agent["status"]["podIP"]):
                deleted.node.kubectl("-n", deleted.api.namespace, "delete", "kvct", "chat", "--wait=false")
                forced.node.kubectl(
                    *("-n", forced.api.namespace, "delete", "pod", forced.pod_name, "--force", "--grace-period=0")
                )
                for use in (deleted, forced):
                    use.wait(
                        "it is Unknown", lambda use=use: use.condition("Scrubbed") == ("Unknown", "NodeUnreachable")
                    )  # type: ignore[misc]
                    assert use.look_up()["status"]["state"] == "InUse"
                    assert receipt_of(use) is None
                    assert use.record() is None
                assert deleted.api.get(TIERS, "chat")["metadata"]["finalizers"] == ["kvtier.dev/erase"]
                assert forced.api.get(TIERS, "chat")["status"]["volumes"]["inUse"] == 1, (
                    "a pod that the API forgot counts"
                )
        finally:
            plane.stop("kube-controller-manager", kill=True)
            plane.start_controller_manager()
        deleted.wait("the tier is gone", lambda: deleted.api.find(TIERS, "chat") is None, limit_s=240)
        deleted.expect_erased("Deletion")
        forced.expect_erased("Crash", "Exit")
        installed.node.wait_ready()


def test_a_watch_that_is_cut_off_learns_of_it(installed: Installed) -> None:
    """It only listens. Every connection of the agent to the API server has the kernel's timer that asks whether the other lives."""
    inside = ("nsenter", "-t", str(installed.agent_pid()), "-n")
    lines: list[str] = []

    def has_its_watches() -> bool:
        lines[:] = installed.node.run_inside(
            *inside, *("ss", "-tnHo", "state", "established", "dport", "=", ":443")
        ).splitlines()
        return len(lines) >= 2

    wait_until("its watches", has_its_watches)
    assert [line for line in lines if "timer:(keepalive" not in line and "timer:(on" not in line] == []


@pytest.fixture
def small_disk(installed: Installed) -> Iterator[Path]:
    """96 MiB for the ledger and for every tier."""
    installed.settle()
    with installed.disk_of_its_own(96 << 20) as disk:
        yield disk


def fill(disk: Path, *, but_bytes: int = 0) -> None:
    """Take all of it but this; without `but_bytes` not a block is left, root's reserve included."""
    with (disk / "ballast").open("ab") as file:
        info = os.statvfs(disk)
        size = info.f_bavail * info.f_frsize - but_bytes
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2
            else:
                if but_bytes:
                    return


def test_a_full_disk_refuses_a_new_volume_with_both_numbers_and_stops_no_erasure(
    small_disk: Path, installed: Installed
) -> None:
    """The ledger lies on the disk that is full."""
    with uses(installed, 1) as (use,), installed.use() as other:
        restarts = installed.agent_restarts()
        other.declare()
        fill(small_disk, but_bytes=2 << 20)
        other.create()
        other.wait("kubelet says why", lambda: both_numbers(other) is not None)
        needed, free = both_numbers(other) or (0, 0)
        assert needed > 2 << 20 >= free > 0
        assert not list((small_disk / "tiers" / other.api.namespace).iterdir()), "nothing half-done"
        assert other.api.list(VOLUMES) == []
        assert use.refreshed()["status"]["phase"] == "Running"
        fill(small_disk)
        assert os.statvfs(small_disk).f_bavail == 0
        use.node.kill(use.container_pid())
        use.expect_erased("Crash")
        assert installed.agent_restarts() == restarts


def both_numbers(use: Use) -> tuple[int, int] | None:
    """What is needed and what is free, as `kubectl describe pod` says it."""
    said = use.node.kubectl("-n", use.api.namespace, "describe", "pod", use.pod_name).stdout
    found = re.search(r"needs (\d+) bytes .*, (\d+) are free", said)
    return (int(found[1]), int(found[2])) if found else None


@pytest.fixture
def disk_pressure(installed: Installed) -> Iterator[Callable[[], None]]:
    """kubelet's own finding, by a limit that no disk meets, from the call on; with the taint that it leads to."""
    node = installed.node

    def tainted() -> bool:
        taints = json.loads(node.kubectl("get", "node", NODE, "-o", "json").stdout)["spec"].get("taints", [])
        return any(taint["key"] == "node.kubernetes.io/disk-pressure" for taint in taints)

    def begin() -> None:
        node.kill_and_wait("kubelet")
        node.start_kubelet(evictionHard={"nodefs.available": "99%"})
        node.wait_ready()
        wait_until("the taint", tainted)

    yield begin
    node.kill_and_wait("kubelet")
    node.start_kubelet()
    node.wait_ready()
    wait_until("the taint is gone", lambda: not tainted())


def test_disk_pressure_ends_pods_and_neither_evicts_the_agent_nor_keeps_a_new_one_out(
    installed: Installed, disk_pressure: Callable[[], None]
) -> None:
    """An agent that is locked out erases nothing, exactly when the disk is full."""
    with uses(installed, 1) as (use,):
        before = installed.agent_pod() or {}
        disk_pressure()
        use.expect_erased("Crash", "Exit")
        agent = installed.agent_pod() or {}
        assert agent["metadata"]["uid"] == before["metadata"]["uid"], "the agent stays"
        installed.node.kubectl("-n", NAMESPACE, "delete", "pod", agent["metadata"]["name"])
        wait_until("another agent's pod", lambda: installed.agent_pod() is not None)
        installed.wait_agent()
        assert (installed.agent_pod() or {})["metadata"]["uid"] != before["metadata"]["uid"]
