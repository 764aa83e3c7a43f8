"""A simulated fleet on a real API server: nodes, agents' pods, tiers, and volumes as the node agents' reporters write them.

Objects are those of `kvtier_node.cluster.objects`, written by server-side apply under the agents' field manager; Nodes are as
large as those of real nodes (fifty images). No node and no agent runs. Measuring is left to `bench/scale_bench.py` and the tests.
"""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec
from controlplane import ControlPlane

from kvtier_api.conditions import Finding, written_down
from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.cluster.client import FIELD_MANAGER
from kvtier_node.cluster.objects import volume_object, volume_status
from kvtier_node.ledger import VolumeRow
from kvtier_node.pods.consumer import PodIdentity

__all__ = ["AuditMark", "Fleet", "FleetVolume", "Size"]

Json = dict[str, Any]
_GROUP = "/apis/kvtier.dev/v1alpha1"
_BOOT = "5f0c1b3e-6f0a-4a59-9d3c-000000000000"
_AGENTS_NAMESPACE = "kvtier-system"
_CONCURRENT = 24
_MEASURED = (
    (ConditionType.PROVISIONED, Reason.PROVISIONED, "1 volume(s), each with its own marker on its own device"),
    (
        ConditionType.ENCRYPTED,
        Reason.KERNEL_KEY_MEASURED,
        "{}: fscrypt policy v2, key present, AES-256-XTS, as the kernel says",
    ),
    (ConditionType.SALT_ENFORCED, Reason.SALT_REQUIRED, "the engine refuses blocks of requests without a trusted salt"),
    (ConditionType.RETENTION_ENFORCED, Reason.SLOTS_SAMPLED_SEALED, "sealed slots; keys are dropped after 24h"),
    (ConditionType.SCRUBBED, Reason.NOTHING_LEFT, "no volume of an ended consumer is on record as not erased"),
    (ConditionType.HOST_HARDENED, Reason.HOST_HARDENED, "no swap, no core dumps, kexec locked"),
    (ConditionType.MAPPED, Reason.DECLARED, "nothing else was found under the allowed roots"),
)


