"""kvtier on a real node, installed by Helm, and what a test does with it: a tier, a pod of it, and what is left of both."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import images
from api_client import Api, Json, Refused, tier
from controlplane import binary, wait_until
from raw_bytes import hits_in_file, hits_in_folder

from live_logs import whole_lines
from node import Node

sys.path.insert(0, str(images.WORKLOADS))

from canaries import KINDS, canary

__all__ = ["ERASURES", "EVENTS", "NAMESPACE", "RELEASE", "TIERS", "VOLUMES", "Installed", "Use"]

RELEASE, NAMESPACE = "kvtier", "kvtier-system"
CHART = Path(__file__).resolve().parents[2] / "charts" / "kvtier"
TIERS, VOLUMES, ERASURES = "kvcachetiers", "kvcachevolumes", "kvcacheerasures"
_OF_USE = frozenset({"StoreCreated", "StoreInUse"})
EVENTS = _OF_USE | {"Erased"}
_AGENT = "app.kubernetes.io/component=node"
_VALUES = {
    "image.registry": images.REGISTRY,
    "image.pullPolicy": "Never",
    "controller.image.tag": images.TAG,
    "node.image.tag": images.TAG,
    "drain.timeoutSeconds": "15",
}


class Installed:
    """A release of the chart. `use` begins a tier with a pod."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.data = node.base / "lib" / "kvtier"
        """What kvtier has on the node's disk: `tiers` and `state`, outside of the node's mounts."""
        self._ending: set[str] = set()

    def helm(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(binary("helm")), "--kubeconfig", str(self.node.plane.admin), "-n", NAMESPACE, *arguments]
        env = os.environ | {"HELM_CACHE_HOME": f"{self.node.base}/helm", "HELM_CONFIG_HOME": f"{self.node.base}/helm"}
        env |= {"HELM_DATA_HOME": f"{self.node.base}/helm"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=env)
        assert not check or done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}\n{self.describe()}"
        return done

    def install(self) -> None:
        values = [part for name, value in _VALUES.items() for part in ("--set", f"{name}={value}")]
        self.helm("install", RELEASE, str(CHART), "--create-namespace", "--wait", "--timeout", "6m", *values)
        self.wait_agent()

    def describe(self) -> str:
        """What a person would look at first."""
        said = [
            self.node.kubectl("-n", NAMESPACE, *arguments, check=False).stdout[-6000:]
            for arguments in (
                ("get", "pods", "-o", "wide"),
                ("describe", "pods"),
                ("logs", "ds/kvtier-node", "--tail=60"),
            )
        ]
        return "\n".join(said)

    def term(self) -> str:
        """Of the controller that leads: who, and which one of all terms."""
        lease = self.node.kubectl("-n", NAMESPACE, "get", "lease", "kvtier-controller", "-o", "json").stdout
        spec = json.loads(lease)["spec"]
        return f"{spec['leaseTransitions']} {spec['holderIdentity']}"

    # -- the agent

    def agent_pod(self) -> Json | None:
        found = json.loads(self.node.kubectl("-n", NAMESPACE, "get", "pods", "-l", _AGENT, "-o", "json").stdout)[
            "items"
        ]
        living = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return living[0] if living else None

    def agent_pid(self) -> int:
        """In the node's PID namespace."""
        pod = self.agent_pod()
        assert pod is not None
        return self.container_pid(pod)

    def container_pid(self, pod: Json) -> int:
        """Of the pod's only container, which runs. Raises KeyError."""
        (status,) = pod["status"]["containerStatuses"]
        return self.node.tasks()[status["containerID"].removeprefix("containerd://")]

    def agent_is_ready(self) -> bool:
        """By kubelet's probe: what is asked here is as old as that, and a machine that is busy may have missed one."""
        pod = self.agent_pod()
        conditions = pod["status"].get("conditions", []) if pod else []
        return any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

    def agent_restarts(self) -> int:
        pod = self.agent_pod()
        return sum(status["restartCount"] for status in (pod or {}).get("status", {}).get("containerStatuses", []))

    def agent_said(self, event: str) -> list[Json]:
        """Lines of that event in the logs of the agents that there are and were, from kubelet's own files.

        kubelet removes those of the older ones: there may be fewer of them later.
        """
        found = []
        for path in self.node.base.glob(f"log/pods/{NAMESPACE}_kvtier-node-*/agent/*.log"):
            found += [line for line in logged(path) if line["event"] == event]
        return sorted(found, key=lambda it: str(it["time"]))

    def wait_agent(self, *, restarts: int = 0) -> None:
        wait_until(
            "the agent is ready", lambda: self.agent_restarts() >= restarts and self.agent_is_ready(), limit_s=180
        )

    @contextlib.contextmanager
    def without_agent(self) -> Iterator[None]:
        """No agent's pod on the node, as when its image cannot be had."""
        self._select("kvtier.test/nowhere", "true")
        wait_until("the agent is gone", lambda: self.agent_pod() is None)
        wait_until(
            "its container is gone",
            lambda: not self.node.kubectl("-n", NAMESPACE, "get", "pods", "-l", _AGENT, "-o", "name").stdout,
        )
        try:
            yield
        finally:
            self.bring_agent_back()
            self.wait_agent()

    def bring_agent_back(self) -> None:
        self._select("kvtier.test/nowhere", None)

    def _select(self, label: str, value: str | None) -> None:
        patch = {"spec": {"template": {"spec": {"nodeSelector": {label: value}}}}}
        self.node.kubectl("-n", NAMESPACE, "patch", "daemonset", "kvtier-node", "--type=merge", "-p", json.dumps(patch))

    def restart_agent(self) -> None:
        """A new container in the same pod, by SIGKILL."""
        restarts = self.agent_restarts()
        self.node.kill(self.agent_pid())
        self.wait_agent(restarts=restarts + 1)

    @contextlib.contextmanager
    def disk_of_its_own(self, size_bytes: int) -> Iterator[Path]:
        """Everything of kvtier's, state and tiers, on a new file system of that size. No volume may be in use, before and after."""
        image, where = self.node.base / "disk.img", "/var/lib/kvtier"
        with image.open("wb") as file:
            file.truncate(size_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
        usual = self.data
        with contextlib.ExitStack() as stack:
            stack.callback(image.unlink)
            self.node.run_inside("mount", "-o", "loop", str(image), where)
            stack.callback(self.restart_agent)
            stack.callback(self.node.run_inside, "umount", "--lazy", where)
            self.data = self.node.inside / where[1:]
            stack.callback(setattr, self, "data", usual)
            for name in ("state", "tiers"):  # kubelet made them when it started the pod
                (self.data / name).mkdir(mode=0o755)
            self.restart_agent()
            yield self.data
            self.settle()

    # -- uses

    @contextlib.contextmanager
    def use(self, **options: Any) -> Iterator[Use]:
        """A namespace with a tier and a pod, deleted in the end; `settle` sees it go."""
        namespace = f"t-{secrets.token_hex(4)}"
        with self.node.plane.http() as client:
            api = Api(client, namespace)
            api.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            use = Use(self, api, secrets.token_hex(8), **options)
            try:
                yield use
            finally:
                use.end()
                self._ending.add(namespace)

    def settle(self) -> None:
        """Wait until every namespace of an earlier use is gone, with all that was in it."""
        with self.node.plane.http() as client:
            api = Api(client, "default")
            for namespace in sorted(self._ending):
                wait_until(
                    f"namespace {namespace} is gone",
                    lambda name=namespace: api.find("namespaces", name) is None,  # type: ignore[misc]
                    limit_s=240,
                )
                self._ending.discard(namespace)


@dataclass
class Use:
    """One tier and one pod of it, by label alone: the volume is injected."""

    installed: Installed
    api: Api
    seed: str
    plain: bool = True
    restart: str = "Never"
    workload: str = "engine_writer.py"
    pod_name: str = "engine"
    pod: Json = field(default_factory=dict)
    volume: str = ""
    _images: list[int] = field(default_factory=list)
    _term: str = ""
    _not_told: frozenset[str] = frozenset()
    """Events of the volume's use that nobody tells: another controller began to lead meanwhile."""

    @property
    def node(self) -> Node:
        return self.installed.node

    @property
    def texts(self) -> dict[str, bytes]:
        return {kind: canary(self.seed, kind) for kind in KINDS}

    # -- making it

    def declare(self, **spec: Any) -> Json:
        """As a person does: `kubectl apply`. The API server may not serve the chart's kinds and policies at once."""
        name = f"/var/lib/kvtier/tiers/{self.api.namespace}"
        body = tier("chat", sizePerRank="1Mi", slotSize="64Ki", path=name, encryption={"backend": "Fscrypt"}, **spec)
        self.node.kubectl("-n", self.api.namespace, "apply", "-f", "-", stdin=json.dumps(body))
        # What happens while no controller leads has no event of its own; after a machine's start it takes a while.
        self.wait(
            "a controller looked at the tier", lambda: bool(self.api.get(TIERS, "chat").get("status")), limit_s=180
        )
        self._term = self.installed.term()
        wait_until("the service account", lambda: self._account() is not None)
        return self.api.get(TIERS, "chat")

    def _account(self) -> Json | None:
        path = f"/api/v1/namespaces/{self.api.namespace}/serviceaccounts/default"
        answer = self.api.client.get(path)
        return answer.json() if answer.status_code == 200 else None

    def start(self) -> None:
        """A labelled pod, until it has written."""
        self.create()
        self.wait_started()

    def wait_started(self) -> None:
        """Until it has written, and everybody knows: kubelet has told of its container, and the controller of its volume."""
        self.wait("the pod has written", self.has_written, limit_s=180)
        self.wait("kubelet has told of it", self._runs)
        self.look_up()
        self.wait("the controller has told of it", lambda: self._told_of_use() or self._term_ended())
        self._not_told = _OF_USE - self.reasons()
        self._images.append(os.open(self.image, os.O_RDONLY | os.O_DIRECT))

    def create(self) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.pod_name, "labels": {"kvtier.dev/tier": "chat"}},
            "spec": {
                "restartPolicy": self.restart,
                "terminationGracePeriodSeconds": 5,
                "automountServiceAccountToken": False,
                "securityContext": {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
                "volumes": [{"name": "outside", "emptyDir": {}}],
                "containers": [
                    {
                        "name": "engine",
                        "image": images.WORKLOAD,
                        "imagePullPolicy": "Never",
                        "command": ["python", f"/workloads/{self.workload}"],
                        "env": [
                            {"name": "SEED", "value": self.seed},
                            *([{"name": "PLAIN", "value": "1"}] if self.plain else []),
                        ],
                        "volumeMounts": [{"name": "outside", "mountPath": "/outside"}],
                    }
                ],
            },
        }
        self.pod = self.api.create("pods", body)

    def said(self, name: str = "*") -> list[Json]:
        """What the pod's processes said, one after another, from kubelet's own log files: a file for each container."""
        folder = f"{self.api.namespace}_{self.pod_name}_{self.uid}"
        lines: list[Json] = []
        for path in sorted((self.node.base / "log" / "pods" / folder / "engine").glob(f"{name}.log")):
            lines += logged(path)
        return lines

    def said_by_the_next(self, pid: int) -> list[Json]:
        """What the container that runs now has said, if it is not that of `pid`, and has written; else nothing.

        kubelet keeps no log of those before the last two.
        """
        (status,) = self.refreshed()["status"].get("containerStatuses") or [{}]
        if "running" not in status.get("state", {}):
            return []
        said = self.said(str(status["restartCount"]))
        written = bool(said) and "written" in said[-1]
        return (
            said
            if written and self.node.tasks().get(status["containerID"].removeprefix("containerd://"), pid) != pid
            else []
        )

    def has_written(self, *, times: int = 1) -> bool:
        said = self.said()
        phase = self.refreshed().get("status", {}).get("phase")
        if phase == "Failed":
            raise AssertionError(f"{self.describe()}\n{said}")
        return sum("written" in line for line in said) >= times

    def describe(self) -> str:
        what = self.node.kubectl("-n", self.api.namespace, "describe", "pods", check=False).stdout
        logs = self.node.kubectl("-n", self.api.namespace, "logs", self.pod_name, check=False).stdout
        return f"{what[-3000:]}\n{logs[-3000:]}\n{self.installed.describe()}"

    def refreshed(self) -> Json:
        self.pod = self.api.find("pods", self.pod_name) or self.pod
        return self.pod

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    def look_up(self) -> Json:
        """The pod's volume that is not final."""
        (found,) = [
            each
            for each in self.api.list(VOLUMES)
            if each["spec"]["consumer"]["podUid"] == self.uid and not _final(each)
        ]
        self.volume = found["metadata"]["name"]
        self.node.volumes.add(self.volume)
        return found

    def container_pid(self) -> int:
        """Of the container that runs, by kubelet's word and by containerd's: the one may be a moment behind the other."""
        found: list[int] = []

        def is_known() -> bool:
            try:
                found[:] = [self.installed.container_pid(self.refreshed())]
            except KeyError:
                return False
            return True

        self.wait("a container runs", is_known)
        return found[0]

    def _runs(self) -> bool:
        return self.refreshed()["status"].get("phase") == "Running"

    def _told_of_use(self) -> bool:
        return self.reasons() >= _OF_USE

    def _term_ended(self) -> bool:
        """Whether the controller that saw the tier leads no more: what happens while none does has no event of its own."""
        return self.installed.term() != self._term

    # -- what is there

    @property
    def place(self) -> Path:
        """The volume's place on the disk, as it is outside of the node's mounts."""
        return self.installed.data / "tiers" / self.api.namespace / self.volume

    @property
    def image(self) -> Path:
        return self.place / "volume.img"

    def hits(self) -> dict[str, int]:
        """In the backing image (also after its name is gone) and in every file of kubelet's, of the tiers' and of the logs."""
        found = dict.fromkeys(KINDS, 0)
        lib = self.node.base / "lib"
        parts = [
            hits_in_folder(folder, self.texts)
            for folder in (lib / "kubelet", self.installed.data, self.node.base / "log")
        ]
        parts += [hits_in_file(fd, self.texts) for fd in self._images]
        for part in parts:
            for kind, count in part.items():
                found[kind] += count
        return found

    def condition(self, kind: str) -> tuple[str, str]:
        status = (self.api.find(TIERS, "chat") or {}).get("status") or {}
        return next(
            ((it["status"], it["reason"]) for it in status.get("conditions", []) if it["type"] == kind), ("", "")
        )

    def reasons(self) -> set[str]:
        return {
            event["reason"]
            for event in self.api.list("events")
            if event.get("reportingController", "").startswith("kvtier")
        }

    def kubelets_reasons(self) -> set[str]:
        """Of the pod's events, which say what `kubectl describe pod` says."""
        return {event["reason"] for event in self.api.list("events") if event["regarding"].get("uid") == self.uid}

    # -- its end

    def expect_erased(self, *triggers: str, told: frozenset[str] = EVENTS) -> Json:
        """Every claim of an erasure: a complete record, a receipt that the node's chain holds, nothing left and nothing found.

        While the tier is there: its volume is `Erased`, and `Scrubbed` is True. `told` are the events that somebody can see.
        """
        self.wait("the record of the erasure", lambda: self.record() is not None, limit_s=180)
        if self.api.find(TIERS, "chat") is not None:
            self.wait(f"{self.volume} is Erased", lambda: _state(self.api.find(VOLUMES, self.volume)) == "Erased")
            self.wait("Scrubbed", lambda: self.condition("Scrubbed") == ("True", "NothingLeft"))
            self.wait("no residual bytes", lambda: self.api.get(TIERS, "chat")["status"].get("residualBytes") == 0)
        record = self.record()
        assert record is not None
        (result,) = record["status"]["volumes"]
        assert result["verified"], result
        assert record["spec"]["trigger"] in triggers, record["spec"]
        receipt = self.receipts()[result["receiptId"]]
        assert receipt["volume_id"] == self.volume
        self.wait("the events say it", lambda: told - self._not_told <= self.reasons())
        assert {kind: count for kind, count in self.hits().items() if kind != "control"} == {"prompt": 0, "plain": 0}
        self.wait("its directory is gone", lambda: not self.place.exists())
        return record

    def record(self) -> Json | None:
        """The complete record of the volume's erasure."""
        label = "kvtier.dev/volume"
        found = [it for it in self.api.list(ERASURES) if it["metadata"].get("labels", {}).get(label) == self.volume]
        assert len(found) < 2, found
        return next((it for it in found if (it.get("status") or {}).get("state") == "Complete"), None)

    def receipts(self) -> dict[str, Json]:
        """By id, in the order of the chain, once the whole of it was verified by kvtier's own command."""
        command = [sys.executable, "-m", "kvtier_cli.main", "receipts"]
        where = ["--state-dir", "/var/lib/kvtier/state", "-o", "json"]
        self.node.run_inside(*command, "verify", *where)
        listed = self.node.run_inside(*command, "list", "--limit", "0", *where)
        return {receipt["id"]: receipt for receipt in json.loads(listed)}

    def end(self) -> None:
        for fd in self._images:
            os.close(fd)
        self._images.clear()
        with contextlib.suppress(Refused):  # gone already
            self.api.delete("namespaces", self.api.namespace)

    def wait(self, what: str, holds: Callable[[], bool], *, limit_s: float = 120) -> None:
        try:
            wait_until(what, holds, limit_s=limit_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from error


def logged(path: Path) -> list[Json]:
    """JSON lines of a container, from kubelet's own file of it: time, stream and a mark stand before each."""
    lines = (line.split(" ", 3)[3] for line in whole_lines(path))
    return [json.loads(line) for line in lines if line.startswith("{")]


def _state(volume: Json | None) -> str:
    return str(((volume or {}).get("status") or {}).get("state", ""))


def _final(volume: Json) -> bool:
    return _state(volume) in ("Erased", "Abandoned")
