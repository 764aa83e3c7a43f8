"""`kvtier node`: the agent of a host, in the foreground."""

from __future__ import annotations

from typing import Annotated

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
) -> None:
    """Guard the volumes of this host: recover, watch, erase, retry; status, metrics and a log beside it.

    Stopping it (SIGTERM) erases nothing that is in use: the next start takes it over.

    [bold]Examples[/bold]

    $ kvtier node

    $ kvtier node --manifests ./tiers --state-dir ./state --root /mnt/nvme/kv --listen off
    """
    from kvtier_api.errors import BackendUnavailable, UsageError

    if log not in (None, "json", "text"):
        raise UsageError("not a format of log lines", obj=f"--log {log}", remedy="write json or text")
    try:
        from kvtier_node.agent import AgentOptions, run_agent
        from kvtier_node.endpoints import parse_listen
        from kvtier_node.event_log import configure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("aiohttp", "prometheus_client"):
            raise
        raise BackendUnavailable(
            f"the Python package {error.name} is missing", obj="kvtier node", remedy="pip install 'kvtier[node]'"
        ) from error
    options = AgentOptions(
        state_dir=absolute(state_dir),
        roots=root_paths(root),
        manifests=absolute(manifests),
        listen=parse_listen(listen),
        node_name=node_name,
    )
    run_agent(options, configure(as_json=None if log is None else log == "json"))
