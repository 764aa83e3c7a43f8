"""What the CSI service needs of the rest of the agent and of the cluster: two narrow interfaces, and what goes with them.

`Guards` is the agent, which looks after volumes. `Cluster` is the API server (`cluster.api`), asked about one pod at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvtier_api.tier import KVCacheTier
from kvtier_node.event_log import Log
from kvtier_node.hardening import HostFacts
from kvtier_node.live import LiveVolume
from kvtier_node.measuring import VolumeMeasurement
from kvtier_node.node import Node
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.threads import Threads
from kvtier_node.volume_watch import VolumeWatch

__all__ = ["Cluster", "ContainerUser", "Context", "Guards", "PodFacts"]


class Guards(Protocol):
    """Who looks after volumes in this process."""

    def take(self, live: LiveVolume) -> None:
        """Guard `live` from now on: its consumer's end, its erasure, requests about it."""

    def watch_of(self, volume_id: str) -> VolumeWatch | None:
        """The watch of a volume that this process guards."""

    def measured(self, volume_id: str) -> VolumeMeasurement | None:
        """The last measurement of a volume."""

    def host(self) -> HostFacts | None:
        """The last measurement of this host."""

    def foreign_data(self, tier: str, found: bool) -> None:
        """Whether something that kvtier did not make was in the way of a volume of `tier` (NAMESPACE/NAME)."""


@dataclass(frozen=True)
class ContainerUser:
    """As whom a container that mounts the volume runs, as far as the pod's spec says; None: the image decides."""

    container: str
    uid: int | None
    gid: int | None
    non_root: bool


@dataclass(frozen=True)
class PodFacts:
    """What is asked of a pod. `users` are the containers that mount the volume in question."""

    uid: str
    node_name: str | None
    labels: Mapping[str, str]
    users: tuple[ContainerUser, ...]
    fs_group: int | None
    ended_cleanly: bool | None
    """Every container that mounts the volume ended by itself or by SIGTERM; None while one has not ended."""


class Cluster(Protocol):
    """Raises ApiUnavailable, NotFound, NotPermitted, InvalidResource."""

    async def pod(self, pod: PodIdentity, volume: str) -> PodFacts:
        """The pod as the API server has it now. `volume` is the volume's name in the pod's spec."""

    async def tier(self, namespace: str, name: str) -> KVCacheTier:
        """The tier as the API server has it now."""

    async def node_labels(self) -> Mapping[str, str]:
        """Labels of this node's Node object."""

    async def recorded(self, volume_id: str) -> None:
        """Return once the volume is on record in the API: nothing may be written in it before."""


@dataclass(frozen=True)
class Context:
    """What publishing and unpublishing work with."""

    node: Node
    guards: Guards
    cluster: Cluster
    threads: Threads
    log: Log
