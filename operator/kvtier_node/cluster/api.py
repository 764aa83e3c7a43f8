"""Reads for one publish: the pod, the tier and the node, as the API server has them now. No cache stands between."""

from __future__ import annotations

from collections.abc import Mapping

from lightkube import AsyncClient
from lightkube.resources.core_v1 import Node as NodeObject
from lightkube.resources.core_v1 import Pod

from kvtier_api.documents import parse_object
from kvtier_api.errors import NotFound
from kvtier_api.tier import KVCacheTier
from kvtier_node.cluster.client import TIERS, plain, translated
from kvtier_node.cluster.pods import pod_facts
from kvtier_node.cluster.reporting import Reporter
from kvtier_node.csi.surroundings import PodFacts
from kvtier_node.pods.consumer import PodIdentity

__all__ = ["ApiCluster"]


class ApiCluster:
    """`csi.surroundings.Cluster` by the API server."""

    def __init__(self, client: AsyncClient, reporter: Reporter, node_name: str) -> None:
        self._client = client
        self._reporter = reporter
        self._node_name = node_name

    async def pod(self, pod: PodIdentity, volume: str) -> PodFacts:
        what = f"pod {pod.namespace}/{pod.name}"
        with translated(what):
            found = await self._client.get(Pod, pod.name, namespace=pod.namespace)
        facts = pod_facts(found, volume)
        if facts.uid != pod.uid:
            raise NotFound(f"another pod has that name by now (uid {facts.uid}, not {pod.uid})", obj=what)
        return facts

    async def tier(self, namespace: str, name: str) -> KVCacheTier:
        what = f"KVCacheTier {namespace}/{name}"
        try:
            with translated(what):
                found = await self._client.get(TIERS, name, namespace=namespace)
        except NotFound as error:
            raise NotFound(
                "there is none in the pod's namespace", obj=what, remedy="create it, or correct volumeAttributes.tier"
            ) from error
        return parse_object(plain(found), kind=KVCacheTier)

    async def node_labels(self) -> Mapping[str, str]:
        with translated(f"Node {self._node_name}"):
            found = await self._client.get(NodeObject, self._node_name)
        return dict((found.metadata.labels if found.metadata is not None else None) or {})

    async def recorded(self, volume_id: str) -> None:
        await self._reporter.recorded(volume_id)
