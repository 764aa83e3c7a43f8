"""A replica that waits for its turn: it reads everything, writes nothing, and acts on what it read when its turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator

import pytest
from api_client import Api, Json, node, tier, volume, volume_status
from controllers import Controller
from controlplane import ControlPlane, wait_until
from faulty_proxy import GONE, Behind, FaultyProxy
from lightkube import KubeConfig

from kvtier_operator import kube as kube_module
from kvtier_operator.fence import Fence
from kvtier_operator.kinds import TIERS as TIER_KIND
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.settings import parse_settings
from kvtier_operator.term import Term

TIERS, VOLUMES = "kvcachetiers", "kvcachevolumes"
READ = 'kvtier_resyncs_total{result="first"}'
LISTS = r"/(kvcachetiers|kvcachevolumes|kvcacheerasures|nodes)\?(?!.*watch=true)"


class Pair:
    """A leader, and a follower behind a proxy that has read everything."""

    def __init__(self, api: Api, leader: Controller, follower: Behind) -> None:
        self.api = api
        self.leader = leader
        self.follower = follower
        self.tier: Json = {}

    def begin(self, volumes: int) -> list[str]:
        self.api.create("nodes", node(f"node-{self.api.namespace}"))
        self.tier = self.api.create(TIERS, tier("t"))
        names = [self.volume() for _ in range(volumes)]
        self.counted(volumes)
        return names

    def volume(self) -> str:
        body = volume(self.tier, f"node-{self.api.namespace}") | {"status": volume_status("InUse")}
        return str(self.api.create(VOLUMES, body)["metadata"]["name"])

    def forget(self, name: str) -> None:
        """Deleted first: one that is not is given its finalizer back at once."""
        self.api.delete(VOLUMES, name)
        self.api.merge(VOLUMES, name, {"metadata": {"finalizers": None}})

    def total(self) -> int | None:
        found: int | None = (self.api.get(TIERS, "t").get("status") or {}).get("volumes", {}).get("total")
        return found

    def counted(self, total: int) -> None:
        wait_until(f"{total} counted", lambda: self.total() == total)

    def hand_over(self) -> None:
        """From now on the follower gets no list of anything: what it knows is what it knew, and what its watches tell."""
        self.follower.proxy.answer("GET", LISTS, 503)
        self.leader.stop()
        self.follower.wait_leads()


@pytest.fixture
def pair(plane: ControlPlane, api: Api) -> Iterator[Pair]:
    name = secrets.token_hex(3)
    where = {"lease_namespace": api.namespace, "namespaces": (api.namespace,), "arguments": ("--agent-selector", "")}
    with contextlib.ExitStack() as stack:
        leader = stack.enter_context(Controller(plane, f"l{name}", **where))  # type: ignore[arg-type]
        leader.wait_leads()
        proxy = stack.enter_context(FaultyProxy(plane, f"controller-s{name}"))
        follower = stack.enter_context(Behind(plane, f"s{name}", proxy, **where))
        wait_until("it has read everything", lambda: follower.metric(READ) == 1)
        yield Pair(api, leader, follower)


def test_a_follower_acts_on_what_it_read_while_it_stood_by(pair: Pair) -> None:
    first, second = pair.begin(2)
    pair.forget(first)
    pair.counted(1)
    assert pair.leader.writes(), "the leader does all the work"
    assert pair.follower.writes() == [], "it reads, and writes nothing"
    pair.hand_over()
    pair.volume()
    pair.counted(2)
    pair.api.set_status(VOLUMES, second, volume_status("Erased"))
    pair.counted(1)
    assert pair.follower.metric(READ) == 1


@pytest.mark.parametrize("how", ["in the stream", "as the answer"])
def test_after_a_gap_it_reads_everything_anew(pair: Pair, how: str) -> None:
    gone, _ = pair.begin(2)
    proxy = pair.follower.proxy
    wait_until("it watches", lambda: proxy.watches(VOLUMES) == 1)
    silence = proxy.mute(VOLUMES)
    pair.forget(gone)
    pair.counted(1)
    refusal = proxy.answer("GET", rf"{VOLUMES}.*watch=true", 410, times=1) if how == "as the answer" else None
    assert proxy.end_watches(VOLUMES, b"" if refusal else GONE) == 1
    silence.over()
    wait_until("read again", lambda: pair.follower.metric(READ) == 2)
    pair.hand_over()
    looked = 'kvtier_reconciles_total{result="done"}'
    wait_until("looked at", lambda: pair.follower.metric(looked) >= 1)
    assert pair.total() == 1, "what vanished in the gap is not remembered"
    assert pair.follower.writes(TIERS) == []


def test_a_watch_that_was_cut_goes_on_where_it_was(pair: Pair) -> None:
    """Nothing is read again, and what changed in between is told."""
    pair.begin(1)
    proxy = pair.follower.proxy
    wait_until("it watches", lambda: proxy.watches("watch=true") == 4)
    sick = proxy.answer("GET", "watch=true", 503)
    assert proxy.end_watches("watch=true") == 4
    pair.volume()
    pair.counted(2)
    wait_until("refused", lambda: sick.hits >= 4)
    sick.over()
    wait_until("it watches again", lambda: proxy.watches("watch=true") == 4)
    pair.hand_over()
    pair.volume()
    pair.counted(3)
    assert pair.follower.metric(READ) == 1


def test_a_memory_of_another_history_is_read_anew(
    plane: ControlPlane, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(plane.admin))
    where = ["--namespace", api.namespace, "--lease-namespace", api.namespace, "--kubeconfig", str(plane.admin)]
    settings, metrics = parse_settings([*where, "--agent-selector", ""]), Metrics()
    term = Term(settings, KubeConfig.from_file(plane.admin), metrics, fence := Fence())

    def read() -> float:
        return metrics.registry.get_sample_value("kvtier_resyncs_total", {"result": "first"}) or 0

    made = api.create(TIERS, tier("t"))
    term.start()
    try:
        wait_until("read", lambda: read() == 1)
        term.forget()
        wait_until("read again", lambda: read() == 2)
        assert api.get(TIERS, "t")["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
        fence.open_until(time.monotonic() + 600)
        wait_until("its turn", lambda: "status" in api.get(TIERS, "t"))
        assert read() == 2
    finally:
        term.stop()
        assert term.ended.wait(120)


def test_a_stream_that_says_nothing_for_long_is_ended(
    plane: ControlPlane, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API server sends a bookmark a minute: an open connection without one leads nowhere."""
    monkeypatch.setattr(kube_module, "_SILENT_S", 0.5)

    async def scenario() -> list[str]:
        kube = Kube(KubeConfig.from_file(plane.admin), Metrics())
        try:
            pages = [page async for page in kube.pages(TIER_KIND, api.namespace)]
            changes = kube.watch(TIER_KIND, api.namespace, since=pages[-1].version)
            return [change.type async for change in changes]
        finally:
            await kube.close()

    assert asyncio.run(asyncio.wait_for(scenario(), 120)) == []
