"""The chart, rendered by the real Helm: objects by kind and name, and what Helm says when it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvtier"
NAMESPACE = "kvtier-system"
RELEASE = "kvtier"
REGISTRY = "registry.example.com"
"""What everybody has to set: rendered with it unless `values` has an `image` of its own."""
NEW, FLOOR = "1.36.3", "1.34.4"
MAP_V1 = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"

Json = dict[str, Any]


class HelmRefused(Exception):
    """Helm's own words."""


class Rendered:
    """The objects of one rendering."""

    def __init__(self, objects: list[Json]) -> None:
        self.objects = objects

    def all(self, kind: str) -> list[Json]:
        return [it for it in self.objects if it["kind"] == kind]

    def find(self, kind: str, name: str) -> Json | None:
        return next((it for it in self.all(kind) if it["metadata"]["name"] == name), None)

    def one(self, kind: str, name: str = "") -> Json:
        found = [it for it in self.all(kind) if not name or it["metadata"]["name"] == name]
        assert len(found) == 1, f"{kind} {name}: {[it['metadata']['name'] for it in self.all(kind)]}"
        return found[0]

    def pod_specs(self) -> dict[str, Json]:
        """Kind and name → the pod's spec, of everything that runs pods."""
        found = {}
        for it in self.objects:
            name = f"{it['kind']}/{it['metadata']['name']}"
            if it["kind"] == "Pod":
                found[name] = it["spec"]
            elif it["kind"] in ("Deployment", "DaemonSet", "Job"):
                found[name] = it["spec"]["template"]["spec"]
        return found

    @property
    def agent(self) -> Json:
        return self.one("DaemonSet")["spec"]["template"]["spec"]["containers"][0]

    @property
    def controller(self) -> Json:
        return self.one("Deployment")["spec"]["template"]["spec"]["containers"][0]


def helm_template(
    helm: Path, values: Json | None = None, *, kubernetes: str = NEW, with_map: bool | None = None
) -> Rendered:
    """Raises HelmRefused with what Helm said. Hooks and tests are among the objects."""
    if with_map is None:
        with_map = kubernetes == NEW
    command = [
        str(helm),
        "template",
        RELEASE,
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        kubernetes,
        "--values",
        "-",
    ]
    command += ["--api-versions", MAP_V1] if with_map else []
    done = subprocess.run(
        command,
        input=json.dumps({"image": {"registry": REGISTRY}} | (values or {})),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HelmRefused(done.stderr)
    return Rendered([it for it in yaml.safe_load_all(done.stdout) if it])


def python(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, **more)
