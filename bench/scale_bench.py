"""The controller under a simulated fleet on a real API server: passes, memory, writes, latencies, hand-over.

The fleet is made by `tests/cluster/load.py` and the control plane by `tests/cluster/controlplane.py` (`make cluster-tools`). The
controller is the real process. Writes are counted by the API server's audit log, memory by the kernel (VmHWM), times by this
process, which watches the tiers as a user would.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvtier_api.reasons import Reason
from kvtier_api.volume import VolumeState

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "cluster")]

from controllers import Controller  # noqa: E402
from controlplane import ControlPlane, install_crds  # noqa: E402
from load import AuditMark, Fleet, Size  # noqa: E402

_QUIET_S = 120.0
_HEARTBEAT_S = 300.0
_BURST_TIERS = 100
_PACED_TIERS = 60
_PACE_S = 1.0
_LIMIT_S = 1800.0
_NOT_COUNTED = ('kind="Lease"', 'verb="list"', 'verb="watch"')
_TICK = os.sysconf("SC_CLK_TCK")


class Watched:
    """What the tiers say, as a watch tells it: `changed(key)` is notified at each event."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.status: dict[tuple[str, str], dict[str, Any]] = {}
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Watched]:
        async with self._fleet.watch_tiers() as objects:
            task = asyncio.create_task(self._read(objects))
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _read(self, objects: AsyncIterator[dict[str, Any]]) -> None:
        async for tier in objects:
            meta = tier["metadata"]
            async with self._news:
                self.status[meta["namespace"], meta["name"]] = tier.get("status") or {}
                self._news.notify_all()

    def ready(self, key: tuple[str, str]) -> str:
        """Status of the condition; empty where there is none yet."""
        conditions = self.status.get(key, {}).get("conditions", ())
        return next((it["status"] for it in conditions if it["type"] == "Ready"), "")

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(_LIMIT_S), self._news:
            await self._news.wait_for(holds)


def trace(what: str, *figures: object) -> None:
    """Progress, for whoever waits: the whole takes a quarter of an hour."""
    print(what, *figures, file=sys.stderr, flush=True)


def run(size: Size) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, ControlPlane(Path(folder) / "plane") as plane:
        install_crds(plane)
        return asyncio.run(_measure(plane, size))


async def _measure(plane: ControlPlane, size: Size) -> dict[str, Any]:
    report: dict[str, Any] = {"size": vars(size), "load_average": os.getloadavg()}
    async with Fleet(plane, size) as fleet:
        report["fill_s"] = await _timed(fleet.fill())
        return report | await measure_filled(plane, fleet)


