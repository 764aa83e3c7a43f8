"""Values that cannot be meant are refused, by the schema or by the chart, with what is wrong."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import CHART, ROOT, HelmRefused, Json, Rendered, python

REFUSED: dict[str, tuple[Json, str]] = {
    "an unknown value": ({"controler": {}}, "controler"),
    "an unknown value deeper down": ({"node": {"hostNetwork": True}}, "hostNetwork"),
    "no replica": ({"controller": {"replicas": 0}}, "replicas"),
    "replicas as text": ({"controller": {"replicas": "2"}}, "replicas"),
    "no root": ({"node": {"tierRoots": []}}, "tierRoots"),
    "the whole machine as a root": ({"node": {"tierRoots": ["/"]}}, "tierRoots"),
    "a relative root": ({"node": {"tierRoots": ["kv"]}}, "tierRoots"),
    "a root with dots": ({"node": {"tierRoots": ["/mnt/../etc"]}}, "tierRoots"),
    "a root that ends in a slash": ({"node": {"tierRoots": ["/mnt/"]}}, "tierRoots"),
    "a quote in a path": ({"node": {"tierRoots": ["/mnt/a'"]}}, "tierRoots"),
    "a quote in the mount path": ({"injection": {"mountPath": "/a' + 'b"}}, "mountPath"),
    "a device that is none": ({"node": {"allowedDevices": ["/etc/passwd"]}}, "allowedDevices"),
    "a root in kubelet's directory": ({"node": {"tierRoots": ["/var/lib/kubelet/kv"]}}, "is kubelet's"),
    "the ledger in a root": ({"node": {"stateDir": "/var/lib/kvtier/tiers/state"}}, "lie in each other"),
    "a root in the ledger": ({"node": {"tierRoots": ["/var/lib/kvtier/state/kv"]}}, "lie in each other"),
    "kvtier's own namespace": ({"controller": {"watchNamespaces": ["kvtier-system"]}}, "own namespace"),
    "a confirmation that is not typed in full": ({"drain": {"force": "yes"}}, "force"),
    "true as a confirmation": ({"drain": {"force": True}}, "force"),
    "no digest": ({"node": {"image": {"digest": "latest"}}}, "digest"),
    "a port beyond all ports": ({"node": {"port": 70000}}, "port"),
    "no label of a volume": ({"injection": {"volumeName": "KV"}}, "volumeName"),
    "no registry": ({"image": {"registry": ""}}, "image.registry: .*Docker Hub"),
    "a registry without a host": ({"image": {"registry": "team"}}, "image.registry: .*Docker Hub"),
    "a URL for a registry": ({"image": {"registry": "http://r.example.com/"}}, "registry"),
    "no root for tiers": ({"node": {"tierRoots": None}}, "tierRoots"),
    "the system's directory as a root": ({"node": {"tierRoots": ["/etc/kv"]}}, "is the system's"),
    "a quantity that is none": ({"node": {"resources": {"limits": {"memory": "much"}}}}, "memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_value_is_refused_by_name(case: str, render: Callable[..., Rendered]) -> None:
    values, named = REFUSED[case]
    with pytest.raises(HelmRefused, match=named):
        render(values)


def _leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_knows_each_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    for path in _leaves(values):
        here = schema
        for key in path:
            if "properties" not in here:  # labels, limits, selectors: keys are the user's
                break
            assert here["additionalProperties"] is False, path
            assert key in here["properties"], f"{'.'.join(path)} is not in the schema"
            here = here["properties"][key]


def test_kubernetes_before_the_floor_is_refused(render: Callable[..., Rendered]) -> None:
    with pytest.raises(HelmRefused, match="kubeVersion"):
        render(kubernetes="1.33.9", with_map=False)


def test_helm_lint_has_nothing_to_say(helm: Path) -> None:
    done = subprocess.run([str(helm), "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout and "ERROR" not in done.stdout


def test_the_crds_are_those_of_the_models() -> None:
    """`python -m kvtier_api.generate --output charts/kvtier/files/crds` writes them."""
    done = python("-m", "kvtier_api.generate", "--check", "--output", str(CHART / "files" / "crds"))
    assert done.returncode == 0, done.stderr


def test_crds_are_templates_that_stay_on_uninstall(default: Rendered, render: Callable[..., Rendered]) -> None:
    assert not (CHART / "crds").exists()  # Helm never upgrades what is there
    crds = default.all("CustomResourceDefinition")
    assert len(crds) == 4
    assert all(it["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for it in crds)
    for path in sorted((ROOT / "crds" / "manifests").glob("*.yaml")):
        wanted = yaml.safe_load(path.read_text())
        assert default.one("CustomResourceDefinition", wanted["metadata"]["name"])["spec"] == wanted["spec"]
    assert render({"crds": {"install": False}}).all("CustomResourceDefinition") == []


def notes(helm: Path, *arguments: str) -> str:
    command = [
        str(helm),
        "install",
        "kvtier",
        str(CHART),
        "--namespace",
        "kvtier-system",
        "--dry-run=client",
        "--set",
        "image.registry=registry.example.com",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("NOTES:")[1]


def test_the_notes_tell_the_next_step(helm: Path) -> None:
    text = notes(helm)
    for step in ("rollout status daemonset/kvtier-node", "helm test kvtier", "kind: KVCacheTier", "kubectl get kvct"):
        assert step in text


def test_the_notes_say_when_nothing_is_injected_and_what_is_turned_off(helm: Path) -> None:
    assert "has no MutatingAdmissionPolicy v1" in notes(helm)  # Helm by itself knows no API of a cluster
    assert "injection.enabled is false" in notes(helm, "--set", "injection.enabled=false")
    assert "policies.enabled is false" in notes(helm, "--set", "policies.enabled=false")
    assert "leaves places that are not erased" in notes(helm, "--set", "drain.force=leave unerased places")
