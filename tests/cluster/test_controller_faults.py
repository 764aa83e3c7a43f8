"""The controller through a bad network and a sick API server: it converges, does nothing twice, and loses nothing.

A real process, a real API server, and between them a proxy that refuses, cuts, holds and silences.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from api_client import Api, Json, node, tier, volume, volume_status
from controlplane import ControlPlane, wait_until
from faulty_proxy import GONE, Behind, FaultyProxy
from lightkube import KubeConfig

from kvtier_operator.election import Election, Timing
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics

TIERS, VOLUMES, ERASURES = "kvcachetiers", "kvcachevolumes", "kvcacheerasures"


@dataclass
class Line:
    """One tier, `name`, and a controller whose way to the API server leads through a proxy."""

    api: Api
    proxy: FaultyProxy
    controller: Behind
    name: str = field(default_factory=lambda: f"t-{secrets.token_hex(4)}")
    volumes: list[str] = field(default_factory=list)

    @property
    def node(self) -> str:
        return f"node-{self.name}"

    def tier(self, **spec: object) -> Json:
        self.api.create("nodes", node(self.node))
        return self.api.create(TIERS, tier(self.name, **spec))

    def volume(self, of: Json, state: str = "InUse") -> str:
        made = self.api.create(VOLUMES, volume(of, self.node) | {"status": volume_status(state)})
        self.volumes.append(made["metadata"]["name"])
        return self.volumes[-1]

    def erase(self, name: str) -> None:
        self.api.set_status(VOLUMES, name, volume_status("Erased"))

    def delete(self) -> None:
        """The tier, and wait until the controller saw it."""
        self.api.delete(TIERS, self.name)
        self.wait_ready("False", "Deleting")

    def status(self) -> Json:
        found: Json = self.api.get(TIERS, self.name).get("status") or {}
        return found

    def condition(self, type_: str) -> tuple[str, str]:
        found = self.status().get("conditions", [])
        return next(((it["status"], it["reason"]) for it in found if it["type"] == type_), ("", ""))

    def ready(self) -> tuple[str, str]:
        return self.condition("Ready")

    def wait_ready(self, status: str = "True", reason: str = "AllGuaranteesHold") -> None:
        wait_until(f"Ready={status} {reason}", lambda: self.ready() == (status, reason))

    def wait_gone(self) -> None:
        wait_until("the tier is gone", lambda: self.api.find(TIERS, self.name) is None)

    def wait_kopf_alone(self) -> None:
        """The watches of the time before its turn end with the first full list."""
        resyncs = 'kvtier_resyncs_total{result="done"}'
        before = self.controller.metric(resyncs)
        wait_until("a full list", lambda: self.controller.metric(resyncs) > before)

    def total(self) -> int | None:
        found: int | None = self.status().get("volumes", {}).get("total")
        return found

    def is_held(self) -> bool:
        return self.api.get(TIERS, self.name)["metadata"].get("finalizers") == ["kvtier.dev/erase"]

    def events(self, reason: str) -> list[Json]:
        mine = {self.name, *self.volumes}
        return [it for it in self.api.list("events") if it["reason"] == reason and it["regarding"]["name"] in mine]

    def told_once(self, *reasons: str) -> None:
        for reason in reasons:
            wait_until(f"event {reason}", lambda reason=reason: bool(self.events(reason)))
            (found,) = self.events(reason)
            assert "series" not in found, f"{reason} is told once"

    def done(self, verb: str, path: str) -> list[tuple[str, str, int]]:
        """Writes that the API server carried out."""
        return [it for it in self.controller.writes() if it[0] == verb and it[2] < 400 and path in it[1]]


@contextlib.contextmanager
def behind_a_proxy(plane: ControlPlane, namespace: str) -> Iterator[Behind]:
    name = f"f{secrets.token_hex(3)}"
    arguments = ("--agent-selector", "", "--resync", "5")
    where = {"lease_namespace": namespace, "namespaces": (namespace,)}
    with (
        FaultyProxy(plane, f"controller-{name}") as proxy,
        Behind(plane, name, proxy, arguments=arguments, **where) as controller,
    ):
        yield controller


@pytest.fixture(scope="module")
def leader(plane: ControlPlane) -> Iterator[Behind]:
    """One replica for all tests: what one does to it must not keep the next from passing."""
    with plane.http() as client:
        namespace = f"t-{secrets.token_hex(4)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        Api(client, namespace).create("namespaces", body)
    with behind_a_proxy(plane, namespace) as controller:
        yield controller
        assert controller.is_alive()


@pytest.fixture
def line(plane: ControlPlane, leader: Behind) -> Iterator[Line]:
    leader.wait_leads()
    with plane.http() as client:
        yield Line(Api(client, leader.namespace), leader.proxy, leader)
    leader.proxy.heal()


def test_refused_as_conflicts_the_writes_are_decided_anew_and_done_once(line: Line) -> None:
    on_tier = line.proxy.answer("PATCH", rf"/kvcachetiers/{line.name}(/status)?\?", 409, times=7)
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    assert on_tier.hits == 7
    line.delete()
    on_tier = line.proxy.answer("PATCH", rf"/kvcachetiers/{line.name}(/status)?\?", 409, times=7)
    line.erase(name)
    line.wait_gone()
    assert on_tier.hits == 7
    line.told_once("TierDeclared", "TierReady", "DeletionDone")


@pytest.mark.parametrize("how", ["in the stream", "as the answer"])
def test_410_gone_and_what_vanished_in_the_gap(line: Line, how: str) -> None:
    """After the gap kopf lists anew, and does not compare: only the resync sees what is not there any more."""
    of = line.tier()
    gone, _ = line.volume(of), line.volume(of)
    wait_until("2 counted", lambda: line.total() == 2)
    line.wait_kopf_alone()
    wait_until("watches run", lambda: line.proxy.watches("kvcachevolumes") == 1)
    silence = line.proxy.mute("kvcachevolumes")
    line.api.delete(VOLUMES, gone)  # first: one that is not deleted is given its finalizer back
    line.api.merge(VOLUMES, gone, {"metadata": {"finalizers": None}})
    refusal = line.proxy.answer("GET", r"kvcachevolumes.*watch=true", 410, times=1) if how == "as the answer" else None
    assert line.proxy.end_watches("kvcachevolumes", b"" if refusal else GONE) == 1
    silence.over()
    wait_until("1 counted", lambda: line.total() == 1)
    wait_until("it asked again", lambda: refusal is None or refusal.hits == 1)
    line.volume(of)
    wait_until("2 counted again", lambda: line.total() == 2)
    assert line.controller.process is not None
    assert line.controller.process.poll() is None


def test_a_watch_that_goes_silent_is_not_believed(line: Line) -> None:
    """Open connections, no bytes: what changed meanwhile is found by the full list, and counted as drift."""
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    line.wait_kopf_alone()
    wait_until("watches run", lambda: line.proxy.watches("kvtier.dev") == 3)
    silence = line.proxy.mute("watch=true")
    before = line.controller.metric("kvtier_resync_drift_total")
    line.delete()
    line.erase(name)
    line.wait_gone()
    assert silence.hits >= 2
    assert line.proxy.watches("kvtier.dev") == 3, "the same watches, still open"
    assert line.controller.metric("kvtier_resync_drift_total") > before
    line.told_once("DeletionDone")


def test_429_is_obeyed_for_as_long_as_it_says(line: Line) -> None:
    refusal = line.proxy.answer("PATCH", rf"/kvcachetiers/{line.name}/status\?", 429, times=3, Retry_After="3")
    of = line.tier()
    wait_until("refused once", lambda: refusal.hits >= 1)
    line.volume(of)  # news of the tier do not shorten the wait
    line.wait_ready()
    assert refusal.hits == 3
    tried = [it for it in line.proxy.requests if f"/kvcachetiers/{line.name}/status" in it.path]
    gaps_s = [later.at_s - earlier.at_s for earlier, later in itertools.pairwise(tried) if earlier.code == 429]
    assert min(gaps_s) >= 3
    line.told_once("TierDeclared")


@pytest.mark.parametrize("code", [500, 503])
def test_an_api_server_that_only_fails_ends_the_term_and_not_the_process(line: Line, code: int) -> None:
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    line.told_once("TierReady")
    sick = line.proxy.answer("*", ".", code)
    line.api.delete(TIERS, line.name)
    line.erase(name)
    wait_until("the term ended", lambda: not line.controller.leads())
    assert line.is_held()
    assert sick.hits > 0
    sick.over()
    line.wait_gone()
    line.told_once("TierDeclared", "DeletionDone")
    assert line.controller.process is not None
    assert line.controller.process.poll() is None


def test_events_that_are_refused_for_a_while_are_told_later_and_once(line: Line) -> None:
    sick = line.proxy.answer("POST", "/events", 503, times=4)
    line.volume(line.tier())
    line.wait_ready()
    wait_until("struck", lambda: sick.hits == 4)
    line.told_once("TierDeclared", "StoreCreated", "StoreInUse", "TierReady")


def test_writes_whose_answer_is_lost_are_done_once(line: Line) -> None:
    """The connection is reset after the API server did it, for each write of a tier's life."""
    cuts = {
        what: line.proxy.cut(method, path)
        for what, method, path in (
            ("hold", "PATCH", rf"/kvcachetiers/{line.name}\?"),
            ("status", "PATCH", rf"/kvcachetiers/{line.name}/status\?"),
            ("event", "POST", "/events"),
        )
    }
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    line.told_once("TierDeclared", "TierReady", "StoreCreated")
    line.api.set_status("nodes", line.node, {"conditions": [{"type": "Ready", "status": "False"}]})
    line.wait_ready("Unknown", "GuaranteeNotMet")
    cuts |= {
        what: line.proxy.cut(method, path)
        for what, method, path in (
            ("record", "POST", "/kvcacheerasures"),
            ("record's status", "PATCH", r"/kvcacheerasures/.*/status\?"),
            ("release of the volume", "PATCH", rf"/kvcachevolumes/{name}\?"),
            ("release of the tier", "PATCH", rf"/kvcachetiers/{line.name}\?"),
        )
    }
    line.api.delete(TIERS, line.name)
    line.api.delete(VOLUMES, name)
    line.wait_ready("False", "Deleting")
    line.api.set_status("nodes", line.node, {"nodeInfo": {"bootID": "boot-2"}})
    line.wait_gone()
    wait_until("the volume is gone", lambda: line.api.find(VOLUMES, name) is None)
    assert {what: cut.hits for what, cut in cuts.items()} == dict.fromkeys(cuts, 1)
    line.told_once("KeysLost", "DeletionDone")
    (record,) = [it for it in line.api.list(ERASURES) if it["spec"]["tierRef"]["name"] == line.name]
    assert record["metadata"]["name"] == f"{name}-keys-lost"
    assert record["status"]["state"] == "Complete"
    assert len(line.done("create", ERASURES)) == 1, "asked twice, made once"


