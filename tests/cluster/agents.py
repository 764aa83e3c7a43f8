"""The node agent as a process against a control plane, with the rights that the chart gives it, and kubelet's calls by hand."""

from __future__ import annotations

import contextlib
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_client import Api, Json
from controlplane import ControlPlane

from csi_agent import NODE, Kubelet, Pod

__all__ = ["AGENT", "RULES", "ClusterKubelet", "allow_agent", "running_kubelet"]

AGENT = "kvtier-agent"
RULES = [
    {"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get"]},
    {"apiGroups": ["kvtier.dev"], "resources": ["kvcachetiers"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["kvtier.dev"], "resources": ["kvcachevolumes"], "verbs": ["list", "watch", "create", "patch"]},
    {"apiGroups": ["kvtier.dev"], "resources": ["kvcachevolumes/status"], "verbs": ["patch"]},
    {"apiGroups": ["kvtier.dev"], "resources": ["kvcacheerasures"], "verbs": ["list", "watch", "create", "patch"]},
    {"apiGroups": ["kvtier.dev"], "resources": ["kvcacheerasures/status"], "verbs": ["patch"]},
    {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
]
"""What the agent may do, and all that it needs: these tests run with it."""


class ClusterKubelet(Kubelet):
    """The same kubelet's side, with the real command line and the real API server."""

    def __init__(self, base: Path, kubeconfig: Path, api: Api) -> None:
        super().__init__(base)
        self._kubeconfig = kubeconfig
        self.api = api

    def command(self, die: str | None) -> list[str]:
        assert die is None
        options = {
            "--state-dir": self.base / "state",
            "--root": self.base / "tiers",
            "--manifests": self.base / "manifests",
            "--kubelet-root": self.root,
            "--kubeconfig": self._kubeconfig,
            "--node-name": NODE,
            "--listen": "off",
            "--log": "json",
        }
        words = [str(word) for pair in options.items() for word in pair]
        return [sys.executable, "-m", "kvtier_cli.main", "node", "--csi", *words]

    def make_tier(self, name: str = "chat", **spec: Any) -> Json:
        body = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": name, "finalizers": ["kvtier.dev/erase"]},
            "spec": {
                "sizePerRank": "1Mi",
                "slotSize": "64Ki",
                "ranks": 2,
                "path": f"{self.base}/tiers/{name}",
                "encryption": {"backend": "Fscrypt"},
                **spec,
            },
        }
        return self.api.create("kvcachetiers", body)

    def make_pod(self, *, tier: str = "chat", labels: dict[str, str] | None = None, **security: Any) -> Pod:
        name = f"engine-{secrets.token_hex(3)}"
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {"app": "vllm"}},
            "spec": {
                "nodeName": NODE,
                "automountServiceAccountToken": False,
                "securityContext": {"runAsUser": 1000, "fsGroup": 1000, **security},
                "containers": [{"name": "vllm", "image": "none", "volumeMounts": [{"name": "kv", "mountPath": "/kv"}]}],
                "volumes": [{"name": "kv", "csi": {"driver": "node.kvtier.dev", "volumeAttributes": {"tier": tier}}}],
            },
        }
        made = self.api.create("pods", body)
        return Pod(uid=made["metadata"]["uid"], name=name, namespace=self.api.namespace, tier=tier)

    def volume_of(self, pod: Pod) -> Json | None:
        return self.api.find("kvcachevolumes", self.row_of(pod).volume_id)

    def state_of(self, pod: Pod) -> str | None:
        found = self.volume_of(pod)
        return None if found is None else found.get("status", {}).get("state")

    def records(self) -> list[Json]:
        found = self.api.list("kvcacheerasures")
        return [it for it in found if "kvtier.dev/volume" in it["metadata"].get("labels", {})]


def allow_agent(plane: ControlPlane) -> Path:
    """The agent's kubeconfig, and its rights; the Node object that it runs on."""
    with plane.http() as client:
        rbac = "/apis/rbac.authorization.k8s.io/v1"
        meta = {"metadata": {"name": AGENT}}
        role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", **meta, "rules": RULES}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": AGENT}
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            **meta,
            "roleRef": reference,
            "subjects": [{"kind": "User", "name": AGENT, "apiGroup": "rbac.authorization.k8s.io"}],
        }
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "labels": {"disk": "nvme"}}}
        for path, body in (
            (f"{rbac}/clusterroles", role),
            (f"{rbac}/clusterrolebindings", binding),
            ("/api/v1/nodes", node),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code in (201, 409), answer.text
        info = {
            "nodeInfo": {
                "systemUUID": "EC2A1B2C-0000",
                "bootID": "b",
                "machineID": "m",
                **dict.fromkeys(
                    (
                        "architecture",
                        "containerRuntimeVersion",
                        "kernelVersion",
                        "kubeProxyVersion",
                        "kubeletVersion",
                        "operatingSystem",
                        "osImage",
                    ),
                    "x",
                ),
            }
        }
        answer = client.patch(
            f"/api/v1/nodes/{NODE}/status",
            json={"status": info},
            headers={"Content-Type": "application/merge-patch+json"},
        )
        assert answer.status_code == 200, answer.text
    return plane.kubeconfig(AGENT)


@contextlib.contextmanager
def running_kubelet(api: Api, agent_config: Path) -> Iterator[ClusterKubelet]:
    """With its agent; whatever that leaves of mounts and loop devices is taken away at the end."""
    base = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    base.chmod(0o755)
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    api.request("POST", f"/api/v1/namespaces/{api.namespace}/serviceaccounts", json=account)
    made = ClusterKubelet(base, agent_config, api)
    try:
        made.start_agent()
        yield made
    finally:
        made.clean_up()
