"""The generated CRDs on a real API server: accepted as they are, and their rules refuse and accept what the models do."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from api_client import Api, Refused, node, tier, volume, volume_status
from controlplane import MANIFESTS

from kvtier_api.documents import parse_object
from kvtier_api.errors import InvalidResource


def test_every_kind_is_established_and_its_schema_is_structural(api: Api) -> None:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        crd = api.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        conditions = {it["type"]: it["status"] for it in crd["status"]["conditions"]}
        assert conditions["Established"] == "True"
        assert "NonStructuralSchema" not in conditions


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("the least", {}),
    ("size in decimal units", {"sizePerRank": "500M"}),
    ("size as a number", {"sizePerRank": 1073741824}),
    ("size with a fraction", {"sizePerRank": "1.5Gi"}),
    ("the largest size", {"sizePerRank": "1Pi"}),
    ("slot size as a number", {"slotSize": 4096}),
    ("slot size as digits", {"slotSize": "8192"}),
    ("slot size in Ki", {"slotSize": "64Ki"}),
    ("slot as large as the rank", {"sizePerRank": "1Mi", "slotSize": "1Mi"}),
    ("sealed only", {"encryption": {"backend": "SealOnly"}}),
    ("a device", {"device": "/dev/vg/kv", "encryption": {"backend": "DmCrypt"}}),
    ("a secondary store", {"secondary": [{"type": "S3", "endpoint": "https://s3.example", "maxAge": "1h"}]}),
    ("a selector", {"workloadSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a"]}]}}),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("more than 1Pi", {"sizePerRank": "1025Ti"}, "sizePerRank"),
    ("slot larger than the rank", {"sizePerRank": "64Ki", "slotSize": "1Mi"}, "slotSize"),
    ("slot size no multiple, number", {"slotSize": 4097}, "multiple of 4096"),
    ("slot size no multiple, Ki", {"slotSize": "6Ki"}, "multiple of 4096"),
    ("slot size no multiple, digits", {"slotSize": "5000"}, "multiple of 4096"),
    ("slot size with a fraction", {"slotSize": "1.5Mi"}, "slotSize"),
    ("relative path", {"path": "var/lib"}, "absolute"),
    ("path with dots", {"path": "/var/../etc"}, "component"),
    ("sealed only, unsealed", {"encryption": {"backend": "SealOnly", "sealSlots": False}}, "sealSlots"),
    ("per tenant, unsealed", {"salt": {"policy": "PerTenant"}, "encryption": {"sealSlots": False}}, "PerTenant"),
    ("device with fscrypt", {"device": "/dev/vg/kv", "encryption": {"backend": "Fscrypt"}}, "device"),
    ("days", {"retention": {"maxAge": "7d"}}, "maxAge"),
    ("deadline of two hours", {"scrub": {"deadline": "2h"}}, "hour"),
    ("credentials in a URL", {"secondary": [{"type": "Redis", "endpoint": "redis://u:p@h"}]}, "credentials"),
    ("kept for longer elsewhere", {"secondary": [{"type": "S3", "endpoint": "https://h", "maxAge": "99h"}]}, "maxAge"),
    ("no ranks", {"ranks": 0}, "ranks"),
]


@pytest.mark.parametrize(("name", "spec"), ACCEPTED, ids=[it[0] for it in ACCEPTED])
def test_what_the_models_accept_the_server_accepts_and_gives_back_as_the_models_read_it(
    api: Api, name: str, spec: dict[str, Any]
) -> None:
    made = api.create("kvcachetiers", tier("t", **spec))
    assert parse_object(made).metadata.uid == made["metadata"]["uid"]
    assert made["spec"]["retention"]["maxAge"] == "24h", "defaults come from the server"


@pytest.mark.parametrize(("name", "spec", "says"), REFUSED, ids=[it[0] for it in REFUSED])
def test_what_the_models_refuse_the_server_refuses_with_words(
    api: Api, name: str, spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidResource):
        parse_object(tier("t", **spec))
    with pytest.raises(Refused, match=says) as refusal:
        api.create("kvcachetiers", tier("t", **spec))
    assert refusal.value.code == 422


def test_a_path_cannot_be_changed_and_a_size_can(api: Api) -> None:
    api.create("kvcachetiers", tier("t"))
    with pytest.raises(Refused, match="cannot be changed"):
        api.merge("kvcachetiers", "t", {"spec": {"path": "/elsewhere"}})
    assert api.merge("kvcachetiers", "t", {"spec": {"sizePerRank": "2Gi"}})["metadata"]["generation"] == 2


def test_a_final_volume_stays_final_and_its_spec_never_changes(api: Api) -> None:
    of = api.create("kvcachetiers", tier("t"))
    made = api.create("kvcachevolumes", volume(of) | {"status": volume_status("Erased")})
    name = made["metadata"]["name"]
    with pytest.raises(Refused, match="final"):
        api.set_status("kvcachevolumes", name, {"state": "InUse"})
    with pytest.raises(Refused, match="cannot be changed"):
        api.merge("kvcachevolumes", name, {"spec": {"nodeName": "node-b"}})


def test_a_complete_erasure_is_a_record(api: Api) -> None:
    body = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {"name": "e"},
        "spec": {"tierRef": {"name": "t"}, "reason": "test"},
        "status": {"state": "Complete", "residualBytes": 0},
    }
    api.create("kvcacheerasures", body)
    with pytest.raises(Refused, match="complete erasure"):
        api.set_status("kvcacheerasures", "e", {"residualBytes": 1})


def test_volumes_are_selected_by_node_and_tier(api: Api) -> None:
    of = api.create("kvcachetiers", tier("t"))
    api.create("kvcachevolumes", volume(of, "node-a"))
    kept = api.create("kvcachevolumes", volume(of, "node-b"))
    for selector in ("spec.nodeName=node-b", "spec.nodeName=node-b,spec.tierRef.name=t"):
        found = api.request("GET", api.path("kvcachevolumes") + f"?fieldSelector={selector}")["items"]
        assert [it["metadata"]["name"] for it in found] == [kept["metadata"]["name"]]


def test_an_unknown_field_is_refused_by_strict_validation(api: Api) -> None:
    with pytest.raises(Refused, match="sizePerRanks"):
        api.request("POST", api.path("kvcachetiers") + "?fieldValidation=Strict", json=tier("t", sizePerRanks="1Gi"))


def test_the_test_nodes_are_nodes_to_the_server(api: Api) -> None:
    made = api.create("nodes", node(f"n-{api.namespace}"))
    assert made["status"]["nodeInfo"]["bootID"] == "boot-1"