def test_an_api_server_that_hangs_during_a_deletion_that_waits(line: Line, plane: ControlPlane) -> None:
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    line.delete()
    line.told_once("DeletionWaits")
    with plane.frozen("kube-apiserver"):
        wait_until("the term ended", lambda: not line.controller.leads())
    wait_until("the API server answers", lambda: line.api.find(TIERS, line.name) is not None)
    assert line.is_held()
    line.erase(name)
    line.wait_gone()
    line.told_once("DeletionWaits", "DeletionDone")


def test_a_write_that_was_on_its_way_while_another_took_over_comes_too_late(line: Line, plane: ControlPlane) -> None:
    """The leader is stopped in the middle of a step, and its request arrives after the next leader did that step."""
    of = line.tier()
    name = line.volume(of)
    line.wait_ready()
    line.delete()
    line.told_once("DeletionWaits")
    late = line.proxy.hold("PATCH", rf"/kvcachetiers/{line.name}/status\?")
    second = line.volume(of)
    assert late.held.wait(120)
    line.controller.pause()
    with behind_a_proxy(plane, line.api.namespace) as other:
        other.wait_leads()
        wait_until("the other did it", lambda: line.total() == 2)
        before = [it for it in line.controller.writes() if it[2] < 400]
        late.over()
        wait_until("it came, and late", lambda: line.controller.writes(TIERS)[-1][2] == 409)
        line.controller.go_on()
        wait_until("the first stands by", lambda: not line.controller.leads())
        line.erase(name)
        line.erase(second)
        line.wait_gone()
        line.told_once("DeletionDone")  # by who did it, while it is there
        assert [it for it in line.controller.writes() if it[2] < 400] == before
        other.wait_leads()


