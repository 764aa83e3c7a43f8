"""The generated CRDs: up to date, structural, within the API server's limits, and what kubectl shows."""

from __future__ import annotations

import operator
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_api.documents import KINDS
from kvtier_api.generate import MANIFESTS, main, manifests
from kvtier_api.reasons import REASONS, Reason

KIND_NAMES = sorted(KINDS)
VALUE_KEYWORDS = {"type", "properties", "items", "additionalProperties", "default", "description"} | {
    "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "required",
    "maxProperties", "minProperties", "uniqueItems", "anyOf", "nullable",
}  # fmt: skip
KUBERNETES_KEYWORDS = {
    "x-kubernetes-validations",
    "x-kubernetes-int-or-string",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
}


def walk(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, part in schema.get("properties", {}).items():
        yield from walk(part, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from walk(schema[name], f"{path}[]")


def find(schema: dict[str, Any], path: str) -> dict[str, Any]:
    for part in path.strip(".").split("."):
        schema = schema["properties"][part]
    return schema


def test_committed_manifests_are_what_the_models_say() -> None:
    assert {path.name: path.read_text() for path in MANIFESTS.glob("*.yaml")} == manifests()
    assert main(["--check"]) == 0


def test_check_sees_a_changed_a_missing_and_a_stale_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 0
    first, second, *_ = sorted(tmp_path.glob("*.yaml"))
    first.write_text(first.read_text().replace("minimum: 1\n", "minimum: 0\n").replace("maxLength", "maxlength"))
    second.unlink()
    (tmp_path / "old.yaml").write_text("")
    assert main(["--check", "--output", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert first.name in told
    assert second.name in told
    assert "old.yaml" in told
    assert main(["--output", str(tmp_path)]) == 0
    assert main(["--check", "--output", str(tmp_path)]) == 0


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_schema_is_structural(server: Any, kind: str) -> None:
    schema = server.schema(kind)
    assert set(schema["properties"]) == {"apiVersion", "kind", "metadata", "spec", "status"}
    assert schema["properties"]["metadata"] == {"type": "object"}
    for path, part in walk(schema):
        assert set(part) <= VALUE_KEYWORDS | KUBERNETES_KEYWORDS, path
        if part.get("x-kubernetes-int-or-string"):
            assert "type" not in part, path
            assert part["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert part["type"] in ("object", "array", "string", "integer", "boolean"), path
            assert "anyOf" not in part, path
        assert not ("properties" in part and "additionalProperties" in part), path
        assert set(part.get("required", [])) <= set(part.get("properties", {})), path
        if part.get("type") == "array":
            assert "items" in part, path
        if "pattern" in part:
            assert re.compile(part["pattern"]), path
            assert "(?" not in part["pattern"], f"{path}: Go's regexp has no look-around"
        assert part.get("default", "") is not None, path


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_everything_is_bounded_so_that_cel_stays_within_its_cost_budget(server: Any, kind: str) -> None:
    for path, part in walk(server.schema(kind)):
        if path in (".apiVersion", ".kind", ".metadata"):
            continue
        if part.get("type") == "string" and "enum" not in part and part.get("format") != "date-time":
            assert "maxLength" in part, path
        if part.get("type") == "array":
            assert "maxItems" in part, path
        if "additionalProperties" in part:
            assert "maxProperties" in part, path
        if part.get("x-kubernetes-int-or-string"):
            assert "maxLength" in part, path


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_defaults_satisfy_the_schema_that_they_are_in(server: Any, kind: str) -> None:
    """The API server refuses a CRD whose defaults do not validate; an object's default must be complete when filled."""
    from_conftest = type(server).refusals.__globals__
    for path, part in walk(server.schema(kind)):
        if "default" in part:
            value = from_conftest["defaulted"](part, part["default"])
            assert list(from_conftest["_schema_errors"](part, value, path)) == [], path


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_rules_have_messages_and_field_paths_that_exist(server: Any, kind: str) -> None:
    for path, part in walk(server.schema(kind)):
        for rule in part.get("x-kubernetes-validations", []):
            assert set(rule) <= {"rule", "message", "fieldPath"}, path
            assert 0 < len(rule["message"]) <= 2048
            assert "\n" not in rule["message"]
            assert "\n" not in rule["rule"]
            if "fieldPath" in rule:
                assert find(part, rule["fieldPath"]), f"{path}: {rule['fieldPath']}"


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_no_transition_rule_sits_below_an_atomic_list(server: Any, kind: str) -> None:
    """The API server refuses such a CRD: an element of an atomic list has no old self."""
    for path, part in walk(server.schema(kind)):
        if "[]" in path:
            assert not any("oldSelf" in rule["rule"] for rule in part.get("x-kubernetes-validations", [])), path


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_conditions_are_a_map_list_keyed_by_type(server: Any, kind: str) -> None:
    conditions = find(server.schema(kind), ".status.conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert {"type", "status", "reason", "lastTransitionTime"} <= set(conditions["items"]["required"])


@pytest.mark.parametrize(
    ("kind", "short_name"),
    [("KVCacheTier", "kvct"), ("KVCacheVolume", "kvcv"), ("KVCacheErasure", "kvce"), ("KVCacheStore", "kvcs")],
)
def test_names_columns_and_selectable_fields(server: Any, kind: str, short_name: str) -> None:
    crd = server.crds[kind]
    assert crd["metadata"]["name"] == f"{crd['spec']['names']['plural']}.kvtier.dev"
    assert crd["spec"]["names"]["shortNames"] == [short_name]
    assert crd["spec"]["scope"] == "Namespaced"
    (version,) = crd["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    columns = {column["name"]: column for column in version["additionalPrinterColumns"]}
    assert {"Ready", "Reason", "Age"} <= set(columns)
    for column in columns.values():
        if re.fullmatch(r"([.][a-zA-Z]+)+", column["jsonPath"]) and not column["jsonPath"].startswith(".metadata"):
            part = find(version["schema"]["openAPIV3Schema"], column["jsonPath"])
            assert column["type"] == part.get("type", "string"), column
    assert len(version["selectableFields"]) <= 8
    for field in version["selectableFields"]:
        assert find(version["schema"]["openAPIV3Schema"], field["jsonPath"])["type"] in ("string", "boolean", "integer")


def test_volumes_and_stores_are_selectable_by_node(server: Any) -> None:
    for kind in ("KVCacheVolume", "KVCacheStore"):
        (version,) = server.crds[kind]["spec"]["versions"]
        assert {"jsonPath": ".spec.nodeName"} in version["selectableFields"]


def test_every_reason_is_explained() -> None:
    assert set(REASONS) == set(Reason)
    assert all(re.fullmatch(r"[A-Z][A-Za-z]*", reason) for reason in Reason)


def test_the_folder_operator_does_not_hide_pythons_own_module() -> None:
    root = Path(__file__).resolve().parents[2]
    assert not (root / "operator" / "__init__.py").exists()
    assert not list((root / "operator").glob("*.py"))
    assert Path(operator.__file__).parent == Path(sysconfig.get_path("stdlib"))
    assert sys.modules["operator"] is operator
    assert operator.itemgetter(1)("ab") == "b"
