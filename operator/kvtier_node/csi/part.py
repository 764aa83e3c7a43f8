"""What `kvtier node --csi` adds to the agent: the CSI service and the cluster's side, with one life.

The agent's own work never waits for it: recovery and erasing go on while kubelet's directory or the API server is away.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvtier_api.errors import KvtierError
from kvtier_node.cluster.client import ClusterOptions, connect
from kvtier_node.cluster.part import ClusterPart
from kvtier_node.cluster.reporting import Reporter
from kvtier_node.csi.server import CsiOptions, CsiService
from kvtier_node.csi.surroundings import Guards
from kvtier_node.event_log import Log
from kvtier_node.ledger import Transition
from kvtier_node.node import Node
from kvtier_node.tasks import end_tasks
from kvtier_node.threads import Threads

__all__ = ["PodService"]

_RETRY_S: Final = 2.0
_END_S: Final = 5.0


class PodService:
    """`open` before recovery, `serve` after it, `close` at the end. Raises UsageError for a kubeconfig that cannot be used."""

    def __init__(self, csi: CsiOptions, cluster: ClusterOptions, log: Log) -> None:
        self._options = csi
        self._client = connect(cluster)
        self._log = log
        self._reporter = Reporter(log)
        self._recovered = asyncio.Event()
        self._csi: CsiService | None = None
        self._cluster: ClusterPart | None = None
        self._task: asyncio.Task[None] | None = None

    def observe(self, arrow: Transition) -> None:
        """Of the node's ledger, from its opening on."""
        self._reporter.observe(arrow)

    def open(self, node: Node, guards: Guards, threads: Threads) -> None:
        """On the agent's event loop. Publishes nothing yet."""
        self._cluster = ClusterPart(self._client, self._reporter, self._log)
        cluster = self._cluster.start(node, guards, threads)
        self._csi = CsiService(node, self._options, guards=guards, cluster=cluster, threads=threads, log=self._log)
        self._task = asyncio.get_running_loop().create_task(self._run(self._csi))

    def serve(self) -> None:
        """Recovery has finished."""
        self._recovered.set()

    async def _run(self, csi: CsiService) -> None:
        while True:
            try:
                await csi.listen()
                break
            except (KvtierError, OSError) as error:
                self._log.error("cannot-listen", endpoint=self._options.endpoint_path, error=str(error))
                await asyncio.sleep(_RETRY_S)
        await self._recovered.wait()
        csi.serve()

    async def close(self) -> None:
        """Once or twice. Volumes stay as they are."""
        task, csi, cluster = self._task, self._csi, self._cluster
        self._task = self._csi = self._cluster = None
        if task is not None:
            await end_tasks([task], limit_s=_END_S)
        if csi is not None:
            await csi.close()
        if cluster is not None:
            await cluster.close()