@dataclass(frozen=True)
class Size:
    """How many of each. Volumes are dealt to tiers and nodes in turn; tiers to namespaces of at most fifty."""

    tiers: int
    nodes: int
    volumes: int
    agents: bool = True
    ranks: int = 8

    @property
    def namespaces(self) -> int:
        return -(-self.tiers // 50)


@dataclass(frozen=True)
class FleetVolume:
    row: VolumeRow
    pod: PodIdentity


class AuditMark:
    """Writes of a user since the mark was set, by verb and resource: {"patch kvcachevolumes": 3}. The Lease is left out."""

    def __init__(self, plane: ControlPlane, *users: str, since: int | None = None) -> None:
        """`since`: a place in the log; left out, its end."""
        self._plane = plane
        self._users = frozenset(users)
        self._offset = plane.audit_log.stat().st_size if since is None else since

    def writes(self) -> Counter[str]:
        """Refused ones (codes from 400 on) have their code behind the resource."""
        found: Counter[str] = Counter()
        for verb, about, code in self._plane.writes_since(self._offset, self._users):
            resource = "/".join(about[part] for part in ("resource", "subresource") if part in about)
            if resource != "leases":
                found[f"{verb} {resource}" + (f" {code}" if code >= 400 else "")] += 1
        return found


class Fleet:
    """`async with Fleet(plane, size)`: a client only; `fill` makes the objects."""

    def __init__(self, plane: ControlPlane, size: Size) -> None:
        self.size = size
        self._plane = plane
        self.tiers: list[tuple[str, str]] = []
        self.volumes: list[list[FleetVolume]] = []
        """Of each tier."""

    async def __aenter__(self) -> Fleet:
        plane = self._plane
        plane.kubeconfig("agents", ("system:masters",))
        context = ssl.create_default_context(cafile=str(plane.ca))
        context.load_cert_chain(plane.ca.parent / "agents.crt", plane.ca.parent / "agents.key")
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self._session = aiohttp.ClientSession(plane.server, connector=connector, timeout=aiohttp.ClientTimeout(60))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    # -- making it

    async def fill(self, *, state: VolumeState = VolumeState.IN_USE) -> None:
        size = self.size
        names = [_AGENTS_NAMESPACE, *(f"team-{number:02}" for number in range(size.namespaces))]
        await _all(self._namespace(name) for name in names)
        await _all(self._node(number) for number in range(size.nodes))
        if size.agents:
            await _all(self._agent(number) for number in range(size.nodes))
        uids = await _all(self._tier(number) for number in range(size.tiers))
        self.tiers = [self._tier_key(number) for number in range(size.tiers)]
        self.volumes = [[] for _ in range(size.tiers)]
        for number in range(size.volumes):
            self.volumes[number % size.tiers].append(self._volume(number, uids[number % size.tiers]))
        await _all(self.record(volume, state) for mates in self.volumes for volume in mates)

    def _tier_key(self, number: int) -> tuple[str, str]:
        return f"team-{number % self.size.namespaces:02}", f"tier-{number:04}"

    async def _namespace(self, name: str) -> None:
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await self._send("POST", "/api/v1/namespaces", body)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await self._send("POST", f"/api/v1/namespaces/{name}/serviceaccounts", account)

    async def _node(self, number: int) -> None:
        await self._send("POST", "/api/v1/nodes", _node(number))

    async def _agent(self, number: int) -> None:
        """A pod of the agents' DaemonSet, bound and Ready."""
        path = f"/api/v1/namespaces/{_AGENTS_NAMESPACE}/pods"
        await self._send("POST", path, _agent(number))
        await self.agent_ready(number, True)

    async def agent_ready(self, number: int, ready: bool) -> None:
        path = f"/api/v1/namespaces/{_AGENTS_NAMESPACE}/pods/{_agent(number)['metadata']['name']}/status"
        conditions = [{"type": "Ready", "status": str(ready), "lastTransitionTime": _now()}]
        await self._patch(path, {"status": {"conditions": conditions, "phase": "Running"}}, "strategic-merge-patch")

    async def _tier(self, number: int) -> str:
        namespace, name = self._tier_key(number)
        body = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "sizePerRank": "100Gi",
                "ranks": self.size.ranks,
                "path": f"/var/lib/kvtier/tiers/{name}",
                "governance": {"owner": f"team-{number % 7}", "purpose": "prefix cache of a chat service"},
            },
        }
        made = await self._send("POST", f"{_GROUP}/namespaces/{namespace}/kvcachetiers", body)
        return str(made["metadata"]["uid"])

    def _volume(self, number: int, tier_uid: str) -> FleetVolume:
        tier = number % self.size.tiers
        namespace, name = self._tier_key(tier)
        volume_id = f"kvv-{number:020x}"
        pod = PodIdentity(
            uid=str(uuid.UUID(int=number)),
            namespace=namespace,
            name=f"vllm-{number}",
            csi_volume_id=f"csi-{number:064x}",
            target=f"/var/lib/kubelet/pods/{uuid.UUID(int=number)}/volumes/kubernetes.io~csi/kv/mount",
        )
        row = VolumeRow(
            volume_id=volume_id,
            tier_uid=tier_uid,
            tier_namespace=namespace,
            tier_name=name,
            node=_node_name(number % self.size.nodes),
            boot_id=_BOOT,
            backend=BackendName.FSCRYPT,
            cipher="fscrypt-v2-aes-256-xts",
            place=f"/var/lib/kvtier/tiers/{name}/{volume_id}",
            size_bytes=self.size.ranks * (100 << 30),
            ranks=self.size.ranks,
            bytes_per_rank=100 << 30,
            key_id=f"{number:032x}",
            spec={"slotPrefix": "slot"},
            facts={"uid": 1000, "gid": 1000},
        )
        return FleetVolume(row, pod)

    # -- what agents write

    async def record(self, volume: FleetVolume, state: VolumeState) -> None:
        """The object and its status."""
        row = volume.row
        body = volume_object(row, volume.pod, system_uuid=_machine(row.node))
        path = f"{_GROUP}/namespaces/{row.tier_namespace}/kvcachevolumes/{row.volume_id}"
        await self._apply(path, body)
        await self.report(volume, state)

    async def report(self, volume: FleetVolume, state: VolumeState, **changes: Reason) -> None:
        """Its status in that state. `changes`: conditions, by the type's name, that are False with a reason."""
        row = replace(volume.row, state=state, state_since=_now())
        usable = state in (VolumeState.READY, VolumeState.IN_USE)
        found = [
            Finding(type_, False, changes[type_.name], "refuted")
            if type_.name in changes
            else Finding(
                type_, usable or None, reason if usable else Reason.PROVISIONING, message.format(row.volume_id)
            )
            for type_, reason, message in _MEASURED
        ]
        status = volume_status(row, None, written_down(found, (), generation=1, now=datetime.now(UTC)))
        body = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheVolume",
            "metadata": {"name": row.volume_id, "namespace": row.tier_namespace},
            "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
        }
        path = f"{_GROUP}/namespaces/{row.tier_namespace}/kvcachevolumes/{row.volume_id}/status"
        await self._apply(path, body)

    async def heartbeat(self, number: int) -> None:
        """What a kubelet writes every five minutes though nothing changed: its node's conditions with a new time."""
        conditions = [{**it, "lastHeartbeatTime": _now()} for it in _node(number)["status"]["conditions"]]
        path = f"/api/v1/nodes/{_node_name(number)}/status"
        await self._patch(path, {"status": {"conditions": conditions}}, "strategic-merge-patch")

    # -- reading it

    @asynccontextmanager
    async def watch_tiers(self) -> AsyncIterator[AsyncIterator[Json]]:
        """Objects as they change, from now on."""
        answer = await self._session.get(
            f"{_GROUP}/kvcachetiers",
            params={"watch": "true", "resourceVersion": "0"},
            timeout=aiohttp.ClientTimeout(total=None),
        )

        async def objects() -> AsyncIterator[Json]:
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield _loads(line)["object"]

        try:
            yield objects()
        finally:
            answer.close()

    async def all_tiers(self) -> list[Json]:
        return await self.all("kvcachetiers")

    async def all(self, plural: str) -> list[Json]:
        """In all namespaces. Items of a list have no kind of their own: it is added."""
        root = "/api/v1" if plural in ("nodes", "pods") else _GROUP
        page = await self._send("GET", f"{root}/{plural}")
        kind = {"apiVersion": page["apiVersion"], "kind": page["kind"].removesuffix("List")}
        return [kind | item for item in page["items"]]

    # -- sending

    async def _apply(self, path: str, body: Json) -> None:
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        await self._send("PATCH", path, body, content_type="application/apply-patch+yaml", params=params)

    async def _patch(self, path: str, body: Json, how: str) -> None:
        await self._send("PATCH", path, body, content_type=f"application/{how}+json")

    async def _send(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        content_type: str = "application/json",
        params: dict[str, str] | None = None,
    ) -> Json:
        headers = {"Content-Type": content_type}
        data = _dumps(body) if body is not None else None
        while True:
            async with self._session.request(method, path, data=data, headers=headers, params=params) as answer:
                text = await answer.read()
                if answer.status == 429:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", "1")))
                    continue
                if answer.status >= 400:
                    raise RuntimeError(f"{method} {path}: {answer.status} {text[:500]!r}")
                found: Json = _loads(text)
                return found