def test_a_leader_killed_between_a_status_and_its_event_leaves_the_event_to_the_next(
    plane: ControlPlane, api: Api
) -> None:
    with behind_a_proxy(plane, api.namespace) as first:
        first.wait_leads()
        line = Line(api, first.proxy, first)
        unsent = first.proxy.hold("POST", "/events")
        line.tier()
        line.wait_ready("Unknown", "NoVolumes")
        assert unsent.held.wait(120)
        assert line.events("TierDeclared") == []
        first.stop(kill=True)
    with behind_a_proxy(plane, api.namespace) as second:
        second.wait_leads()
        line.told_once("TierDeclared")


# -- the Lease, and clocks that are wrong


def test_an_erasure_that_its_node_does_not_judge_is_late_by_the_controllers_own_measure(line: Line) -> None:
    """The node's clock is years ahead, and its agent is heard and says nothing."""
    name = line.volume(line.tier(scrub={"deadline": "1s"}))
    line.wait_ready()
    ahead = (datetime.now(UTC) + YEARS).isoformat().replace("+00:00", "Z")
    line.api.set_status(VOLUMES, name, volume_status("Erasing") | {"stateSince": ahead})
    wait_until("late", lambda: line.condition("Scrubbed") == ("False", "DeadlineMissed"))
    line.erase(name)
    wait_until("erased", lambda: line.condition("Scrubbed") == ("True", "NothingLeft"))


