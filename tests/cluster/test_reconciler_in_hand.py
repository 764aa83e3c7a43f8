"""One reconciler in this process, with a memory that the test makes wrong, on a real API server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from api_client import Api, micro_now, node, tier, volume, volume_status
from controlplane import ControlPlane
from lightkube import KubeConfig

from kvtier_api.volume import VolumeState
from kvtier_operator.announcing import Announcement, Regarding
from kvtier_operator.event_poster import EventPoster, event_name
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import Body, Key, erasure_facts, node_facts, tier_facts, volume_facts
from kvtier_operator.fence import Fence
from kvtier_operator.kinds import VOLUMES
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.problems import ApiProblem, Conflict, Missing, NotLeading, Refused, RightMissing
from kvtier_operator.reconciling import Reconciler
from kvtier_operator.view import View


class Hand:
    """A reconciler, its memory and its fence."""

    def __init__(self, plane: ControlPlane) -> None:
        self.metrics = Metrics()
        self.fence = Fence()
        self.fence.open_until(time.monotonic() + 3600)
        self.kube = Kube(KubeConfig.from_file(plane.admin), self.metrics, self.fence)
        self.view = View(look_at_agents=False)
        self.others: list[Key] = []
        poster = EventPoster(self.kube, "hand", self.metrics)
        self.reconciler = Reconciler(self.kube, self.view, poster, self.metrics, look_at=self.others.append)


def in_hand(plane: ControlPlane, work: Callable[[Hand], Awaitable[None]]) -> None:
    async def scenario() -> None:
        hand = Hand(plane)
        try:
            await work(hand)
        finally:
            await hand.kube.close()

    asyncio.run(scenario())


def test_a_tier_is_not_released_because_memory_has_no_volume(api: Api, plane: ControlPlane) -> None:
    """The gap of a watch: a volume that no event told of. Only the last look at the API server can see it."""
    of = api.create("kvcachetiers", tier("t"))
    api.merge("kvcachetiers", "t", {"metadata": {"finalizers": ["kvtier.dev/erase"]}})
    api.create("kvcachevolumes", volume(of, "gone") | {"status": volume_status("InUse")})
    api.delete("kvcachetiers", "t")

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(api.get("kvcachetiers", "t")))
        await hand.reconciler.reconcile((api.namespace, "t"))
        assert len(hand.view.volumes((api.namespace, "t"))) == 1

    in_hand(plane, work)
    assert api.get("kvcachetiers", "t")["metadata"]["finalizers"] == ["kvtier.dev/erase"]


@pytest.mark.parametrize("how", ["released", "gone"])
def test_who_waited_for_a_tiers_path_is_looked_at_when_the_tier_goes(api: Api, plane: ControlPlane, how: str) -> None:
    """What goes by the controller's own write, or is found gone, is not in memory any more when its event comes."""
    old = api.create("kvcachetiers", tier("a-first", path="/srv/kv"))
    second = api.create("kvcachetiers", tier("b-second", path="/srv/kv/below"))
    if how == "released":
        old = api.merge("kvcachetiers", "a-first", {"metadata": {"finalizers": ["kvtier.dev/erase"]}})
    api.delete("kvcachetiers", "a-first")

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(second))
        hand.view.take(tier_facts(api.get("kvcachetiers", "a-first") if how == "released" else old))
        assert hand.view.path_taken_by((api.namespace, "b-second")) is not None
        await hand.reconciler.reconcile((api.namespace, "a-first"))
        assert hand.others == [(api.namespace, "b-second")]
        assert hand.view.path_taken_by((api.namespace, "b-second")) is None

    in_hand(plane, work)
    assert api.find("kvcachetiers", "a-first") is None


def test_an_old_memory_is_a_conflict_that_is_read_again(api: Api, plane: ControlPlane) -> None:
    old = api.create("kvcachetiers", tier("t"))
    api.merge("kvcachetiers", "t", {"spec": {"ranks": 7}})

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(old))
        await hand.reconciler.reconcile((api.namespace, "t"))

    in_hand(plane, work)
    found = api.get("kvcachetiers", "t")
    assert found["status"]["observedGeneration"] == 2
    assert found["metadata"]["finalizers"] == ["kvtier.dev/erase"]


