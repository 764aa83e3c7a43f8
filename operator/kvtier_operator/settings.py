"""What the controller is started with: flags, checked once, and the same for its whole life. No flag holds a secret."""

from __future__ import annotations

import argparse
import re
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import UsageError
from kvtier_operator.history import DEFAULT_LIMIT

__all__ = ["Settings", "parse_settings"]

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
AGENT_SELECTOR: Final = "app.kubernetes.io/name=kvtier,app.kubernetes.io/component=node"


@dataclass(frozen=True)
class Settings:
    """`namespaces` empty: the whole cluster. `agent_selector` empty: agents' pods are not looked at."""

    namespaces: tuple[str, ...]
    agent_namespace: str
    agent_selector: str
    lease_namespace: str
    lease_name: str
    identity: str
    host: str
    port: int
    kubeconfig: str | None
    history_limit: int
    resync_s: float
    stalled_s: float
    log_format: str
    log_level: str

    @property
    def watched_namespaces(self) -> tuple[str, ...]:
        """With the agents' own namespace, where their pods are looked at."""
        if not self.namespaces:
            return ()
        more = (self.agent_namespace,) if self.agent_selector and self.agent_namespace else ()
        return tuple(dict.fromkeys((*self.namespaces, *more)))


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Raises UsageError. `--help` exits, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="kvtier_operator", description="The controller of kvtier: one active replica, others wait for its Lease."
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--all-namespaces", action="store_true", help="watch tiers in the whole cluster")
    where.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="watch tiers here only (may be repeated)"
    )
    parser.add_argument("--lease-namespace", required=True, metavar="NAME", help="namespace of the Lease")
    parser.add_argument("--lease-name", default="kvtier-controller", metavar="NAME")
    parser.add_argument(
        "--identity", default=socket.gethostname(), help="name in the Lease; the process adds its own end"
    )
    parser.add_argument("--listen", default="0.0.0.0:8080", metavar="HOST:PORT", help="for /healthz, /readyz, /metrics")
    parser.add_argument("--kubeconfig", metavar="FILE", help="left out: the pod's service account, or $KUBECONFIG")
    parser.add_argument("--agent-namespace", default="", metavar="NAME", help="left out: the Lease's")
    parser.add_argument(
        "--agent-selector",
        default=AGENT_SELECTOR,
        metavar="LABELS",
        help="of the node agents' pods; empty: do not look",
    )
    parser.add_argument(
        "--history-limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="complete erasures, and erased volumes, kept of each tier",
    )
    parser.add_argument("--resync", type=float, default=300.0, metavar="SECONDS", help="between two full lists")
    parser.add_argument("--stalled", type=float, default=60.0, metavar="SECONDS", help="without a reconcile: not alive")
    parser.add_argument("--log-format", choices=("json", "text"), default="json")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    options = parser.parse_args(arguments)
    for name in (*options.namespace, options.lease_namespace, options.agent_namespace or "default"):
        if not _NAMESPACE.fullmatch(name):
            raise UsageError("not a name of a namespace", obj=repr(name), remedy="use a-z, 0-9 and '-'")
    for flag, value, least in (
        ("--history-limit", options.history_limit, 1),
        ("--resync", options.resync, 5),
        ("--stalled", options.stalled, 15),
    ):
        if value < least:
            raise UsageError(f"less than {least}", obj=f"{flag}={value:g}", remedy=f"write {least} or more")
    host, port = _address(options.listen)
    return Settings(
        namespaces=tuple(dict.fromkeys(options.namespace)),
        agent_namespace=options.agent_namespace or options.lease_namespace,
        agent_selector=options.agent_selector.strip(),
        lease_namespace=options.lease_namespace,
        lease_name=options.lease_name,
        # A container that restarts in its pod has the pod's name again, and must not take itself for the holder.
        identity=f"{options.identity}_{secrets.token_hex(4)}",
        host=host,
        port=port,
        kubeconfig=options.kubeconfig,
        history_limit=options.history_limit,
        resync_s=options.resync,
        stalled_s=options.stalled,
        log_format=options.log_format,
        log_level=options.log_level,
    )


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise UsageError("not HOST:PORT", obj=f"--listen={text}", remedy="write one such as 0.0.0.0:8080 or [::]:8080")
    return host.strip("[]"), int(port)
