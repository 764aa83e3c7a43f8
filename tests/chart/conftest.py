"""Fixtures: Helm, and one control plane for the session on which the chart is installed by Helm itself."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from requirements import missing

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cluster")]

import build_tools  # noqa: E402
from api_client import Api, Refused, tier  # noqa: E402
from controlplane import TOOLS, ControlPlane, binary, wait_until  # noqa: E402
from rendering import CHART, NAMESPACE, REGISTRY, RELEASE, Json, Rendered, helm_template  # noqa: E402


def tool(name: str) -> Path:
    found = binary(name)
    if found is None:
        missing(
            f"{name} ({'tests/cluster/build_tools.py --floor' if build_tools.on_floor() else 'make cluster-tools'})"
        )
    return found


@pytest.fixture(scope="session")
def helm() -> Path:
    return tool("helm")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return tool("kubectl")


@pytest.fixture(scope="session")
def render(helm: Path) -> Callable[..., Rendered]:
    known: dict[str, Rendered] = {}

    def of(values: Json | None = None, **more: Any) -> Rendered:
        key = json.dumps([values, more], sort_keys=True)
        if key not in known:
            known[key] = helm_template(helm, values, **more)
        return known[key]

    return of


@pytest.fixture(scope="session")
def default(render: Callable[..., Rendered]) -> Rendered:
    """Default values on the newest Kubernetes."""
    return render()


@pytest.fixture(scope="session")
def bare_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    for name in TOOLS:
        tool(name)
    with ControlPlane(tmp_path_factory.mktemp("chart") / "run") as plane:
        yield plane


@dataclass(frozen=True)
class Cluster:
    """The chart, installed. `user` speaks as somebody else, by impersonation: RBAC and policies apply to that one."""

    plane: ControlPlane
    kubeconfig: Path
    helm: Path
    kubectl_path: Path

    def run_helm(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.plane.folder)}
        return subprocess.run([str(self.helm), *arguments], env=env, capture_output=True, text=True, check=False)

    def kubectl(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [str(self.kubectl_path), "--kubeconfig", str(self.kubeconfig), *arguments]
        env = {**os.environ, "HOME": str(self.plane.folder)}
        return subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, check=False)


INTO = (str(CHART), "--namespace", NAMESPACE, "--set", f"image.registry={REGISTRY}")


def service_account(name: str) -> str:
    return f"system:serviceaccount:{NAMESPACE}:{RELEASE}-{name}"


@pytest.fixture(scope="session")
def cluster(bare_plane: ControlPlane, helm: Path, kubectl: Path) -> Cluster:
    """By `helm install`, with nothing that would run: there is no scheduler. Waits until the policies act."""
    cluster = Cluster(bare_plane, bare_plane.admin, helm, kubectl)
    done = cluster.run_helm("install", RELEASE, *INTO, "--create-namespace")
    assert done.returncode == 0, done.stderr
    assert ("Nothing is injected" in done.stdout) == build_tools.on_floor(), "off below 1.36, and said so"
    with bare_plane.http() as client:
        api = Api(client, "default")
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        api.request("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", json=account)

        def tiers_are_policed() -> bool:
            bad = tier("probe", path="/elsewhere/a")
            answer = client.post(f"{api.path('kvcachetiers')}?dryRun=All", json=bad)
            return answer.status_code == 403 and "no allowed root" in answer.text

        def pods_are_injected() -> bool:
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "probe", "labels": {"kvtier.dev/tier": "probe"}},
                "spec": {"containers": [{"name": "c", "image": "i"}]},
            }
            answer = client.post(f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", json=pod)
            return "node.kvtier.dev" in answer.text

        wait_until("the policies act", tiers_are_policed)
        _wait_newest_policy(api)
        if not build_tools.on_floor():
            wait_until("injection acts", pods_are_injected)
    return cluster


def _wait_newest_policy(api: Api) -> None:
    """Policies begin to act together, once a second, those that the API server knows by then: one that is made now is the last."""
    name, root = "last-of-all", "/apis/admissionregistration.k8s.io/v1"
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": f"object.metadata.name != '{name}'", "message": "it acts"}],
    }
    kind, plural = "ValidatingAdmissionPolicy", "validatingadmissionpolicies"
    binding = {"policyName": name, "validationActions": ["Deny"]}
    api.request("POST", f"{root}/{plural}", json={**head, "kind": kind, "spec": policy})
    api.request(
        "POST", f"{root}/validatingadmissionpolicybindings", json={**head, "kind": f"{kind}Binding", "spec": binding}
    )
    probe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}
    url = "/api/v1/namespaces/default/configmaps?dryRun=All"
    wait_until("the newest policy acts", lambda: "it acts" in api.client.post(url, json=probe).text)
    for each in ("validatingadmissionpolicybindings", plural):
        api.request("DELETE", f"{root}/{each}/{name}")


@pytest.fixture
def injection() -> None:
    """For tests of what a MutatingAdmissionPolicy does."""
    if build_tools.on_floor():
        pytest.skip(f"MutatingAdmissionPolicy is v1 from Kubernetes 1.36 on: injection is off on {build_tools.FLOOR}")


@dataclass(frozen=True)
class As:
    """One namespace, and whoever is asked to act in it."""

    plane: ControlPlane
    namespace: str

    def admin(self) -> Api:
        return self._api({})

    def user(self, name: str, *groups: str, node: str | None = None) -> Api:
        headers = [("Impersonate-User", name)] + [
            ("Impersonate-Group", group) for group in (*groups, "system:authenticated")
        ]
        if node is not None:
            headers.append(("Impersonate-Extra-authentication.kubernetes.io%2Fnode-name", node))
        return self._api(headers)

    def agent(self, node: str | None) -> Api:
        return self.user(service_account("node"), "system:serviceaccounts", node=node)

    def controller(self) -> Api:
        return self.user(service_account("controller"), "system:serviceaccounts")

    def _api(self, headers: Any) -> Api:
        manager = self.plane.http()
        client = manager.__enter__()
        _OPEN.append(manager)
        client.headers.update(headers) if isinstance(headers, dict) else _add(client, headers)
        return Api(client, self.namespace)


_OPEN: list[Any] = []


def _add(client: Any, headers: list[tuple[str, str]]) -> None:
    client.headers = type(client.headers)([*client.headers.multi_items(), *headers])


@pytest.fixture
def people(cluster: Cluster) -> Iterator[As]:
    """A new namespace with a service account for its pods."""
    namespace = f"t-{secrets.token_hex(4)}"
    found = As(cluster.plane, namespace)
    api = found.admin()
    api.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", json=account)
    yield found
    while _OPEN:
        _OPEN.pop().__exit__(None, None, None)


@pytest.fixture
def refused() -> Callable[[Callable[[], Any]], str]:
    """The API server's words when it refuses."""

    def words(act: Callable[[], Any]) -> str:
        with pytest.raises(Refused) as caught:
            act()
        assert caught.value.code in (403, 422), caught.value
        return caught.value.message

    return words