def test_a_tier_made_anew_under_its_name_gets_nothing_that_was_decided_on_the_old_one(
    api: Api, plane: ControlPlane
) -> None:
    old = api.create("kvcachetiers", tier("t", governance={"owner": "old"}))
    api.delete("kvcachetiers", "t")
    new = api.create("kvcachetiers", tier("t"))

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(old))
        await hand.reconciler.reconcile((api.namespace, "t"))
        held = hand.view.tier((api.namespace, "t"))
        assert held is not None
        assert held.meta.uid == new["metadata"]["uid"]

    in_hand(plane, work)


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "not recorded"])
def test_a_request_ends_with_what_the_record_says_though_no_event_told_of_it_yet(
    api: Api, plane: ControlPlane, recorded: bool
) -> None:
    """The agent makes the record, then says `Erased`: two watches tell of them, and the second one may be the faster."""
    of = api.create("kvcachetiers", tier("t"))
    body = volume(of, "node-a")
    name = body["metadata"]["name"]
    api.create("kvcachevolumes", body | {"status": volume_status("InUse")})
    kind = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheErasure"}
    asked = {"tierRef": {"name": "t"}, "reason": "a test asks"}
    api.create("kvcacheerasures", {**kind, "metadata": {"name": "e"}, "spec": asked})
    if recorded:
        times = {"begin": micro_now(), "end": micro_now()}
        result = {"volumeId": name, "nodeName": "node-a", "technique": "KeyDestroyed", "verified": True, **times}
        meta = {"name": "kvr-1", "labels": {"kvtier.dev/volume": name}}
        status = {"state": "Complete", "volumes": [result], "end": times["end"]}
        api.create("kvcacheerasures", {**kind, "metadata": meta, "spec": asked, "status": status})
    erased = api.set_status("kvcachevolumes", name, volume_status("Erased"))

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(api.get("kvcachetiers", "t")))
        hand.view.take(volume_facts(erased))
        hand.view.take(erasure_facts(api.get("kvcacheerasures", "e")))
        while await hand.reconciler.reconcile((api.namespace, "t")) == 0.0:
            pass  # it is news: others have their turn, then it goes on

    in_hand(plane, work)
    found = api.get("kvcacheerasures", "e")["status"]
    assert found["state"] == "Complete"
    (one,) = found["volumes"]
    assert (one["technique"], one["verified"]) == (("KeyDestroyed", True) if recorded else ("AsReceipt", False))


@pytest.mark.parametrize("missing", ["volume", "tier and volume"])
def test_a_request_does_not_end_because_memory_lacks_what_is_to_be_erased(
    api: Api, plane: ControlPlane, missing: str
) -> None:
    """Watches of tiers, volumes and requests are three. The last word on a request is final, and no agent looks at it again."""
    of = api.create("kvcachetiers", tier("t"))
    api.create("kvcachevolumes", volume(of, "gone") | {"status": volume_status("InUse")})
    kind = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheErasure"}
    asked = {"tierRef": {"name": "t"}, "reason": "a test asks"}
    api.create("kvcacheerasures", {**kind, "metadata": {"name": "e"}, "spec": asked})

    async def work(hand: Hand) -> None:
        if missing == "volume":
            hand.view.take(tier_facts(of))
        hand.view.take(erasure_facts(api.get("kvcacheerasures", "e")))
        while await hand.reconciler.reconcile((api.namespace, "t")) == 0.0:
            pass
        assert len(hand.view.volumes((api.namespace, "t"))) == 1

    in_hand(plane, work)
    assert api.get("kvcacheerasures", "e")["status"]["state"] == "Pending"


def test_what_comes_to_memory_while_the_api_server_is_read_stays(api: Api, plane: ControlPlane) -> None:
    old = api.create("kvcachetiers", tier("t"))
    api.merge("kvcachetiers", "t", {"spec": {"ranks": 7}})
    bodies: list[Any] = []

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(old))
        listed = hand.kube.list

        async def list_while_one_is_made(kind: Any, *args: Any, **how: Any) -> AsyncIterator[Body]:
            found = [body async for body in listed(kind, *args, **how)]
            if kind is VOLUMES and not bodies:
                bodies.append(api.create("kvcachevolumes", volume(old, "gone") | {"status": volume_status("InUse")}))
                hand.view.take(volume_facts(bodies[0]))
            for body in found:
                yield body

        hand.kube.list = list_while_one_is_made  # type: ignore[method-assign]
        await hand.reconciler.reconcile((api.namespace, "t"))
        assert [it.name for it in hand.view.volumes((api.namespace, "t"))] == [bodies[0]["metadata"]["name"]]

    in_hand(plane, work)


