"""Injection, and its refusals, on the real API server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("injection")]
Json = dict[str, Any]
DRIVER = "node.kvtier.dev"


def pod(name: str = "engine", *, tier: str | None = "chat", annotations: Json | None = None, **spec: Any) -> Json:
    labels = {} if tier is None else {"kvtier.dev/tier": tier}
    containers = [{"name": "vllm", "image": "example/vllm"}, {"name": "sidecar", "image": "example/proxy"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels, "annotations": annotations or {}},
        "spec": {"containers": containers, **spec},
    }


def csi(name: str = "kv", tier: str | None = "chat") -> Json:
    attributes = {} if tier is None else {"volumeAttributes": {"tier": tier}}
    return {"name": name, "csi": {"driver": DRIVER, **attributes}}


def mounting(*mounts: tuple[str, str], env: list[Json] | None = None) -> list[Json]:
    found = [{"name": name, "mountPath": path} for name, path in mounts]
    return [{"name": "vllm", "image": "example/vllm", "volumeMounts": found, "env": env or []}]


@pytest.fixture
def create(people: Any) -> Callable[[Json], Json]:
    """As the administrator, for show: what would be stored."""
    api = people.admin()

    def make(body: Json) -> Json:
        return api.request("POST", f"{api.path('pods')}?dryRun=All", json=body)

    return make


def ours(found: Json) -> list[Json]:
    return [it for it in found["spec"].get("volumes", []) if it.get("csi", {}).get("driver") == DRIVER]


def mounts_of(found: Json, container: str) -> dict[str, str]:
    one = next(it for it in found["spec"]["containers"] if it["name"] == container)
    return {it["mountPath"]: it["name"] for it in one.get("volumeMounts", [])}


def env_of(found: Json, container: str) -> dict[str, Any]:
    one = next(it for it in found["spec"]["containers"] if it["name"] == container)
    return {it["name"]: it.get("value", it.get("valueFrom")) for it in one.get("env", [])}


def test_a_labelled_pod_gets_the_volume_of_its_tier(create: Callable[[Json], Json]) -> None:
    found = create(pod())
    assert ours(found) == [{"name": "kvtier", "csi": {"driver": DRIVER, "volumeAttributes": {"tier": "chat"}}}]
    assert mounts_of(found, "vllm")["/kvtier"] == "kvtier"


def test_the_container_is_told_where_the_marker_and_the_slots_are(create: Callable[[Json], Json]) -> None:
    told = env_of(create(pod()), "vllm")
    assert told["KVTIER_TIER"] == "chat"
    assert told["KVTIER_MARKER"] == "/kvtier/.kvtier-marker.json"
    assert told["KVTIER_SLOT_DIR"] == "/kvtier/slots"
    assert told["KVTIER_POD_UID"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.uid"}}


def test_only_the_first_container_mounts_it(create: Callable[[Json], Json]) -> None:
    """A sidecar runs as another user, and a slot file has one owner."""
    found = create(pod())
    assert "/kvtier" not in mounts_of(found, "sidecar")
    assert env_of(found, "sidecar") == {}


def test_the_annotation_chooses_the_containers(create: Callable[[Json], Json]) -> None:
    found = create(pod(annotations={"kvtier.dev/containers": "sidecar, vllm"}))
    assert "/kvtier" in mounts_of(found, "sidecar")
    assert "/kvtier" in mounts_of(found, "vllm")


def test_a_pod_without_the_label_is_left_alone(create: Callable[[Json], Json]) -> None:
    assert ours(create(pod(tier=None))) == []


def test_what_the_user_wrote_stays_as_it_is(create: Callable[[Json], Json]) -> None:
    """Volume, mount, path: all his own, so nothing is added."""
    found = create(pod(volumes=[csi()], containers=mounting(("kv", "/data"))))
    assert ours(found) == [csi()]
    assert "/kvtier" not in mounts_of(found, "vllm")
    assert env_of(found, "vllm") == {}


def test_other_volumes_mounts_and_variables_of_the_user_stay(create: Callable[[Json], Json]) -> None:
    own = [{"name": "KVTIER_SLOT_DIR", "value": "/mine"}, {"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    found = create(pod(volumes=[{"name": "cache", "emptyDir": {}}], containers=mounting(("cache", "/cache"), env=own)))
    assert mounts_of(found, "vllm")["/cache"] == "cache"
    assert len(ours(found)) == 1
    told = env_of(found, "vllm")
    assert told["KVTIER_SLOT_DIR"] == "/mine"
    assert told["KVTIER_TIER"] == "chat"
    assert [it["value"] for it in found["spec"]["containers"][0]["env"] if it["name"] == "A"] == ["1", "2"]


def test_a_deployments_pod_is_injected_too(create: Callable[[Json], Json]) -> None:
    found = create(pod() | {"metadata": {"generateName": "engine-", "labels": {"kvtier.dev/tier": "chat"}}})
    assert len(ours(found)) == 1


REFUSALS = {
    "a volume of the same name": (
        pod(volumes=[{"name": "kvtier", "emptyDir": {}}]),
        "rename it, or write the CSI volume",
    ),
    "another mount at the path": (
        pod(volumes=[{"name": "cache", "emptyDir": {}}], containers=mounting(("cache", "/kvtier"))),
        "choose another path",
    ),
    "another mount below the path": (
        pod(volumes=[{"name": "cache", "emptyDir": {}}], containers=mounting(("cache", "/kvtier/slots"))),
        "choose another path",
    ),
    "a volume of another tier": (
        pod(volumes=[csi(tier="other")], containers=mounting(("kv", "/data"))),
        "make them the same",
    ),
    "a volume that names no tier": (
        pod(volumes=[csi(tier=None)], containers=mounting(("kv", "/data"))),
        "make them the same",
    ),
    "two volumes": (
        pod(volumes=[csi("one"), csi("two")], containers=mounting(("one", "/one"), ("two", "/two"))),
        "remove the label",
    ),
    "a volume that nothing mounts": (pod(volumes=[csi()]), "add it to volumeMounts"),
    "a container that is not there": (
        pod(annotations={"kvtier.dev/containers": "vlm"}),
        "vlm, which the pod does not have",
    ),
    "no name of a tier": (pod(tier="Chat_1"), "is no name of a KVCacheTier"),
    "an empty label": (pod(tier=""), "is no name of a KVCacheTier"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_conflict_is_refused_with_its_remedy(
    case: str, create: Callable[[Json], Json], refused: Callable[..., str]
) -> None:
    body, remedy = REFUSALS[case]
    assert remedy in refused(lambda: create(body))