async def _all(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results in order, some of them at once."""
    gate = asyncio.Semaphore(_CONCURRENT)

    async def one(each: Coroutine[Any, Any, Any]) -> Any:
        async with gate:
            return await each

    return await asyncio.gather(*(one(each) for each in work))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _node_name(number: int) -> str:
    return f"node-{number:04}.gpu.example.net"


def _machine(node_name: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, node_name))


def _node(number: int) -> Json:
    """As a kubelet writes it, with the images that are on it: about 12 KB."""
    name = _node_name(number)
    conditions = [
        {
            "type": type_,
            "status": "True" if type_ == "Ready" else "False",
            "reason": f"Kubelet{type_}",
            "message": f"kubelet reports {type_}",
            "lastHeartbeatTime": _now(),
            "lastTransitionTime": _now(),
        }
        for type_ in ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    ]
    images = [
        {
            "names": [
                f"registry.example.net/team-{image % 7}/service-{image}@sha256:{image:064x}",
                f"registry.example.net/team-{image % 7}/service-{image}:v{number % 9}.{image}",
            ],
            "sizeBytes": 100_000_000 + image,
        }
        for image in range(50)
    ]
    labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    labels |= {f"feature.node.example.net/feature-{feature}": "true" for feature in range(30)}
    amounts = {"cpu": "128", "memory": "2097152Mi", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": f"10.{number // 256}.{number % 256}.0/24"},
        "status": {
            "addresses": [{"type": "Hostname", "address": name}],
            "capacity": amounts,
            "allocatable": amounts,
            "conditions": conditions,
            "images": images,
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": _BOOT,
                "containerRuntimeVersion": "containerd://2.4.2",
                "kernelVersion": "6.12.0",
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.36.3",
                "machineID": f"{number:032x}",
                "operatingSystem": "linux",
                "osImage": "Debian GNU/Linux 13",
                "systemUUID": _machine(name),
            },
        },
    }


def _agent(number: int) -> Json:
    labels = {"app.kubernetes.io/name": "kvtier", "app.kubernetes.io/component": "node"}
    mounts = [{"name": f"v{each}", "mountPath": f"/v{each}"} for each in range(6)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"kvtier-node-{number:04}", "labels": labels},
        "spec": {
            "nodeName": _node_name(number),
            "containers": [{"name": "agent", "image": "registry.example.net/kvtier:1", "volumeMounts": mounts}],
            "volumes": [{"name": f"v{each}", "hostPath": {"path": f"/v{each}"}} for each in range(6)],
        },
    }


def _dumps(body: Json) -> bytes:
    return msgspec.json.encode(body)


def _loads(data: bytes) -> Any:
    return msgspec.json.decode(data)