def test_a_tier_made_anew_while_the_old_one_is_read_stays(api: Api, plane: ControlPlane) -> None:
    old = api.create("kvcachetiers", tier("t"))
    api.delete("kvcachetiers", "t")

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(old))
        get = hand.kube.get

        async def get_while_it_is_made(*args: Any, **how: Any) -> Body:
            try:
                return await get(*args, **how)
            except Missing:
                hand.view.take(tier_facts(api.create("kvcachetiers", tier("t"))))
                raise

        hand.kube.get = get_while_it_is_made  # type: ignore[method-assign]
        await hand.reconciler.reconcile((api.namespace, "t"))

    in_hand(plane, work)
    assert api.get("kvcachetiers", "t")["metadata"]["finalizers"] == ["kvtier.dev/erase"]


def test_a_tier_made_anew_while_the_old_one_is_released_stays(api: Api, plane: ControlPlane) -> None:
    api.create("kvcachetiers", tier("t"))
    api.merge("kvcachetiers", "t", {"metadata": {"finalizers": ["kvtier.dev/erase"]}})
    api.delete("kvcachetiers", "t")

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(api.get("kvcachetiers", "t")))
        merge = hand.kube.merge

        async def merge_and_make_anew(*args: Any, **how: Any) -> Body:
            answer = await merge(*args, **how)
            if not answer["metadata"].get("finalizers"):
                hand.view.take(tier_facts(api.create("kvcachetiers", tier("t"))))
            return answer

        hand.kube.merge = merge_and_make_anew  # type: ignore[method-assign]
        await hand.reconciler.reconcile((api.namespace, "t"))

    in_hand(plane, work)
    assert api.get("kvcachetiers", "t")["metadata"]["finalizers"] == ["kvtier.dev/erase"]


def test_a_closed_fence_lets_nothing_through(api: Api, plane: ControlPlane) -> None:
    made = api.create("kvcachetiers", tier("t"))

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(made))
        hand.fence.close()
        with pytest.raises(NotLeading):
            await hand.reconciler.reconcile((api.namespace, "t"))

    in_hand(plane, work)
    assert api.get("kvcachetiers", "t")["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]


def test_history_is_pruned_by_this_very_version_or_not_at_all(api: Api, plane: ControlPlane) -> None:
    of = api.create("kvcachetiers", tier("t"))
    erased = api.create("kvcachevolumes", volume(of, finalizer=False) | {"status": volume_status("Erased")})
    fact = volume_facts(erased)
    api.merge("kvcachevolumes", fact.name, {"metadata": {"annotations": {"kept": "yes"}}})

    async def work(hand: Hand) -> None:
        with pytest.raises(Conflict):
            await hand.kube.delete(VOLUMES, *fact.key, uid=fact.uid, version=fact.version)
        with pytest.raises(Conflict):
            newer = api.get("kvcachevolumes", fact.name)["metadata"]["resourceVersion"]
            await hand.kube.delete(VOLUMES, *fact.key, uid="another", version=newer)

    in_hand(plane, work)
    assert api.find("kvcachevolumes", fact.name) is not None


def test_the_history_limit_holds_for_volumes_and_records(api: Api, plane: ControlPlane) -> None:
    of = api.create("kvcachetiers", tier("t"))
    api.create("nodes", node(f"node-{api.namespace}"))
    bodies = [
        api.create("kvcachevolumes", volume(of, f"node-{api.namespace}") | {"status": volume_status("Erased")})
        for _ in range(4)
    ]

    async def work(hand: Hand) -> None:
        hand.reconciler._history_limit = 1
        for body in bodies:
            hand.view.take(volume_facts(body))
        hand.view.take(tier_facts(of))
        hand.view.take(node_facts(api.get("nodes", f"node-{api.namespace}")))
        await hand.reconciler.reconcile((api.namespace, "t"))

    in_hand(plane, work)
    assert [it["metadata"]["name"] for it in api.list("kvcachevolumes")] == [bodies[-1]["metadata"]["name"]]


def test_agents_that_report_faster_than_a_tier_comes_to_rest_are_no_failure(api: Api, plane: ControlPlane) -> None:
    """A failure waits longer each time: a roll-out of a large tier would be shown ever later."""
    name = f"node-{api.namespace}"
    of = api.create("kvcachetiers", tier("t"))
    api.create("nodes", node(name))
    fact = volume_facts(api.create("kvcachevolumes", volume(of, name) | {"status": volume_status("Ready")}))

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(of))
        hand.view.take(node_facts(api.get("nodes", name)))
        hand.view.take(fact)
        write, reports = hand.kube.apply_status, itertools.count(1)

        async def write_while_agents_report(kind: Any, body: Mapping[str, Any]) -> Body:
            answer = await write(kind, body)
            count = next(reports)
            state = VolumeState.IN_USE if count % 2 else VolumeState.READY
            if count <= 6:
                hand.view.take(replace(fact, version=str(int(fact.version) + count), state=state))
            return answer

        hand.kube.apply_status = write_while_agents_report  # type: ignore[method-assign]
        looks = 1
        while (again_in_s := await hand.reconciler.reconcile((api.namespace, "t"))) is not None:
            assert again_in_s == 0.0, "others have their turn, then it goes on"
            looks += 1
        assert looks == next(reports) - 1, "one write for all that came before it"

    in_hand(plane, work)
    assert api.get("kvcachetiers", "t")["status"]["volumes"]["ready"] == 1