async def measure_filled(plane: ControlPlane, fleet: Fleet) -> dict[str, Any]:
    """Everything, on a fleet that is there already."""
    report: dict[str, Any] = {}
    async with Watched(fleet).watching() as tiers:
        first = Controller(plane, "first", lease_namespace="default", arguments=("--resync", "60"))
        second = Controller(plane, "second", lease_namespace="default", arguments=("--resync", "60"))
        try:
            mark = AuditMark(plane, first.user)
            report["first_pass_s"] = await _timed(_pass(first, tiers, fleet))
            trace("first pass", report["first_pass_s"])
            await _at_rest(first)
            report["first_pass_load"] = os.getloadavg()[0]
            report["first_pass_writes"] = dict(mark.writes())
            report["first_pass_cpu_s"] = cpu_s(first)
            report["first_pass_peak_mib"] = peak_mib(first)
            trace("at rest", report["first_pass_writes"], report["first_pass_peak_mib"])
            report["one_volume"] = await _one_volume(plane, first, fleet, tiers)
            trace("one volume", report["one_volume"])
            quarter = fleet.size.tiers // 4
            numbers = range(min(_PACED_TIERS, quarter))
            report["paced_ready_s"] = await _ready_latencies(fleet, tiers, numbers, pace_s=_PACE_S)
            trace("paced", report["paced_ready_s"])
            numbers = range(quarter, quarter + min(_BURST_TIERS, quarter))
            report["burst_ready_s"] = await _ready_latencies(fleet, tiers, numbers, pace_s=0)
            trace("burst", report["burst_ready_s"])
            await _at_rest(first)
            report["quiet"] = await _quiet(plane, first, fleet)
            report["peak_mib"] = peak_mib(first)
            trace("quiet", report["quiet"], report["peak_mib"])
            report["standby"] = await _stands_by(plane, second)
            trace("standby", report["standby"])
            report["hand_over"] = await _hand_over(plane, first, second, fleet, tiers)
            trace("hand-over", report["hand_over"])
        finally:
            for controller in (first, second):
                controller.stop()
    report["load_average_after"] = os.getloadavg()
    return {name: _rounded(value) for name, value in report.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def show(report: dict[str, Any]) -> None:
    for name, value in report.items():
        print(f"{name}: {', '.join(f'{k} {v}' for k, v in value.items()) if isinstance(value, dict) else value}")


async def _timed(work: Any) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


async def _pass(controller: Controller, tiers: Watched, fleet: Fleet) -> None:
    """From the start of the process until every tier is Ready and was brought to rest."""
    await asyncio.to_thread(controller.start)
    await tiers.until(lambda: all(tiers.ready(key) == "True" for key in fleet.tiers))
    await _all_looked_at(controller, fleet)


async def _all_looked_at(controller: Controller, fleet: Fleet) -> None:
    while await asyncio.to_thread(controller.metric, 'kvtier_reconciles_total{result="done"}') < fleet.size.tiers:
        await asyncio.sleep(0.2)


async def _at_rest(controller: Controller) -> None:
    """Until it wrote nothing, but for its Lease, for three seconds."""
    before = -1.0
    while (now := await asyncio.to_thread(written, controller)) != before:
        before = now
        await asyncio.sleep(3)


def written(controller: Controller) -> float:
    """Writes so far by its own count."""
    found = 0.0
    for line in controller.metrics_text().splitlines():
        if line.startswith("kvtier_api_requests_total{") and not any(part in line for part in _NOT_COUNTED):
            found += float(line.rpartition(" ")[2])
    return found


async def _one_volume(plane: ControlPlane, controller: Controller, fleet: Fleet, tiers: Watched) -> dict[str, Any]:
    """Writes for one volume that changes once: its state, then a condition, then the condition back."""
    volume, key = fleet.volumes[-1][0], fleet.tiers[-1]
    found: dict[str, Any] = {}
    for what, state, changes, wanted in (
        ("InUse to Ready", VolumeState.READY, {}, ("True", 1)),
        ("Ready to InUse", VolumeState.IN_USE, {}, ("True", 0)),
        ("a condition refuted", VolumeState.IN_USE, {"ENCRYPTED": Reason.NOT_ENCRYPTED}, ("False", 0)),
        ("the condition back", VolumeState.IN_USE, {}, ("True", 0)),
    ):
        mark = AuditMark(plane, controller.user)
        await fleet.report(volume, state, **changes)
        await tiers.until(lambda to=wanted: (tiers.ready(key), tiers.status[key]["volumes"]["ready"]) == to)
        await _at_rest(controller)
        found[what] = dict(mark.writes())
    return found


async def _ready_latencies(fleet: Fleet, tiers: Watched, numbers: range, *, pace_s: float) -> dict[str, float]:
    """Each tier's volumes are being made again, then are in use: seconds from the last volume's write to Ready=True."""
    for number in numbers:
        for volume in fleet.volumes[number]:
            await fleet.report(volume, VolumeState.PROVISIONING)
    await tiers.until(lambda: all(tiers.ready(fleet.tiers[number]) != "True" for number in numbers))
    tasks = []
    gate = asyncio.Semaphore(8)
    for number in numbers:
        tasks.append(asyncio.create_task(_one_latency(fleet, tiers, number, gate)))
        await asyncio.sleep(pace_s)
    return _spread(await asyncio.gather(*tasks)) | {"load": os.getloadavg()[0]}


async def _one_latency(fleet: Fleet, tiers: Watched, number: int, gate: asyncio.Semaphore) -> float:
    async with gate:
        for volume in fleet.volumes[number]:
            await fleet.report(volume, VolumeState.IN_USE)
    started = time.monotonic()
    await tiers.until(lambda: tiers.ready(fleet.tiers[number]) == "True")
    return time.monotonic() - started


async def _quiet(plane: ControlPlane, controller: Controller, fleet: Fleet) -> dict[str, Any]:
    """Nothing changes but kubelets' heartbeats, as often as a fleet of this size has them; full lists go on."""
    mark, cpu, started = AuditMark(plane, controller.user), cpu_s(controller), time.monotonic()
    resyncs = controller.metric('kvtier_resyncs_total{result="done"}')
    beats = 0
    while (since := time.monotonic() - started) < _QUIET_S:
        while beats < since * fleet.size.nodes / _HEARTBEAT_S:
            await fleet.heartbeat(beats % fleet.size.nodes)
            beats += 1
        await asyncio.sleep(0.2)
    lines = controller.said("resynced")
    return {
        "seconds": time.monotonic() - started,
        "heartbeats": beats,
        "writes": dict(mark.writes()),
        "resyncs": controller.metric('kvtier_resyncs_total{result="done"}') - resyncs,
        "resync_s": [line["seconds"] for line in lines],
        "cpu_share": (cpu_s(controller) - cpu) / (time.monotonic() - started),
    }


async def _stands_by(plane: ControlPlane, controller: Controller) -> dict[str, Any]:
    """A process that starts while another one leads: until it has read everything."""
    mark, started = AuditMark(plane, controller.user), time.monotonic()
    await asyncio.to_thread(controller.start)
    while not await asyncio.to_thread(controller.metric, 'kvtier_resyncs_total{result="first"}'):
        await asyncio.sleep(0.2)
    return {
        "seconds": time.monotonic() - started,
        "writes": dict(mark.writes()),
        "peak_mib": peak_mib(controller),
        "load": os.getloadavg()[0],
    }


async def _hand_over(
    plane: ControlPlane, first: Controller, second: Controller, fleet: Fleet, tiers: Watched
) -> dict[str, float]:
    """Seconds from the signal to the leader to a tier's status that the other one wrote, for a volume that changed meanwhile."""
    found: dict[str, float] = {}
    volume, key = fleet.volumes[-1][1], fleet.tiers[-1]
    for how, leader, follower in (("SIGTERM", first, second), ("SIGKILL", second, first)):
        if how == "SIGKILL":
            await _stands_by(plane, follower)
        started = time.monotonic()
        await asyncio.to_thread(leader.stop, kill=how == "SIGKILL")
        await fleet.report(volume, VolumeState.IN_USE, ENCRYPTED=Reason.NOT_ENCRYPTED)
        await tiers.until(lambda: tiers.ready(key) == "False")
        found[how] = time.monotonic() - started
        found[f"{how}, load"] = os.getloadavg()[0]
        await _all_looked_at(follower, fleet)
        found[f"{how}, every tier looked at"] = time.monotonic() - started
        found[f"{how}, the follower's peak in MiB"] = peak_mib(follower)
        await fleet.report(volume, VolumeState.IN_USE)
        await tiers.until(lambda: tiers.ready(key) == "True")
        await _at_rest(follower)
    return found


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"tiers": len(ordered), "p50": at(0.5), "p99": at(0.99), "max": ordered[-1]}


def peak_mib(controller: Controller) -> float:
    """The most resident memory that the process ever had (VmHWM)."""
    return _status_kib(controller, "VmHWM") / 1024


def _status_kib(controller: Controller, field: str) -> int:
    if controller.process is None:
        raise RuntimeError("the controller does not run")
    for line in Path(f"/proc/{controller.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/PID/status")


def cpu_s(controller: Controller) -> float:
    if controller.process is None:
        raise RuntimeError("the controller does not run")
    fields = Path(f"/proc/{controller.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK
