"""etcd set back to an older copy, and CRDs that come late: a control plane of this module's own, with a controller and an agent.

kvtier believes the node. What was erased and is back as InUse holds its tier until the node says again that it is erased.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import grpc
import pytest
from agents import ClusterKubelet, allow_agent, running_kubelet
from api_client import Api, Json, micro_now, node, tier, volume, volume_status
from controllers import Controller
from controlplane import TOOLS, ControlPlane, install_crds, need_tools, wait_until
from lightkube import KubeConfig

from csi_agent import NODE, Pod
from kvtier_operator.election import Election, Timing
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from requirements import need_root

TIERS, VOLUMES, ERASURES = "kvcachetiers", "kvcachevolumes", "kvcacheerasures"
FINALIZERS = ["kvtier.dev/erase"]
MEASURED = ("True", "KernelKeyMeasured")
LONG = Timing(duration_s=1000, fence_s=900.0, renew_s=0.5, retry_s=0.5)
"""Of a holder that would outlast the restore, if it did not see it."""


class Candidate:
    """Somebody who looks at a Lease of its own all through the restore, takes it, and holds it until it is lost."""

    def __init__(self, plane: ControlPlane, name: str) -> None:
        self.looks = 0
        self.holds = threading.Event()
        self.lost = threading.Event()
        self.went_back = threading.Event()
        self._stop = threading.Event()
        self._name = name
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(plane)), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _serve(self, plane: ControlPlane) -> None:
        work = asyncio.create_task(self._work(plane))
        while not (work.done() or self._stop.is_set()):
            await asyncio.wait({work}, timeout=0.1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _work(self, plane: ControlPlane) -> None:
        kube = Kube(KubeConfig.from_file(plane.admin), Metrics())
        options = {"namespace": "default", "name": self._name, "identity": "candidate"}
        election = Election(kube, timing=LONG, looked=self._looked, **options)
        try:
            fence = await election.acquire(went_back=self.went_back.set)
            self.holds.set()
            await election.hold(fence)
            self.lost.set()
        finally:
            await kube.close()

    def _looked(self) -> None:
        self.looks += 1


@dataclass
class World:
    """What there is before, between and after: tiers by hand on `node-h`, and the agent's on its own node."""

    plane: ControlPlane
    api: Api
    controller: Controller
    kubelet: ClusterKubelet | None
    pods: dict[str, Pod] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    holder: Candidate | None = None
    waiting: Candidate | None = None
    standby: Controller | None = None

    def install(self) -> None:
        """The CRDs, and a tier with a volume; once."""
        if "kept" not in self.names:
            install_crds(self.plane)
            self.api.create("nodes", node("node-h"))
            self.volume("kept", self.tier("keep"))

    def tier(self, name: str) -> Json:
        return self.api.create(TIERS, tier(name))

    def volume(self, name: str, of: Json, node_name: str = "node-h", boot_id: str = "boot-1") -> None:
        made = self.api.create(VOLUMES, volume(of, node_name) | {"status": volume_status("InUse", boot_id)})
        self.names[name] = made["metadata"]["name"]

    def erase(self, name: str) -> None:
        self.api.set_status(VOLUMES, self.names[name], volume_status("Erased"))

    def find(self, name: str) -> Json | None:
        return self.api.find(VOLUMES, self.names[name])

    def total(self, name: str) -> int | None:
        found: int | None = (self.api.get(TIERS, name).get("status") or {}).get("volumes", {}).get("total")
        return found

    def condition(self, plural: str, name: str, type_: str) -> Json:
        found = (self.api.get(plural, name).get("status") or {}).get("conditions", [])
        return next((it for it in found if it["type"] == type_), {"status": "", "reason": "", "message": ""})

    def said(self, plural: str, name: str, type_: str) -> tuple[str, str]:
        found = self.condition(plural, name, type_)
        return found["status"], found["reason"]

    def delete(self, name: str) -> None:
        self.api.delete(TIERS, name)
        wait_until("it is being deleted", lambda: self.said(TIERS, name, "Ready") == ("False", "Deleting"))

    def wait_gone(self, name: str) -> None:
        wait_until(f"tier {name} is gone", lambda: self.api.find(TIERS, name) is None)

    def events(self, reason: str, about: str) -> list[Json]:
        return [it for it in self.api.list("events") if it["reason"] == reason and about in it["note"]]

    def stop_plane(self) -> None:
        self.plane.stop("kube-apiserver")
        self.plane.stop("etcd")

    def start_plane(self) -> None:
        self.plane.start_etcd()
        self.plane.start_apiserver()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    need_tools(*TOOLS)
    with ExitStack() as stack:
        plane = stack.enter_context(ControlPlane(tmp_path_factory.mktemp("restored") / "run"))
        arguments = ("--agent-selector", "", "--resync", "5")
        controller = stack.enter_context(Controller(plane, "one", lease_namespace="default", arguments=arguments))
        api = Api(stack.enter_context(plane.http()), "default")
        yield World(plane, api, controller, None)


