"""For tests of the CSI service: the real agent in a process of its own, asked about pods by files instead of by an API server.

Run as a program it is that agent: `python csi_agent.py BASE [DIE]`. `DIE` names a step (`STEPS`) before or after which the
process kills itself with SIGKILL, such as `before:start`. Everything lies below BASE: kubelet's directory, tiers, state, and
`cluster/`, where a test puts tiers (YAML) and pods (JSON), and the files `away` (the API server does not answer), `hold` (it
takes its time to record) and `late` (the guardians do not come to look).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from kvtier_api.documents import load_documents
from kvtier_api.errors import NotFound
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import VolumeState
from kvtier_node import volume_watch
from kvtier_node.agent import Agent, AgentOptions, run_agent
from kvtier_node.cluster.errors import ApiUnavailable
from kvtier_node.csi import publishing, unpublishing
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.generated import csi_pb2_grpc
from kvtier_node.csi.server import CsiOptions, CsiService
from kvtier_node.csi.surroundings import ContainerUser, PodFacts
from kvtier_node.endpoints import Listen
from kvtier_node.event_log import Log, configure
from kvtier_node.ledger import Ledger, Transition, VolumeRow
from kvtier_node.node import Node
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.pods.target import TargetDirectory
from kvtier_node.receipts import Receipt
from kvtier_node.threads import Threads
from leftovers import detach_below, loop_devices_below
from live_logs import json_lines

NODE = "node-a"
LIMIT_S = 120.0
"""How long a test waits for what must come. Not what is claimed of speed: the machine may be busy."""
CANARY = b"KVTIER-CSI-CANARY-of-a-prompt-0123456789"


class FileCluster:
    """`csi.surroundings.Cluster` from the files of one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def _answers(self) -> None:
        if (self._folder / "away").exists():
            raise ApiUnavailable("the API server cannot be reached (test)", obj="test")

    async def pod(self, pod: PodIdentity, volume: str) -> PodFacts:
        await self._answers()
        path = self._folder / f"{pod.namespace}_{pod.name}.json"
        if not path.exists():
            raise NotFound("no such pod", obj=f"pod {pod.namespace}/{pod.name}")
        found = json.loads(path.read_text())
        users = tuple(ContainerUser(**user) for user in found.pop("users"))
        facts = PodFacts(users=users, **found)
        if facts.uid != pod.uid:
            raise NotFound("another pod has that name by now", obj=f"pod {pod.namespace}/{pod.name}")
        return facts

    async def tier(self, namespace: str, name: str) -> KVCacheTier:
        await self._answers()
        path = self._folder / f"{namespace}_{name}.yaml"
        if not path.exists():
            raise NotFound("there is none in the pod's namespace", obj=f"KVCacheTier {namespace}/{name}")
        (tier,) = load_documents(path)
        assert isinstance(tier, KVCacheTier)
        return tier

    async def node_labels(self) -> Mapping[str, str]:
        await self._answers()
        return {"disk": "nvme"}

    async def recorded(self, volume_id: str) -> None:
        await self._answers()
        (self._folder / "recording").write_text(volume_id)
        while (self._folder / "hold").exists():
            await asyncio.sleep(0.02)


class FilePart:
    """The CSI service with a FileCluster."""

    def __init__(self, base: Path, log: Log) -> None:
        self._base = base
        self._log = log
        self._csi: CsiService | None = None

    def observe(self, arrow: Transition) -> None:
        pass

    def open(self, node: Node, agent: Agent, threads: Threads) -> None:
        self._csi = CsiService(
            node,
            CsiOptions(kubelet=str(self._base / "kubelet")),
            guards=agent,
            cluster=FileCluster(self._base / "cluster"),
            threads=threads,
            log=self._log,
        )
        self._listening = asyncio.get_running_loop().create_task(self._csi.listen())

    def serve(self) -> None:
        assert self._csi is not None
        self._csi.serve()

    async def close(self) -> None:
        if self._csi is not None:
            await self._listening
            csi, self._csi = self._csi, None
            await csi.close()


