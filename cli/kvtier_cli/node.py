"""`kvtier node`: the agent of a host, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_cli.options import (
    DEFAULT_MANIFESTS,
    DEFAULT_STATE_DIR,
    Manifests,
    Roots,
    StateDir,
    absolute,
    root_paths,
)

if TYPE_CHECKING:
    from kvtier_node.agent import PodPart
    from kvtier_node.event_log import Log

__all__ = ["node"]


def node(
    manifests: Manifests = DEFAULT_MANIFESTS,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    root: Roots = None,
    listen: Annotated[
        str,
        typer.Option("--listen", envvar="KVTIER_LISTEN", help="ADDRESS:PORT of /metrics, /healthz, /readyz; or off."),
    ] = "127.0.0.1:9464",
    node_name: Annotated[
        str | None,
        typer.Option("--node-name", envvar="KVTIER_NODE_NAME", help="Name on receipts. [default: host name]"),
    ] = None,
    log: Annotated[
        str | None, typer.Option("--log", metavar="FORMAT", help="json or text. [default: text on a terminal]")
    ] = None,
    csi: Annotated[
        bool, typer.Option("--csi", envvar="KVTIER_CSI", help="Serve the pods of this Kubernetes node.")
    ] = False,
    kubelet_root: Annotated[
        Path,
        typer.Option(
            "--kubelet-root", envvar="KVTIER_KUBELET_ROOT", metavar="DIRECTORY", help="kubelet's --root-dir (--csi)."
        ),
    ] = Path("/var/lib/kubelet"),
    kubeconfig: Annotated[
        str | None,
        typer.Option(
            "--kubeconfig",
            envvar="KVTIER_KUBECONFIG",
            metavar="FILE",
            help="How to reach the API server (--csi). [default: the pod's service account]",
        ),
    ] = None,
) -> None:
    """Guard the volumes of this host: recover, watch, erase, retry; status, metrics and a log beside it.

    Stopping it (SIGTERM) erases nothing that is in use: the next start takes it over.

    [bold]Examples[/bold]

    $ kvtier node

    $ kvtier node --manifests ./tiers --state-dir ./state --root /mnt/nvme/kv --listen off

    $ kvtier node --csi --node-name worker-7 --kubeconfig agent.kubeconfig
    """
    from kvtier_api.errors import BackendUnavailable, UsageError

    if log not in (None, "json", "text"):
        raise UsageError("not a format of log lines", obj=f"--log {log}", remedy="write json or text")
    try:
        from kvtier_node.agent import AgentOptions, run_agent
        from kvtier_node.endpoints import parse_listen
        from kvtier_node.event_log import configure
        from kvtier_node.kernel.capabilities import give_up_others
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("prometheus_client", "structlog"):
            raise
        raise BackendUnavailable(
            f"the Python package {error.name} is missing", obj="kvtier node", remedy="pip install 'kvtier[node]'"
        ) from error
    lines = configure(as_json=None if log is None else log == "json")
    options = AgentOptions(
        state_dir=absolute(state_dir),
        roots=root_paths(root),
        # A cluster's node has its tiers from the API: the default directory is for hosts without one.
        manifests="" if csi and manifests == DEFAULT_MANIFESTS and not manifests.is_dir() else absolute(manifests),
        listen=parse_listen(listen),
        node_name=node_name,
        pods=_pod_service(absolute(kubelet_root), kubeconfig, lines) if csi else None,
    )
    give_up_others()
    run_agent(options, lines)


def _pod_service(kubelet_root: str, kubeconfig: str | None, log: Log) -> PodPart:
    """Raises BackendUnavailable where a package is missing, UsageError for a kubeconfig that cannot be used."""
    from kvtier_api.errors import BackendUnavailable

    try:
        from kvtier_node.cluster.client import ClusterOptions
        from kvtier_node.csi.part import PodService
        from kvtier_node.csi.server import CsiOptions
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("grpc", "google", "lightkube", "httpx2", "msgspec"):
            raise
        raise BackendUnavailable(
            f"the Python package {error.name} is missing", obj="kvtier node --csi", remedy="pip install 'kvtier[node]'"
        ) from error
    return PodService(CsiOptions(kubelet=kubelet_root), ClusterOptions(kubeconfig), log)
