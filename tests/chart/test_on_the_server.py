"""Everything that the chart renders, on the real API server, and the chart's controller at work under its own rights."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from typing import Any

import build_tools
import httpx2
import pytest
import yaml
from api_client import node, tier, volume, volume_status
from controlplane import free_ports, wait_until
from rendering import CHART, FLOOR, NAMESPACE, NEW, Json, Rendered, python
from test_manifests import SETS

pytestmark = pytest.mark.slow
OTHERS_KINDS = "monitoring.coreos.com/v1"


@pytest.mark.parametrize("name", SETS)
def test_every_object_is_taken_by_the_api_server(name: str, cluster: Any, render: Callable[..., Rendered]) -> None:
    """Server-side apply for show, unknown and duplicate fields refused; hooks and the test's pod too."""
    for namespace in SETS[name].get("controller", {}).get("watchNamespaces", ()):
        cluster.kubectl("create", "namespace", namespace)
    rendered = render(SETS[name], kubernetes=FLOOR if build_tools.on_floor() else NEW)
    objects = [it for it in rendered.objects if it["apiVersion"] != OTHERS_KINDS]
    done = cluster.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=yaml.safe_dump_all(objects),
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    assert len(done.stdout.splitlines()) == len(objects)


def as_pod(spec: Json) -> Json:
    named = {"name": f"p-{secrets.token_hex(4)}"}
    spec = {key: value for key, value in spec.items() if key != "serviceAccountName"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": spec}


@pytest.mark.parametrize("level", ["restricted", "privileged"])
def test_only_the_agent_needs_a_privileged_namespace(level: str, people: Any, default: Rendered) -> None:
    api = people.admin()
    api.request(
        "PATCH",
        f"/api/v1/namespaces/{people.namespace}",
        json={"metadata": {"labels": {"pod-security.kubernetes.io/enforce": level}}},
        headers={"Content-Type": "application/merge-patch+json"},
    )

    def is_taken(spec: Json) -> bool:
        answer = api.client.post(f"{api.path('pods')}?dryRun=All", json=as_pod(spec))
        assert answer.status_code in (201, 403), answer.text
        return answer.status_code == 201

    specs = default.pod_specs()
    if level == "restricted":  # admission hears of the label a moment later
        wait_until("the level acts", lambda: not is_taken(specs["DaemonSet/kvtier-node"]))
    taken = {name: is_taken(spec) for name, spec in specs.items()}
    wanted = dict.fromkeys(taken, True) | ({} if level == "privileged" else {"DaemonSet/kvtier-node": False})
    assert taken == wanted


def test_an_upgrade_by_helm_is_taken(cluster: Any) -> None:
    done = cluster.run_helm(
        "upgrade",
        "kvtier",
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--reuse-values",
        "--set",
        "controller.historyLimit=50",
    )
    assert done.returncode == 0, done.stderr


def test_a_second_release_in_the_cluster_is_refused(cluster: Any) -> None:
    """There is one driver of that name, and one agent on each node."""
    done = cluster.run_helm(
        "install",
        "second",
        str(CHART),
        "--namespace",
        "second",
        "--create-namespace",
        "--set",
        "image.registry=r.example.com",
    )
    assert done.returncode != 0
    assert "exists and cannot be imported" in done.stderr or "conflict" in done.stderr.lower(), done.stderr


def test_an_uninstall_whose_drain_does_not_finish_deletes_nothing(cluster: Any) -> None:
    """No kubelet runs here, so the Job never ends: as if a volume were in use for ever."""
    done = cluster.run_helm("uninstall", "kvtier", "--namespace", NAMESPACE, "--timeout", "15s")
    assert done.returncode != 0
    assert "kvtier-wait not ready" in done.stderr, done.stderr
    for kind, name in (
        ("daemonset", "kvtier-node"),
        ("deployment", "kvtier-controller"),
        ("csidriver", "node.kvtier.dev"),
    ):
        found = cluster.kubectl("-n", NAMESPACE, "get", kind, name, "-o", "jsonpath={.metadata.deletionTimestamp}")
        assert found.returncode == 0, found.stderr
        assert found.stdout == ""
    cluster.kubectl("-n", NAMESPACE, "delete", "job", "kvtier-wait", "--wait=false")


def test_the_controller_does_its_work_with_the_rights_and_under_the_policies_of_the_chart(
    cluster: Any, people: Any, default: Rendered
) -> None:
    """The process that the Deployment runs, with its arguments, as its service account; the agent is played by its own user."""
    user = f"system:serviceaccount:{NAMESPACE}:kvtier-controller"
    (port,) = free_ports(1)
    arguments = [it for it in default.controller["args"] if not it.startswith("--listen")]
    arguments += [f"--listen=127.0.0.1:{port}", f"--kubeconfig={cluster.plane.kubeconfig(user)}", "--identity=chart"]
    admin, agent = people.admin(), people.agent("node-a")
    node_name = "node-a"
    if admin.find("nodes", node_name) is None:
        admin.create("nodes", node(node_name))
    process = cluster.plane.start("chart-controller", [sys.executable, "-m", "kvtier_operator", *arguments])
    try:

        def figures() -> str:
            try:
                return httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=5).text
            except httpx2.HTTPError:
                assert process.poll() is None, (cluster.plane.log_folder / "chart-controller.log").read_text()[-2000:]
                return ""

        wait_until("it leads", lambda: "\nkvtier_leading 1.0" in figures())
        where = {"CONTROLLER": "127.0.0.1", "CONTROLLER_PORT": str(port), "NODE": "127.0.0.1", "NODE_PORT": str(port)}
        tested = python(str(CHART / "files" / "helm_test.py"), env=where)
        assert "one controller leads" in tested.stdout, tested.stderr
        made = admin.create("kvcachetiers", tier("chat"))
        wait_until(
            "held", lambda: "kvtier.dev/erase" in admin.get("kvcachetiers", "chat")["metadata"].get("finalizers", [])
        )
        wait_until(
            "conditions", lambda: len(admin.get("kvcachetiers", "chat").get("status", {}).get("conditions", [])) == 8
        )
        place = volume(made, node_name, finalizer=False)
        name = place["metadata"]["name"]
        agent.create("kvcachevolumes", place)
        apply_status(agent, name, volume_status("InUse"))
        wait_until("the volume is held", lambda: "finalizers" in admin.get("kvcachevolumes", name)["metadata"])
        admin.delete("kvcachetiers", "chat")
        apply_status(agent, name, volume_status("Erased"))
        wait_until("the tier is gone", lambda: admin.find("kvcachetiers", "chat") is None)
        assert 'code="403"' not in figures() and 'code="422"' not in figures(), figures()
    finally:
        cluster.plane.stop("chart-controller")
    log = (cluster.plane.log_folder / "chart-controller.log").read_text()
    assert "forbidden" not in log.lower(), log[-3000:]
    assert [it for it in cluster.plane.writes(user) if it[2] in (401, 403, 422)] == []


def apply_status(api: Any, name: str, status: Json) -> None:
    body = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheVolume", "metadata": {"name": name}, "status": status}
    path = f"{api.path('kvcachevolumes', name, sub='status')}?fieldManager=kvtier-node&force=true"
    api.request("PATCH", path, json=body, headers={"Content-Type": "application/apply-patch+yaml"})