# -- dying at a step


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wrapped(function: Callable[..., Any], when: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            _die()
        result = function(*arguments, **named)
        _die()
        return result

    return call


def _erase() -> tuple[Any, str]:
    from kvtier_node import guarding

    return guarding, "erase"


STEPS: dict[str, Callable[[], tuple[Any, str]]] = {
    "provision": lambda: (publishing, "provision"),
    "start": lambda: (publishing, "start"),
    "attach": lambda: (TargetDirectory, "attach"),
    "detach": lambda: (unpublishing, "_detach"),
    "erase": _erase,
    "clean": lambda: (unpublishing, "_clean"),
}


def _late(look: Callable[..., Any], sign: Path) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        while sign.exists():
            time.sleep(0.02)
        return look(*arguments, **named)

    return call


def main(base: Path, die: str | None) -> None:
    volume_watch.look = _late(volume_watch.look, base / "cluster" / "late")  # type: ignore[attr-defined]
    if die is not None:
        when, _, step = die.partition(":")
        owner, name = STEPS[step]()
        setattr(owner, name, _wrapped(getattr(owner, name), when))
    log = configure(as_json=True)
    options = AgentOptions(
        state_dir=str(base / "state"),
        roots=[str(base / "tiers")],
        manifests=str(base / "manifests"),
        listen=Listen("127.0.0.1", 0),
        node_name=NODE,
        pods=FilePart(base, log),
    )
    run_agent(options, log)


# -- what a test works with


def waits_in_open(thread: Path) -> bool:
    """Whether a process or thread (its folder in /proc) is asleep in open(2) of a gated file. Raises OSError: it ended."""
    return "fanotify" in (thread / "stack").read_text()


def volume_handle(pod_uid: str, volume: str) -> str:
    """As kubelet makes it (pkg/volume/csi, `makeVolumeHandle`)."""
    return f"csi-{hashlib.sha256(f'{pod_uid}{volume}'.encode()).hexdigest()}"


@dataclass
class Pod:
    """A pod as kubelet and the API server know it."""

    uid: str
    name: str
    namespace: str = "default"
    tier: str = "chat"
    volume: str = "kv"

    @property
    def volume_id(self) -> str:
        return volume_handle(self.uid, self.volume)


class Kubelet:
    """kubelet's side, by hand: its directories, and its calls. `base` is short: a socket's path has a limit."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "kubelet"
        self.cluster = base / "cluster"
        for folder in (
            self.root / "pods",
            self.root / "plugins_registry",
            self.cluster,
            base / "manifests",
            base / "tiers",
        ):
            folder.mkdir(parents=True, mode=0o750)
        (base / "tiers").chmod(0o755)
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None

    # the agent

    def start_agent(self, die: str | None = None, *, serve: bool = True) -> None:
        """Start it, and wait until it serves, unless `serve` is false; with `die`, it may be dead by then."""
        self.log = (self.base / "agent.log").open("ab")
        process = self.process = subprocess.Popen(self.command(die), stdout=self.log, stderr=self.log)
        self._channel = grpc.insecure_channel(
            f"unix:{self.root}/plugins/node.kvtier.dev/csi.sock",
            options=[("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 200)],
        )
        if serve:
            self.wait(
                "the agent is ready", lambda: self.is_ready(may_die=die is not None) or process.poll() is not None
            )

    def command(self, die: str | None) -> list[str]:
        return [sys.executable, __file__, str(self.base), *([die] if die else [])]

    def probe(self, *, may_die: bool = False) -> bool | None:
        """What the endpoint says of itself; None while it does not answer. Only with `may_die` may the agent have ended."""
        assert self._channel is not None and self.process is not None
        assert may_die or self.process.poll() is None, (self.base / "agent.log").read_text()[-3000:]
        try:
            answer = csi_pb2_grpc.IdentityStub(self._channel).Probe(pb.ProbeRequest(), timeout=2)
        except grpc.RpcError:
            return None
        return bool(answer.ready.value)

    def is_ready(self, *, may_die: bool = False) -> bool:
        return self.probe(may_die=may_die) is True

    def stop_agent(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self.process = None
        self.log.close()
        return code

    def died(self) -> None:
        """Wait until the agent has killed itself."""
        assert self.process is not None
        assert self.process.wait(60) == -signal.SIGKILL, (self.base / "agent.log").read_text()[-3000:]
        self.stop_agent()

    @staticmethod
    def wait(what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        until = time.monotonic() + limit_s
        while not (found := condition()):
            assert time.monotonic() < until, f"did not come within {limit_s:g} s: {what}"
            time.sleep(0.05)
        return found

    def figure(self, name: str, **labels: str) -> float | None:
        """A metric of the agent that runs now."""
        port = [line for line in json_lines(self.base / "agent.log") if line["event"] == "listening"][-1]["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [it for family in families for it in family.samples]
        return next((it.value for it in samples if it.name == name and labels.items() <= it.labels.items()), None)

    # what the API server has

    def declare_tier(self, name: str = "chat", namespace: str = "default", *, metadata: str = "", **spec: Any) -> None:
        given = {"sizePerRank": "1Mi", "slotSize": "64Ki", "ranks": 2, "path": f"{self.base}/tiers/{name}"} | spec
        given.setdefault("encryption", {"backend": "Fscrypt"})
        (self.cluster / f"{namespace}_{name}.yaml").write_text(
            f"apiVersion: kvtier.dev/v1alpha1\nkind: KVCacheTier\nmetadata: {{name: {name}, namespace: {namespace}{metadata}}}\n"
            f"spec: {json.dumps(given)}\n"
        )

    def declare_pod(self, pod: Pod, **facts: Any) -> None:
        given = {
            "uid": pod.uid,
            "node_name": NODE,
            "labels": {"app": "vllm"},
            "users": [{"container": "vllm", "uid": 1000, "gid": 1000, "non_root": True}],
            "fs_group": None,
            "ended_cleanly": None,
        }
        (self.cluster / f"{pod.namespace}_{pod.name}.json").write_text(json.dumps(given | facts))

    def forget_pod(self, pod: Pod) -> None:
        (self.cluster / f"{pod.namespace}_{pod.name}.json").unlink()

    # what kubelet does

    def pod_folder(self, pod: Pod) -> Path:
        return self.root / "pods" / pod.uid

    def target(self, pod: Pod) -> Path:
        return self.pod_folder(pod) / "volumes" / "kubernetes.io~csi" / pod.volume / "mount"

    def make_folders(self, pod: Pod) -> None:
        self.target(pod).parent.mkdir(parents=True, mode=0o750, exist_ok=True)

    def remove_folders(self, pod: Pod) -> None:
        """As kubelet does in the end: only empty directories go."""
        folder = self.target(pod)
        for each in (folder, *folder.parents[:4]):
            with contextlib.suppress(FileNotFoundError):
                each.rmdir()

    def publish_request(self, pod: Pod, **changes: Any) -> pb.NodePublishVolumeRequest:
        mode = pb.VolumeCapability.AccessMode(mode=pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER)
        request = pb.NodePublishVolumeRequest(
            volume_id=pod.volume_id,
            target_path=str(self.target(pod)),
            volume_capability=pb.VolumeCapability(mount=pb.VolumeCapability.MountVolume(), access_mode=mode),
            volume_context={
                "csi.storage.k8s.io/ephemeral": "true",
                "csi.storage.k8s.io/pod.name": pod.name,
                "csi.storage.k8s.io/pod.namespace": pod.namespace,
                "csi.storage.k8s.io/pod.uid": pod.uid,
                "csi.storage.k8s.io/serviceAccount.name": "default",
                "tier": pod.tier,
            },
        )
        for name, value in changes.items():
            setattr(request, name, value)
        return request

    @property
    def node(self) -> csi_pb2_grpc.NodeStub:
        assert self._channel is not None
        return csi_pb2_grpc.NodeStub(self._channel)

    @property
    def channel(self) -> grpc.Channel:
        assert self._channel is not None
        return self._channel

    def publish(self, pod: Pod, *, timeout_s: float = 120.0, **changes: Any) -> None:
        self.make_folders(pod)
        self.node.NodePublishVolume(self.publish_request(pod, **changes), timeout=timeout_s)

    def unpublish(self, pod: Pod, *, timeout_s: float = 120.0) -> None:
        request = pb.NodeUnpublishVolumeRequest(volume_id=pod.volume_id, target_path=str(self.target(pod)))
        self.node.NodeUnpublishVolume(request, timeout=timeout_s)

    def unpublish_until_ok(self, pod: Pod) -> None:
        """As kubelet: again and again until the answer is OK."""

        def once() -> bool:
            try:
                self.unpublish(pod)
            except grpc.RpcError:
                return False
            return True

        self.wait("unpublish is OK", once)

    # what is there

    def rows(self) -> list[VolumeRow]:
        with Ledger.open(self.base / "state", create=False) as ledger:
            return ledger.volumes()

    def row_of(self, pod: Pod) -> VolumeRow:
        """The newest volume of the pod."""
        found = [row for row in self.rows() if row.facts.get("pod", {}).get("csi_volume_id") == pod.volume_id]
        return found[-1]

    def receipts(self) -> list[Receipt]:
        with Ledger.open(self.base / "state", create=False) as ledger:
            return ledger.receipts()

    def in_use(self) -> list[VolumeRow]:
        return [row for row in self.rows() if row.state is VolumeState.IN_USE]

    def mounts(self) -> list[str]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        return [line.split(" ")[4] for line in lines if str(self.base) in line.split(" ")[4]]

    def images(self) -> Iterator[Path]:
        yield from (self.base / "tiers").rglob("volume.img")

    def write_canary(self, pod: Pod) -> None:
        """As the pod's engine would: into its first slot, and to the disk."""
        fd = os.open(self.target(pod) / "slots" / "slot.rank_0", os.O_RDWR)
        try:
            os.pwrite(fd, CANARY * 2000, 0)
            os.fsync(fd)
        finally:
            os.close(fd)

    def left_over(self) -> list[str]:
        """Mounts and loop devices of this test that are still there, and stay: another test's agent may look at one just now."""
        until = time.monotonic() + LIMIT_S
        while (left := self._left_now()) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def _left_now(self) -> list[str]:
        return [*self.mounts(), *(device.path for device in loop_devices_below(self.base))]

    def clean_up(self) -> None:
        """End the agent, take away what it left of mounts and loop devices, show its log, and remove the folder."""
        if self.process is not None:
            self.stop_agent(signal.SIGKILL)
        for point in sorted(self.mounts(), reverse=True):
            subprocess.run(["umount", "-l", point], check=False)
        detach_below(self.base)
        log = self.base / "agent.log"
        print((log.read_text() if log.exists() else "")[-6000:])
        shutil.rmtree(self.base)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
