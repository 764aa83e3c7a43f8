"""What the controller costs an API server that has many tiers: counts, and the size of its memory. Nothing of the clock.

Fifty tiers with five hundred volumes on a hundred nodes; `bench/scale_bench.py` has twenty times as many.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from controllers import Controller
from controlplane import TOOLS, ControlPlane, install_crds, need_tools, wait_until
from load import AuditMark, Fleet, Size

from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState
from kvtier_operator.facts import agent_facts, node_facts, tier_facts, volume_facts
from kvtier_operator.view import View

pytestmark = pytest.mark.slow

SIZE = Size(tiers=50, nodes=100, volumes=500)
RESYNC = 'kvtier_resyncs_total{result="done"}'
VOLUME_LIMIT_BYTES = 4096
"""Of memory for the facts of one volume, beside what many share. 1.8 KB were measured; an object as it comes has 25."""
PROCESS_LIMIT_MIB = 200
"""Measured: 87; ten thousand volumes: 166."""


@dataclass
class Settled:
    """A fleet whose tiers are all Ready, and the controller that did it."""

    plane: ControlPlane
    controller: Controller
    fleet: Fleet
    first_writes: Counter[str]

    def at_rest(self) -> None:
        """Wait until nothing was written from one full list, which has every tier looked at, to the next."""
        for _ in range(6):
            before = self.writes()
            self.resyncs(2)
            if self.writes() == before:
                return
        pytest.fail(f"never at rest: {self.writes() - before} from one full list to the next")

    def writes(self) -> Counter[str]:
        return AuditMark(self.plane, self.controller.user, since=0).writes()

    def resyncs(self, count: int) -> None:
        until = self.controller.metric(RESYNC) + count
        wait_until("full lists", lambda: self.controller.metric(RESYNC) >= until, limit_s=240)

    def run(self, work: Callable[[Fleet], Awaitable[Any]]) -> Any:
        async def scenario() -> Any:
            async with self.fleet as fleet:
                return await work(fleet)

        return asyncio.run(scenario())

    def ready(self) -> dict[tuple[str, str], str]:
        async def look(fleet: Fleet) -> dict[tuple[str, str], str]:
            found = {}
            for tier in await fleet.all_tiers():
                conditions = (tier.get("status") or {}).get("conditions", ())
                meta = tier["metadata"]
                found[meta["namespace"], meta["name"]] = next(
                    (it["status"] for it in conditions if it["type"] == "Ready"), ""
                )
            return found

        found: dict[tuple[str, str], str] = self.run(look)
        return found


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settled]:
    need_tools(*TOOLS)
    with ControlPlane(tmp_path_factory.mktemp("scale") / "run") as plane:
        install_crds(plane)
        fleet = Fleet(plane, SIZE)
        controller = Controller(plane, "scale", lease_namespace="default", arguments=("--resync", "5"))
        found = Settled(plane, controller, fleet, Counter())
        found.run(lambda fleet: fleet.fill())
        with controller:
            controller.wait_leads()
            wait_until("every tier is Ready", lambda: set(found.ready().values()) == {"True"}, limit_s=240, pause_s=1)
            found.at_rest()
            found.first_writes = AuditMark(plane, controller.user, since=0).writes()
            yield found


def test_the_first_pass_writes_each_object_once(settled: Settled) -> None:
    """A finalizer for each tier and volume, a status and two events for each tier; refused writes do not occur."""
    assert dict(settled.first_writes) == {
        "patch kvcachevolumes": SIZE.volumes,
        "patch kvcachetiers": SIZE.tiers,
        "patch kvcachetiers/status": SIZE.tiers,
        "create events": 2 * SIZE.tiers,
    }
    assert len(settled.ready()) == SIZE.tiers


def test_one_changed_volume_costs_one_status_and_its_events(settled: Settled) -> None:
    """Whatever else there is. An event that was told before is counted up in its series."""
    before = settled.writes()
    told_again = {"patch events": 1}
    expected: Counter[str] = Counter()
    for what, state, changes, events in (
        ("its consumer ended", VolumeState.READY, {}, {}),
        ("it is used again", VolumeState.IN_USE, {}, {"create events": 1}),
        ("a condition is refuted", VolumeState.IN_USE, {"ENCRYPTED": Reason.NOT_ENCRYPTED}, {"create events": 2}),
        ("it holds again", VolumeState.IN_USE, {}, told_again),
    ):
        settled.run(lambda fleet, to=state, but=changes: fleet.report(fleet.volumes[-1][0], to, **but))
        expected = expected + Counter({"patch kvcachetiers/status": 1, **events})
        wait_until(what, lambda so_far=expected: settled.writes() - before >= so_far, limit_s=120)
        assert settled.writes() - before == expected, what
    settled.resyncs(2)
    assert settled.writes() - before == expected, "nothing came afterwards"


def test_at_rest_nothing_is_written_whatever_kubelets_and_full_lists_do(settled: Settled) -> None:
    mark = AuditMark(settled.plane, settled.controller.user)
    drift = settled.controller.metric("kvtier_resync_drift_total")

    async def beats(fleet: Fleet) -> None:
        for number in range(SIZE.nodes):
            await fleet.heartbeat(number)

    settled.run(beats)
    settled.resyncs(2)
    assert dict(mark.writes()) == {}
    assert settled.controller.metric("kvtier_resync_drift_total") == drift


def test_a_restarted_controller_finds_nothing_to_do(settled: Settled) -> None:
    mark = AuditMark(settled.plane, settled.controller.user)
    settled.controller.stop()
    settled.controller.start()
    settled.controller.wait_leads()
    looked = 'kvtier_reconciles_total{result="done"}'
    wait_until("all looked at", lambda: settled.controller.metric(looked) >= SIZE.tiers, limit_s=120)
    settled.resyncs(1)
    done = mark.writes()
    done.pop("create events 409", None)  # what the one before it may not have told, of the last minutes: it is there
    assert dict(done) == {}


def test_the_process_stays_small(settled: Settled) -> None:
    assert settled.controller.process is not None
    text = Path(f"/proc/{settled.controller.process.pid}/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:"))
    assert peak_kib / 1024 < PROCESS_LIMIT_MIB


def test_memory_holds_facts_and_not_the_objects(settled: Settled) -> None:
    """Each volume costs what is known of it. The objects themselves would be ten times as much."""

    async def all_of(fleet: Fleet) -> list[list[dict[str, Any]]]:
        return [await fleet.all(kind) for kind in ("kvcachetiers", "nodes", "pods", "kvcachevolumes")]

    tiers, nodes, pods, volumes = settled.run(all_of)
    assert len(volumes) == SIZE.volumes
    view = View(look_at_agents=True)
    for parse, bodies in ((tier_facts, tiers), (node_facts, nodes), (agent_facts, pods), (volume_facts, volumes[:10])):
        for body in bodies:
            view.take(parse(body))
    texts = [json.dumps(body) for body in volumes[10:]]
    gc.collect()
    tracemalloc.start()
    try:
        for text in texts:
            view.take(volume_facts(json.loads(text)))
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / len(texts) < VOLUME_LIMIT_BYTES
