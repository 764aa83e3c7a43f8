"""What the uninstall Jobs run, with the rights that the chart gives them, on the real API server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from api_client import micro_now, tier, volume, volume_status
from controlplane import wait_until
from rendering import NAMESPACE, Json, Rendered
from test_on_the_server import apply_status

pytestmark = pytest.mark.slow
KINDS = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
Drain = Callable[..., subprocess.Popen[str]]


@pytest.fixture(scope="module")
def hooks(cluster: Any, default: Rendered) -> dict[str, Path]:
    """The accounts and rights that Helm makes for the hooks; a kubeconfig of each."""
    objects = [
        it for it in default.objects if it["kind"] in KINDS and "helm.sh/hook" in it["metadata"].get("annotations", {})
    ]
    done = cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    assert done.returncode == 0, done.stderr
    return {
        command: cluster.plane.kubeconfig(f"system:serviceaccount:{NAMESPACE}:kvtier-{account}")
        for command, account in (("wait", "drain"), ("release", "release"))
    }


@pytest.fixture
def drain(hooks: dict[str, Path], people: Any) -> Drain:
    def start(command: str, *arguments: str) -> subprocess.Popen[str]:
        lease = [f"--lease-namespace={NAMESPACE}", "--lease-name=kvtier-controller"] if command == "release" else []
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "kvtier_operator.drain", command, "--namespace", people.namespace, *lease),
                *(f"--kubeconfig={hooks[command]}", *arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def said(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=120)[0]


@pytest.fixture
def in_use(people: Any) -> Json:
    """A held tier with a volume in use, as controller and agent would have them."""
    body = tier("chat")
    body["metadata"]["finalizers"] = ["kvtier.dev/erase"]
    made = people.admin().create("kvcachetiers", body)
    found = people.admin().create("kvcachevolumes", volume(made, "node-a"))
    apply_status(people.agent("node-a"), found["metadata"]["name"], volume_status("InUse"))
    return found


def test_without_volumes_there_is_nothing_to_wait_for(drain: Drain) -> None:
    process = drain("wait", "--timeout=30")
    assert "no place can hold readable bytes" in said(process)
    assert process.returncode == 0


def test_a_volume_in_use_is_waited_for_and_named(drain: Drain, in_use: Json) -> None:
    process = drain("wait", "--timeout=8")
    text = said(process)
    assert process.returncode == 1
    name = in_use["metadata"]["name"]
    assert f"{name} of tier chat on node node-a: InUse, used by pod pod-a" in text
    assert "nothing was uninstalled" in text and "kvtier.dev/abandon" in text


def test_the_wait_ends_when_the_agent_has_erased(drain: Drain, in_use: Json, people: Any) -> None:
    process = drain("wait", "--timeout=90")
    assert process.stdout is not None
    assert "waiting for 1 object(s)" in process.stdout.readline()
    apply_status(people.agent("node-a"), in_use["metadata"]["name"], volume_status("Erased"))
    assert "no place can hold readable bytes" in said(process)
    assert process.returncode == 0


def test_a_typed_confirmation_does_not_wait_and_says_what_stays(drain: Drain, in_use: Json) -> None:
    process = drain("wait", "--timeout=60", "--confirm=leave unerased places")
    text = said(process)
    assert process.returncode == 0
    assert "NOT waiting for 1 object(s)" in text and in_use["metadata"]["name"] in text


def test_the_confirmation_can_be_typed_after_an_uninstall_that_failed(
    drain: Drain, in_use: Json, default: Rendered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Helm takes no upgrade then, so the Job reads a ConfigMap, where there is one."""
    container = default.one("Job", "kvtier-wait")["spec"]["template"]["spec"]["containers"][0]
    (variable,) = container["env"]
    assert variable["valueFrom"]["configMapKeyRef"] == {"name": "kvtier-drain", "key": "confirm", "optional": True}
    monkeypatch.setenv(variable["name"], "leave unerased places")
    process = drain("wait", "--timeout=60")
    assert "NOT waiting for 1 object(s)" in said(process)
    assert process.returncode == 0


def test_any_other_confirmation_is_refused(drain: Drain, in_use: Json) -> None:
    process = drain("wait", "--timeout=60", "--confirm=yes")
    assert "not the confirmation" in said(process)
    assert process.returncode != 0


def test_a_tier_whose_deletion_is_not_finished_is_waited_for(drain: Drain, people: Any) -> None:
    """Without a controller nobody would take its finalizer off."""
    body = tier("going")
    body["metadata"]["finalizers"] = ["kvtier.dev/erase"]
    people.admin().create("kvcachetiers", body)
    people.admin().delete("kvcachetiers", "going")
    process = drain("wait", "--timeout=8")
    assert "going: its deletion is not finished" in said(process)
    assert process.returncode == 1


def finalizers(people: Any, plural: str, name: str) -> list[str]:
    found: list[str] = people.admin().get(plural, name)["metadata"].get("finalizers", [])
    return found


def test_the_release_lets_go_of_what_is_final(drain: Drain, in_use: Json, people: Any) -> None:
    name = in_use["metadata"]["name"]
    apply_status(people.agent("node-a"), name, volume_status("Erased"))
    process = drain("release", "--timeout=60")
    assert "every finalizer of kvtier is taken off" in said(process)
    assert process.returncode == 0
    assert finalizers(people, "kvcachevolumes", name) == []
    assert finalizers(people, "kvcachetiers", "chat") == []


def test_the_release_holds_what_is_not_final_and_says_so(drain: Drain, in_use: Json, people: Any) -> None:
    process = drain("release", "--timeout=60")
    text = said(process)
    assert process.returncode == 1
    assert "still held" in text and in_use["metadata"]["name"] in text
    assert finalizers(people, "kvcachevolumes", in_use["metadata"]["name"]) == ["kvtier.dev/erase"]
    assert finalizers(people, "kvcachetiers", "chat") == ["kvtier.dev/erase"]


def test_the_release_waits_for_a_controller_that_still_has_the_lease_and_leaves_none(
    drain: Drain, people: Any, cluster: Any
) -> None:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    api = people.admin()
    body = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "kvtier-controller"},
        "spec": {
            "holderIdentity": "one",
            "leaseDurationSeconds": 600,
            "renewTime": micro_now(),
            "acquireTime": micro_now(),
        },
    }
    api.client.delete(f"{path}/kvtier-controller")
    made = api.request("POST", path, json=body)
    process = drain("release", "--timeout=60")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(6)
    made["spec"]["holderIdentity"] = ""
    api.request("PUT", f"{path}/kvtier-controller", json=made)
    assert "every finalizer" in said(process)
    wait_until("no Lease is left", lambda: api.client.get(f"{path}/kvtier-controller").status_code == 404)
