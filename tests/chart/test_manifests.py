"""What the chart's objects promise, for the main sets of values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import typer
from rendering import FLOOR, NEW, Json, Rendered

import kvtier_node.csi.names as csi
from kvtier_cli.main import app
from kvtier_operator.facts import Key
from kvtier_operator.settings import AGENT_SELECTOR, parse_settings

EVERYTHING: Json = {
    "metrics": {it: {"enabled": True} for it in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")},
    "node": {"criticalPodsQuota": True, "allowedDevices": ["/dev/nvme1n1"], "tierRoots": ["/mnt/a", "/mnt/b"]},
    "image": {"registry": "registry.example.com/team/", "pullSecrets": [{"name": "pull"}]},
    "networkPolicy": {"metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
    "drain": {"force": "leave unerased places"},
    "commonLabels": {"team": "inference"},
}
SETS: dict[str, Json] = {
    "default": {},
    "everything": EVERYTHING,
    "some namespaces": {"controller": {"watchNamespaces": ["team-a", "team-b"]}},
    "one replica": {"controller": {"replicas": 1}},
    "least": {it: {"enabled": False} for it in ("policies", "injection", "networkPolicy", "drain")}
    | {"crds": {"install": False}, "rbac": {"aggregate": False}},
}


@pytest.fixture(
    params=[(name, version) for name in SETS for version in (NEW, FLOOR)], ids=lambda it: f"{it[0]}-{it[1]}"
)
def each(request: pytest.FixtureRequest, render: Callable[..., Rendered]) -> Rendered:
    name, version = request.param
    return render(SETS[name], kubernetes=version)


def test_names_are_unique_and_every_object_says_whose_it_is(each: Rendered) -> None:
    names = [(it["kind"], it["metadata"].get("namespace"), it["metadata"]["name"]) for it in each.objects]
    assert len(names) == len(set(names))
    for it in each.objects:
        labels = it["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "kvtier"
        assert labels["app.kubernetes.io/instance"] == "kvtier"


def test_selectors_select_the_pods_that_they_are_for(each: Rendered) -> None:
    pods = [it["spec"]["template"]["metadata"]["labels"] for it in (*each.all("Deployment"), *each.all("DaemonSet"))]
    selectors = [it["spec"]["selector"] for it in each.all("Service")]
    selectors += [
        it["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "PodMonitor") for it in each.all(kind)
    ]
    selectors += [it["spec"]["podSelector"]["matchLabels"] for it in each.all("NetworkPolicy")]
    for selector in selectors:
        assert sum(selector.items() <= labels.items() for labels in pods) == 1, selector


def test_everything_but_the_agent_is_restricted(each: Rendered) -> None:
    for name, spec in each.pod_specs().items():
        if name.startswith("DaemonSet/"):
            continue
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert not {"hostPID", "hostNetwork", "hostIPC"} & set(spec), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert all("hostPath" not in it for it in spec.get("volumes", [])), name


def test_every_container_is_limited(each: Rendered) -> None:
    for name, spec in each.pod_specs().items():
        for container in spec["containers"]:
            assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"]), name


def test_no_pod_has_a_secret_in_its_environment_or_arguments(each: Rendered) -> None:
    for name, spec in each.pod_specs().items():
        for container in spec["containers"]:
            assert not container.get("envFrom"), name
            for variable in container.get("env", []):
                assert "secretKeyRef" not in str(variable), name


# -- the controller


def test_two_replicas_prefer_two_nodes_and_one_may_be_away(default: Rendered) -> None:
    spec = default.one("Deployment")["spec"]
    assert spec["replicas"] == 2
    terms = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert terms[0]["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert default.one("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_one_replica_has_no_budget_that_would_block_a_drain(render: Callable[..., Rendered]) -> None:
    assert render({"controller": {"replicas": 1}}).all("PodDisruptionBudget") == []


@pytest.mark.parametrize("values", [{}, {"controller": {"watchNamespaces": ["team-a", "team-b"]}}])
def test_the_controller_takes_the_arguments_that_it_is_given(values: Json, render: Callable[..., Rendered]) -> None:
    settings = parse_settings(render(values).controller["args"])
    assert settings.lease_namespace == "kvtier-system"
    assert settings.namespaces == tuple(values.get("controller", {}).get("watchNamespaces", ()))
    assert settings.port == 8080


def test_the_controller_finds_this_releases_agents(default: Rendered) -> None:
    selector = parse_settings(default.controller["args"]).agent_selector
    assert selector.startswith(AGENT_SELECTOR)
    labels = default.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert dict(it.split("=") for it in selector.split(",")).items() <= labels.items()


# -- the node agent


def test_the_agent_has_what_it_needs_of_the_host_and_no_more(default: Rendered) -> None:
    spec = default.one("DaemonSet")["spec"]["template"]["spec"]
    assert spec["hostPID"] is True
    assert "hostNetwork" not in spec and "hostIPC" not in spec
    paths = {it["hostPath"]["path"] for it in spec["volumes"] if "hostPath" in it}
    assert paths == {"/var/lib/kvtier/state", "/var/lib/kvtier/tiers", "/var/lib/kubelet", "/dev"}
    assert default.agent["securityContext"]["readOnlyRootFilesystem"] is True


def test_host_directories_have_their_own_paths_in_the_agent(each: Rendered) -> None:
    """Paths are on record, in the ledger and in the API: they must mean the same inside and outside."""
    spec = each.one("DaemonSet")["spec"]["template"]["spec"]
    host = {it["name"]: it["hostPath"]["path"] for it in spec["volumes"] if "hostPath" in it}
    assert {it["name"]: it["mountPath"] for it in each.agent["volumeMounts"] if it["name"] in host} == host


def test_mounts_go_both_ways_where_volumes_are_mounted_and_nowhere_else(render: Callable[..., Rendered]) -> None:
    agent = render(EVERYTHING).agent
    both = {it["mountPath"] for it in agent["volumeMounts"] if it.get("mountPropagation") == "Bidirectional"}
    assert both == {"/mnt/a", "/mnt/b", "/var/lib/kubelet"}
    assert agent["securityContext"]["privileged"] is True  # Kubernetes asks for it with Bidirectional


@pytest.mark.parametrize(
    "taint",
    [
        ("node.kubernetes.io/disk-pressure", "NoSchedule"),
        ("node.kubernetes.io/memory-pressure", "NoSchedule"),
        ("node.kubernetes.io/pid-pressure", "NoSchedule"),
        ("node.kubernetes.io/unschedulable", "NoSchedule"),
        ("node.kubernetes.io/not-ready", "NoExecute"),
        ("node.kubernetes.io/out-of-service", "NoExecute"),
        ("anything.example/at-all", "NoExecute"),
    ],
)
def test_the_agent_stays_on_a_node_in_trouble(taint: tuple[str, str], default: Rendered) -> None:
    key, effect = taint
    tolerations = default.one("DaemonSet")["spec"]["template"]["spec"]["tolerations"]
    assert any(
        it["operator"] == "Exists" and it.get("key", key) == key and it.get("effect", effect) == effect
        for it in tolerations
    )


def test_the_agent_does_not_take_a_node_of_others(default: Rendered) -> None:
    """A NoSchedule taint of somebody's own is for node.tolerations to say."""
    tolerations = default.one("DaemonSet")["spec"]["template"]["spec"]["tolerations"]
    assert not any("key" not in it and it.get("effect") != "NoExecute" for it in tolerations)


