"""Controllers as processes: `python -m kvtier_operator` against a control plane, with their logs and metrics."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx2
from controlplane import ControlPlane, free_ports, wait_until

from live_logs import json_lines

__all__ = ["Controller"]


class Controller:
    """One replica. `namespaces` empty: the whole cluster. The user is of its own, so that the audit log tells it apart."""

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        *,
        lease_namespace: str,
        namespaces: tuple[str, ...] = (),
        arguments: tuple[str, ...] = ("--agent-selector", ""),
    ) -> None:
        self.plane = plane
        self.name = name
        self.user = f"controller-{name}"
        self.kubeconfig = plane.kubeconfig(self.user, ("system:masters",))
        (self.port,) = free_ports(1)
        where = [part for each in namespaces for part in ("--namespace", each)] or ["--all-namespaces"]
        self._arguments = [
            *(sys.executable, "-m", "kvtier_operator", *where, "--lease-namespace", lease_namespace),
            *("--identity", name, "--listen", f"127.0.0.1:{self.port}", "--kubeconfig", str(self.kubeconfig)),
            *arguments,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.plane.log_folder / f"{self.user}.log"

    def __enter__(self) -> Controller:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.process = self.plane.start(self.user, self._arguments)
        wait_until(f"{self.name} serves", self.is_alive, limit_s=120)

    def stop(self, *, kill: bool = False) -> int | None:
        process, self.process = self.process, None
        self.plane.stop(self.user, kill=kill, limit_s=60)
        return process.returncode if process is not None else None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def is_alive(self) -> bool:
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended:\n{self.log.read_text()[-3000:]}")
        try:
            return self._http("/healthz").status_code == 200
        except httpx2.HTTPError:
            return False

    def metric(self, name: str) -> float:
        """A sample by its full name with labels, such as `kvtier_leading`; 0 where there is none."""
        for line in self._http("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == name:
                return float(value)
        return 0.0

    def metrics_text(self) -> str:
        return self._http("/metrics").text

    def leads(self) -> bool:
        return self.is_alive() and self.metric("kvtier_leading") == 1.0

    def wait_leads(self, limit_s: float = 120) -> None:
        wait_until(f"{self.name} leads", self.leads, limit_s=limit_s)

    def said(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        return [line for line in json_lines(self.log) if line.get("event") == event]

    def writes(self, *resources: str) -> list[tuple[str, str, int]]:
        """Writes by the audit log, but for those of the Lease."""
        return [
            write for write in self.plane.writes(self.user, resources=resources) if not write[1].startswith("leases")
        ]

    def _http(self, path: str) -> httpx2.Response:
        return httpx2.get(f"http://127.0.0.1:{self.port}{path}", timeout=30, trust_env=False)