def test_what_is_said_again_is_counted_by_one_request_and_never_lost(api: Api, plane: ControlPlane) -> None:
    """Also where somebody else wrote the event meanwhile, or it ran out."""
    about = Regarding("KVCacheTier", api.namespace, "t", "uid")
    announcement = Announcement(about, EventReason.TIER_READY, "said again and again")
    name = event_name(announcement)

    async def work(hand: Hand) -> None:
        poster = EventPoster(hand.kube, "hand", hand.metrics)

        def requests() -> float:
            return sum(
                sample.value
                for metric in hand.metrics.registry.collect()
                for sample in metric.samples
                if sample.name == "kvtier_api_requests_total"
            )

        await poster.post(announcement)
        before = requests()
        await poster.post(announcement)
        await poster.post(announcement)
        assert requests() - before == 2
        assert api.get("events", name)["series"]["count"] == 3
        await EventPoster(hand.kube, "another", hand.metrics).post(announcement)
        await poster.post(announcement)
        await poster.post(announcement)
        assert api.get("events", name)["series"]["count"] == 6
        await poster.post(announcement, again=True)
        assert api.get("events", name)["series"]["count"] == 6, "its answer was lost, and it was counted"
        api.delete("events", name)
        await poster.post(announcement)
        assert "series" not in api.get("events", name)

    in_hand(plane, work)


def test_a_record_of_lost_keys_is_made_though_the_api_server_does_not_know_the_role_yet(
    api: Api, plane: ControlPlane
) -> None:
    """One that has just started. Only a namespace that ends can have none: then the tier goes without."""
    of = api.create("kvcachetiers", tier("t"))
    api.merge("kvcachetiers", "t", {"metadata": {"finalizers": ["kvtier.dev/erase"]}})
    at = api.create("nodes", node(f"node-{api.namespace}", ready="False", boot_id="boot-2"))
    body = volume(of, at["metadata"]["name"])
    name = body["metadata"]["name"]
    api.create("kvcachevolumes", body | {"status": volume_status("InUse")})
    api.delete("kvcachetiers", "t")
    nobody = plane.kubeconfig("nobody")

    async def work(hand: Hand) -> None:
        hand.view.take(tier_facts(api.get("kvcachetiers", "t")))
        hand.view.take(volume_facts(api.get("kvcachevolumes", name)))
        hand.view.take(node_facts(at))
        starting, create = Kube(KubeConfig.from_file(nobody), hand.metrics, hand.fence), hand.kube.create
        try:
            hand.kube.create = starting.create  # type: ignore[method-assign]
            with pytest.raises(RightMissing):
                await hand.reconciler.reconcile((api.namespace, "t"))
        finally:
            await starting.close()
        assert api.find("kvcachetiers", "t") is not None
        hand.kube.create = create  # type: ignore[method-assign]
        while await hand.reconciler.reconcile((api.namespace, "t")) == 0.0:
            pass

    in_hand(plane, work)
    assert api.get("kvcacheerasures", f"{name}-keys-lost")["status"]["state"] == "Complete"
    assert api.find("kvcachetiers", "t") is None


def test_what_is_forbidden_is_said_as_refused(api: Api, plane: ControlPlane) -> None:
    nobody = plane.kubeconfig("nobody")

    async def work(hand: Hand) -> None:
        kube = Kube(KubeConfig.from_file(nobody), hand.metrics, hand.fence)
        try:
            with pytest.raises(Refused, match="nobody"):
                await kube.is_served(VOLUMES, api.namespace)
        finally:
            await kube.close()

    in_hand(plane, work)


def test_no_answer_is_a_problem_to_try_again(tmp_path_factory: pytest.TempPathFactory, plane: ControlPlane) -> None:
    text = plane.admin.read_text().replace(f":{plane.api_port}", ":1")
    nowhere = tmp_path_factory.mktemp("nowhere") / "config"
    nowhere.write_text(text)

    async def work(hand: Hand) -> None:
        kube = Kube(KubeConfig.from_file(nowhere), hand.metrics, hand.fence)
        try:
            with pytest.raises(ApiProblem, match="no answer"):
                await kube.is_served(VOLUMES)
        finally:
            await kube.close()

    in_hand(plane, work)