SHORT = Timing(duration_s=4, fence_s=2.0, renew_s=0.3, retry_s=0.2)
YEARS = timedelta(days=30 * 365)


def lease(renewed: datetime, duration_s: int) -> Json:
    at = renewed.isoformat(timespec="microseconds").replace("+00:00", "Z")
    spec = {"holderIdentity": "somebody", "leaseDurationSeconds": duration_s, "acquireTime": at, "renewTime": at}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "c"}, "spec": spec}


@dataclass
class Candidates:
    kube: Kube
    namespace: str
    looks: int = 0

    def one(self, identity: str, clock: timedelta = timedelta()) -> Election:
        def looked() -> None:
            self.looks += 1

        return Election(
            self.kube,
            namespace=self.namespace,
            name="c",
            identity=identity,
            timing=SHORT,
            looked=looked,
            now=lambda: datetime.now(UTC) + clock,
        )


@contextlib.asynccontextmanager
async def candidates(plane: ControlPlane, api: Api) -> AsyncIterator[Candidates]:
    kube = Kube(KubeConfig.from_file(plane.admin), Metrics())
    try:
        yield Candidates(kube, api.namespace)
    finally:
        await kube.close()


def test_a_lease_that_seems_to_have_run_out_long_ago_is_not_taken(plane: ControlPlane, api: Api) -> None:
    """Its holder's clock may be wrong. Only silence counts, by one's own clock."""
    api.create("leases", lease(datetime.now(UTC) - YEARS, duration_s=3600))

    async def scenario() -> None:
        async with candidates(plane, api) as them:
            acquiring = asyncio.create_task(them.one("a").acquire())
            while them.looks < 5:
                assert not acquiring.done()
                await asyncio.sleep(0.05)
            acquiring.cancel()
            await asyncio.gather(acquiring, return_exceptions=True)

    asyncio.run(scenario())


def test_a_lease_from_the_future_is_taken_after_its_holder_fell_silent(plane: ControlPlane, api: Api) -> None:
    api.create("leases", lease(datetime.now(UTC) + YEARS, duration_s=2))

    async def scenario() -> None:
        async with candidates(plane, api) as them:
            await asyncio.wait_for(them.one("a").acquire(), 120)

    asyncio.run(scenario())
    assert api.get("leases", "c")["spec"]["holderIdentity"] == "a"


def test_of_two_candidates_with_clocks_years_apart_one_leads_at_a_time(plane: ControlPlane, api: Api) -> None:
    """Hand-overs by silence: the next fence opens only after the one before it has closed by itself."""

    async def scenario() -> None:
        async with candidates(plane, api) as them:
            ahead, behind = them.one("ahead", YEARS), them.one("behind", -YEARS)
            for first, second in ((ahead, behind), (behind, ahead)):
                fence = await asyncio.wait_for(first.acquire(), 120)
                holding = asyncio.create_task(first.hold(fence))
                waiting = asyncio.create_task(second.acquire())
                looked = them.looks
                while them.looks < looked + 5 and not waiting.done():
                    await asyncio.sleep(0.05)
                assert not waiting.done() or not fence.is_open
                holding.cancel()  # it renews no more, and says nothing
                await asyncio.gather(holding, return_exceptions=True)
                following = await asyncio.wait_for(waiting, 120)
                assert not fence.is_open
                following.close()
                await second.give_back()

    asyncio.run(scenario())


def test_one_whose_own_name_is_in_the_lease_need_not_wait(plane: ControlPlane, api: Api) -> None:
    """The answer to its write was lost, or its term ended in an outage."""
    api.create("leases", {**lease(datetime.now(UTC), 3600)})
    api.merge("leases", "c", {"spec": {"holderIdentity": "a"}})

    async def scenario() -> None:
        async with candidates(plane, api) as them:
            await asyncio.wait_for(them.one("a").acquire(), 120)

    asyncio.run(scenario())