def test_without_its_crds_a_controller_waits_and_then_works(world: World) -> None:
    """They come one after the other, and it begins when the last one is served."""
    wait_until("waits for a CRD", lambda: bool(world.controller.said("waiting for a CRD")))
    assert world.controller.is_alive()
    world.install()
    wait_until("counted", lambda: world.total("keep") == 1)
    assert world.controller.said("term failed") == []


@pytest.fixture(scope="module")
def restored(world: World) -> Iterator[World]:
    """Begin, copy etcd, go on, and be set back to the copy, under a controller and an agent that run all the time."""
    with ExitStack() as stack:
        world.install()
        if os.geteuid() == 0:
            config = allow_agent(world.plane)
            world.api.set_status("nodes", NODE, {"conditions": [{"type": "Ready", "status": "True"}]})
            world.kubelet = stack.enter_context(running_kubelet(world.api, config))
        world.holder = Candidate(world.plane, "held")
        stack.callback(world.holder.stop)
        assert world.holder.holds.wait(120)
        world.api.create("leases", lease("somebody", "standing"))
        arguments = ("--agent-selector", "", "--lease-name", "standing")
        world.standby = Controller(world.plane, "standby", lease_namespace="default", arguments=arguments)
        stack.enter_context(world.standby)
        _begin(world)
        world.stop_plane()
        data, copy = world.plane.folder / "etcd", world.plane.folder / "etcd-copy"
        shutil.copytree(data, copy)
        world.start_plane()
        world.controller.wait_leads()
        world.api.merge("leases", "given-back", {"spec": {"holderIdentity": "somebody"}})
        world.api.merge("leases", "standing", {"spec": {"renewTime": micro_now()}})
        world.waiting = Candidate(world.plane, "given-back")
        stack.callback(world.waiting.stop)
        _go_on(world)
        assert not world.holder.lost.is_set()
        wait_until("looked", lambda: world.waiting is not None and world.waiting.looks > 1)
        looks, read = (
            'kvtier_api_requests_total{code="200",kind="Lease",verb="get"}',
            'kvtier_resyncs_total{result="first"}',
        )
        looked = world.standby.metric(looks)
        wait_until("looked", lambda: world.standby is not None and world.standby.metric(looks) > looked + 1)
        wait_until("read", lambda: world.standby is not None and world.standby.metric(read) >= 1)
        world.stop_plane()
        shutil.rmtree(data)
        copy.rename(data)
        world.start_plane()
        yield world


def lease(holder: str, name: str = "given-back") -> Json:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 3600, "renewTime": micro_now()}
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name},
        "spec": spec,
    }


def _begin(world: World) -> None:
    """What the copy has."""
    world.api.create("leases", lease(""))
    world.volume("erased later", world.api.get(TIERS, "keep"))
    world.volume("of gone", world.tier("gone"))
    world.volume("of going", world.tier("going"))
    wait_until("counted", lambda: (world.total("keep"), world.total("gone"), world.total("going")) == (2, 1, 1))
    world.delete("going")
    if world.kubelet is not None:
        world.kubelet.make_tier("chat")
        for name in ("erased", "running"):
            world.pods[name] = pod = world.kubelet.make_pod()
            world.kubelet.publish(pod)
            wait_until("InUse", lambda pod=pod: world.kubelet.state_of(pod) == "InUse")  # type: ignore[union-attr]