def test_agents_are_replaced_one_node_at_a_time_and_come_first(default: Rendered) -> None:
    spec = default.one("DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
    assert spec["template"]["spec"]["priorityClassName"] == "system-node-critical"


def test_a_long_recovery_is_not_killed(default: Rendered) -> None:
    """/healthz answers during recovery, /readyz does not: only the first may restart the agent."""
    assert default.agent["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert default.agent["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert default.agent["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_agent_takes_the_arguments_that_it_is_given(each: Rendered) -> None:
    """By the command line's own parser."""
    command = typer.main.get_command(app)
    given = command.commands["node"].make_context("node", list(each.agent["args"])).params  # type: ignore[attr-defined]
    assert given["csi"] is True
    assert given["listen"] == "0.0.0.0:9464"
    assert str(given["kubelet_root"]) == "/var/lib/kubelet"
    assert each.agent["env"][0]["name"] == "KVTIER_NODE_NAME"


def test_every_root_is_given_mounted_and_allowed(render: Callable[..., Rendered]) -> None:
    rendered = render(EVERYTHING)
    assert [it for it in rendered.agent["args"] if it.startswith("--root=")] == ["--root=/mnt/a", "--root=/mnt/b"]
    policy = rendered.one("ValidatingAdmissionPolicy", "kvtier-tiers")
    variables = {it["name"]: it["expression"] for it in policy["spec"]["variables"]}
    assert variables["roots"] == "['/mnt/a','/mnt/b']"
    assert variables["devices"] == "['/dev/nvme1n1']"


# -- the driver


def test_the_driver_is_ephemeral_and_leaves_owners_to_the_agent(default: Rendered) -> None:
    driver = default.one("CSIDriver")
    assert driver["metadata"]["name"] == csi.DRIVER
    assert driver["metadata"]["labels"]["security.openshift.io/csi-ephemeral-volume-profile"] == "restricted"
    spec = driver["spec"]
    assert spec["volumeLifecycleModes"] == ["Ephemeral"]
    assert spec["podInfoOnMount"] is True
    assert spec["attachRequired"] is False
    assert spec["fsGroupPolicy"] == "None"


# -- policies


def test_every_policy_is_bound_and_denies(each: Rendered) -> None:
    policies = {it["metadata"]["name"] for it in each.all("ValidatingAdmissionPolicy")}
    bound = {
        it["spec"]["policyName"]: it["spec"]["validationActions"] for it in each.all("ValidatingAdmissionPolicyBinding")
    }
    assert bound == {policy: ["Deny"] for policy in policies}
    assert {it["spec"]["policyName"] for it in each.all("MutatingAdmissionPolicyBinding")} == {
        it["metadata"]["name"] for it in each.all("MutatingAdmissionPolicy")
    }
    for policy in (*each.all("ValidatingAdmissionPolicy"), *each.all("MutatingAdmissionPolicy")):
        assert policy["spec"]["failurePolicy"] == "Fail"


def test_every_refusal_says_what_is_wrong(each: Rendered) -> None:
    for policy in each.all("ValidatingAdmissionPolicy"):
        for rule in policy["spec"]["validations"]:
            assert len(rule.get("message") or rule.get("messageExpression")) > 20


def test_injection_needs_the_api_and_the_refusal_stays_without_it(render: Callable[..., Rendered]) -> None:
    old = render(kubernetes=FLOOR)
    assert old.all("MutatingAdmissionPolicy") == []
    pods = old.one("ValidatingAdmissionPolicy", "kvtier-pods")
    assert "nothing is injected in this cluster: that needs Kubernetes 1.36" in str(pods)
    assert len(render().all("MutatingAdmissionPolicy")) == 1


def test_injection_brings_its_refusal_along(render: Callable[..., Rendered]) -> None:
    """Else a conflict would be left alone by the one policy and let in by the absence of the other."""
    rendered = render({"policies": {"enabled": False}})
    assert [it["metadata"]["name"] for it in rendered.all("ValidatingAdmissionPolicy")] == ["kvtier-pods"]


def test_injection_can_be_turned_off(render: Callable[..., Rendered]) -> None:
    assert render({"injection": {"enabled": False}}).all("MutatingAdmissionPolicy") == []


def test_both_policies_know_the_path_and_the_name_that_were_chosen(render: Callable[..., Rendered]) -> None:
    rendered = render({"injection": {"mountPath": "/mnt/kv", "volumeName": "kv"}})
    for kind, name in (("MutatingAdmissionPolicy", "kvtier-injection"), ("ValidatingAdmissionPolicy", "kvtier-pods")):
        text = str(rendered.one(kind, name))
        assert "'/mnt/kv'" in text or '"/mnt/kv"' in text or "/mnt/kv" in text
        assert "/kvtier/" not in text.replace("kvtier.dev/", "")


# -- network


def test_metrics_are_all_that_comes_in_and_the_api_server_all_that_goes_out(default: Rendered) -> None:
    for policy in default.all("NetworkPolicy"):
        spec = policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert [port["port"] for rule in spec["ingress"] for port in rule["ports"]] in ([8080], [9464])
        assert [port["port"] for rule in spec["egress"] for port in rule["ports"]] == [443, 6443]


def test_metrics_can_be_kept_for_who_scrapes(render: Callable[..., Rendered]) -> None:
    for policy in render(EVERYTHING).all("NetworkPolicy"):
        senders = policy["spec"]["ingress"][0]["from"]
        assert {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}} in senders


# -- uninstall


def test_the_drain_comes_before_everything_and_the_release_after_it(default: Rendered) -> None:
    hooks = {it["metadata"]["name"]: it["metadata"]["annotations"]["helm.sh/hook"] for it in default.all("Job")}
    assert hooks == {"kvtier-wait": "pre-delete", "kvtier-release": "post-delete"}
    for job in default.all("Job"):
        account = job["spec"]["template"]["spec"]["serviceAccountName"]
        for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
            mine = default.one(kind, account)["metadata"]["annotations"]
            assert mine["helm.sh/hook"] == hooks[job["metadata"]["name"]]
            assert int(mine["helm.sh/hook-weight"]) < 0


def test_force_is_given_to_the_drain_only_when_it_is_typed(render: Callable[..., Rendered]) -> None:
    def arguments(values: Json) -> Any:
        return render(values).one("Job", "kvtier-wait")["spec"]["template"]["spec"]["containers"][0]["args"]

    assert not any("--confirm" in it for it in arguments({}))
    assert "--confirm=leave unerased places" in arguments({"drain": {"force": "leave unerased places"}})


# -- monitoring


def test_alerts_use_figures_that_exist(render: Callable[..., Rendered]) -> None:
    from prometheus_client import generate_latest

    from kvtier_api.tier import KVCacheTierStatus
    from kvtier_node.metrics import AgentMetrics, Snapshot
    from kvtier_operator.metrics import Metrics

    controller, agent = Metrics(), AgentMetrics()
    key: Key = ("ns", "tier")
    controller.tier(key, KVCacheTierStatus(), 0)
    agent.set(Snapshot())
    known = set(re.findall(r"^# TYPE (\S+)", generate_latest(controller.registry).decode(), re.M))
    known |= set(re.findall(r"^# TYPE (\S+)", generate_latest(agent.registry).decode(), re.M))
    rendered = render(EVERYTHING)
    rules = [rule for group in rendered.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert len(rules) == 7
    texts = [rule["expr"] for rule in rules]
    texts += re.findall(r'"expr": "(.*?)",\n', rendered.one("ConfigMap", "kvtier-dashboard")["data"]["kvtier.json"])
    for text in texts:
        for name in re.findall(r"kvtier_[a-z0-9_]+", text):
            assert name in known or name.removesuffix("_bucket") in known, f"{name} in {text}"


def test_monitors_are_off_until_asked_for(default: Rendered) -> None:
    assert not [it for it in default.objects if it["apiVersion"].startswith("monitoring.coreos.com")]


# -- images


def test_a_digest_wins_over_a_tag_and_a_registry_goes_first(render: Callable[..., Rendered]) -> None:
    digest = "sha256:" + "0" * 64
    rendered = render(EVERYTHING | {"controller": {"image": {"digest": digest, "tag": "x"}}})
    assert rendered.controller["image"] == f"registry.example.com/team/kvtier/controller@{digest}"
    assert rendered.agent["image"] == "registry.example.com/team/kvtier/node:0.1.0"
    for spec in rendered.pod_specs().values():
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