def _go_on(world: World) -> None:
    """What the copy does not have."""
    for name in ("erased later", "of gone", "of going"):
        world.erase(name)
    world.api.delete(TIERS, "gone")
    for name in ("gone", "going"):
        world.wait_gone(name)
    world.volume("made later", world.api.get(TIERS, "keep"))
    world.tier("later")
    wait_until("counted", lambda: world.total("keep") == 2)
    if world.kubelet is not None:
        world.kubelet.unpublish(world.pods["erased"])
        wait_until("Erased", lambda: world.kubelet.state_of(world.pods["erased"]) == "Erased")  # type: ignore[union-attr]
        world.pods["made later"] = pod = world.kubelet.make_pod()
        world.kubelet.publish(pod)


def test_a_lease_that_went_back_ends_the_term_of_its_holder(restored: World) -> None:
    """Its fence would be open for another minute; what it remembers is of objects that are not those any more."""
    assert restored.holder is not None
    assert restored.holder.lost.wait(120)


def test_a_lease_that_went_back_to_when_it_was_free_is_not_free(restored: World) -> None:
    """Its holder may not have noticed yet."""
    waiting = restored.waiting
    assert waiting is not None
    looks = waiting.looks
    wait_until("looked at it again", lambda: waiting.looks > looks + 3 or waiting.holds.is_set())
    assert restored.api.get("leases", "given-back")["spec"]["holderIdentity"] == ""
    assert not waiting.holds.is_set()
    assert waiting.went_back.is_set()


def test_a_replica_that_stands_by_reads_everything_anew(restored: World) -> None:
    """Versions of what it knew are newer than what there is: it would believe none of it."""
    standby = restored.standby
    assert standby is not None
    wait_until("reads again", lambda: bool(standby.said("memory is of another history; reading again")))
    assert standby.writes() == []
    assert not standby.leads()


def test_what_is_back_as_in_use_holds_its_tier_until_its_node_speaks(restored: World) -> None:
    """The controller alone: nothing is let go of because it was once seen erased, and what went is forgotten."""
    world = restored
    world.controller.wait_leads()
    wait_until("what the copy has", lambda: world.total("keep") == 2 and world.find("made later") is None)
    wait_until("memory is new", lambda: world.controller.metric("kvtier_tiers") == len(world.api.list(TIERS)))
    resyncs = world.controller.metric('kvtier_resyncs_total{result="done"}')
    wait_until("a resync", lambda: world.controller.metric('kvtier_resyncs_total{result="done"}') > resyncs)
    for name in ("gone", "going"):
        assert world.api.get(TIERS, name)["metadata"]["finalizers"] == FINALIZERS
        found = world.find(f"of {name}")
        assert found is not None
        assert (found["status"]["state"], found["metadata"]["finalizers"]) == ("InUse", FINALIZERS)
    assert world.api.find(TIERS, "later") is None
    failures = len(_failures(world))
    world.erase("of going")
    world.wait_gone("going")
    world.delete("gone")
    world.erase("of gone")
    world.wait_gone("gone")
    assert _failures(world)[failures:] == [], "no loop of errors"
    assert world.controller.process is not None
    assert world.controller.process.poll() is None


def _failures(world: World) -> list[str]:
    """Of reconciling, but for an API server that takes its time."""
    said = [str(it["error"]) for it in world.controller.said("reconcile failed")]
    return [error for error in said if "no answer from the API server" not in error]


@pytest.mark.root
def test_a_node_corrects_what_was_set_back(restored: World) -> None:
    """Its ledger is right, the API is a copy: erased again with its receipt and record, and on record again what runs."""
    need_root()
    world, kubelet = restored, restored.kubelet
    assert kubelet is not None
    for name, state in (("erased", "Erased"), ("running", "InUse"), ("made later", "InUse")):
        pod = world.pods[name]
        wait_until(f"{name}: {state}", lambda pod=pod, state=state: kubelet.state_of(pod) == state)
    found = kubelet.volume_of(world.pods["erased"]) or {}
    (receipt,) = kubelet.receipts()
    assert found["status"]["lastReceipt"]["hash"] == receipt.hash()
    wait_until("its record", lambda: [it["metadata"]["name"] for it in kubelet.records()] == [receipt.id])
    wait_until("counted", lambda: world.total("chat") == 2)
    world.api.delete(TIERS, "chat")
    world.wait_gone("chat")
    assert len(kubelet.receipts()) == 3
    for pod in world.pods.values():
        kubelet.unpublish(pod)


@pytest.mark.root
def test_a_volume_that_its_nodes_ledger_does_not_have_is_told_with_the_remedy(restored: World) -> None:
    """Its node is heard, and knows nothing: not claimed any more, still counted, ended by a person's word alone."""
    need_root()
    world, kubelet = restored, restored.kubelet
    assert kubelet is not None
    boot_id = world.api.get("nodes", NODE)["status"]["nodeInfo"]["bootID"]  # no reboot proves anything of it
    world.volume("stranger", world.tier("strange"), NODE, boot_id)
    name = world.names["stranger"]
    # It is believed, until the agent compares: after a list, which it makes when it starts, or when a watch has ended.
    wait_until("counted", lambda: world.said(TIERS, "strange", "Encrypted") in (MEASURED, ("Unknown", "NotInLedger")))
    kubelet.stop_agent(signal.SIGTERM)
    kubelet.start_agent()
    wait_until("told", lambda: world.said(VOLUMES, name, "Scrubbed") == ("Unknown", "NotInLedger"))
    for type_ in ("Scrubbed", "Encrypted", "Provisioned"):
        wait_until(type_, lambda type_=type_: world.said(TIERS, "strange", type_) == ("Unknown", "NotInLedger"))
    assert world.api.get(VOLUMES, name)["status"]["state"] == "InUse"
    wait_until("the event", lambda: len(world.events("NotInLedger", name)) == 1)
    assert f"kubectl annotate kvcv {name}" in world.events("NotInLedger", name)[0]["note"]
    world.delete("strange")
    assert world.api.get(TIERS, "strange")["metadata"]["finalizers"] == FINALIZERS
    world.api.merge(VOLUMES, name, {"metadata": {"annotations": {"kvtier.dev/abandon": "re-imaged, ticket 9"}}})
    world.wait_gone("strange")
    assert world.api.get(VOLUMES, name)["status"]["state"] == "Abandoned"


@pytest.mark.root
def test_erasures_that_no_controller_saw_are_told_once_and_so_are_their_deadlines(restored: World) -> None:
    """One agent that goes on, and one that is killed while it cannot erase, and again when it did."""
    need_root()
    world, kubelet = restored, restored.kubelet
    assert kubelet is not None
    kubelet.make_tier("late", scrub={"deadline": "1s"})
    pods = [kubelet.make_pod(tier="late") for _ in range(2)]
    for pod in pods:
        kubelet.publish(pod)
        wait_until("InUse", lambda pod=pod: kubelet.state_of(pod) == "InUse")
    world.controller.stop()
    names = [kubelet.row_of(pod).volume_id for pod in pods]
    for pod, name, killed in zip(pods, names, (False, True), strict=True):
        with (kubelet.target(pod) / "slots" / "slot.rank_0").open("rb"):
            with pytest.raises(grpc.RpcError):
                kubelet.unpublish(pod, timeout_s=3)
            wait_until("told", lambda name=name: len(world.events("DeadlineMissed", name)) == 1)
            wait_until(
                "and shown", lambda name=name: world.said(VOLUMES, name, "Scrubbed") == ("False", "DeadlineMissed")
            )
            if killed:
                kubelet.stop_agent(signal.SIGKILL)
                kubelet.start_agent()
        wait_until("Erased", lambda pod=pod: kubelet.state_of(pod) == "Erased")
        wait_until("told", lambda name=name: len(world.events("Erased", name)) == 1)
    kubelet.stop_agent(signal.SIGKILL)
    kubelet.start_agent()
    for pod in pods:
        kubelet.unpublish(pod)
    world.controller.start()
    world.controller.wait_leads()
    wait_until("nothing is left", lambda: world.said(TIERS, "late", "Scrubbed") == ("True", "NothingLeft"))
    for name in names:
        wait_until("it is shown", lambda name=name: world.said(VOLUMES, name, "Scrubbed") == ("True", "NothingLeft"))
        for reason in ("Erased", "DeadlineMissed"):
            (found,) = world.events(reason, name)
            assert "series" not in found
            assert found["regarding"]["kind"] == "KVCacheTier"
            assert found["reportingController"] == "kvtier.dev/node"
    (record,) = [it for it in kubelet.records() if it["metadata"]["labels"]["kvtier.dev/volume"] == names[0]]
    assert record["status"]["volumes"][0]["deadlineMet"] is False
    assert record["metadata"]["name"] in world.condition(VOLUMES, names[0], "Scrubbed")["message"]
