"""A model's JSON schema as Kubernetes' structural schema: no references, no unions with null, types everywhere.

Rules of structural schemas: kubernetes.io, "Extend the Kubernetes API with CustomResourceDefinitions". What is not
allowed beside `properties` (`additionalProperties: false`) is dropped: unknown fields are refused by the API server's
field validation (`Strict`, kubectl's default) and by the models.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

__all__ = ["structural_schema"]

_DROPPED: Final = ("title", "const", "additionalProperties", "$defs", "propertyNames")
_CONDITION_LIST: Final = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}


def structural_schema(model: type[BaseModel]) -> dict[str, Any]:
    """`openAPIV3Schema` of a kind: apiVersion, kind, metadata, spec, status."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    found = _structural(schema, schema.get("$defs", {}))
    properties = found["properties"]
    properties["metadata"] = {"type": "object"}
    for name in ("apiVersion", "kind"):
        properties[name] = {"type": "string"}
    found["properties"] = {name: properties[name] for name in ("apiVersion", "kind", "metadata", "spec", "status")}
    found["required"] = ["spec"]
    return found


def _structural(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    schema = _inlined(schema, definitions)
    found = {key: value for key, value in schema.items() if key not in _DROPPED}
    if found.get("default", ...) is None:
        del found["default"]
    if found.get("type") == "integer":
        found["format"] = "int64"
    if "properties" in found:
        required = found.get("required", [])
        found["properties"] = {
            name: _property(value, definitions, optional=name not in required)
            for name, value in found["properties"].items()
        }
        if "conditions" in found["properties"]:
            found["properties"]["conditions"].update(_CONDITION_LIST)
    elif found.get("type") == "object" and isinstance(values := schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _structural(values, definitions)
    if "items" in found:
        found["items"] = _structural(found["items"], definitions)
    return found


def _property(schema: dict[str, Any], definitions: dict[str, Any], *, optional: bool) -> dict[str, Any]:
    found = _structural(schema, definitions)
    # The API server fills defaults in only where the object around them exists. A part that pydantic makes by itself
    # (optional, and not a union with null) therefore exists from the start.
    if optional and "properties" in found and not found.get("required") and "anyOf" not in schema:
        # Written out: the API server evaluates rules on a default as it stands, before it fills in the defaults within.
        parts = found["properties"].items()
        found["default"] = {name: part["default"] for name, part in parts if "default" in part}
    return found


def _inlined(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Without `$ref`, and without the null of `X | None`. What stands beside a reference wins."""
    beside = dict(schema)
    if (reference := beside.pop("$ref", None)) is not None:
        return _merged(_inlined(definitions[reference.rpartition("/")[2]], definitions), beside)
    branches = beside.get("anyOf", [])
    if {"type": "null"} in branches:
        (branch,) = [branch for branch in branches if branch != {"type": "null"}]
        del beside["anyOf"]
        return _merged(_inlined(branch, definitions), beside)
    return beside


def _merged(inner: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    rules = [*inner.get("x-kubernetes-validations", []), *outer.get("x-kubernetes-validations", [])]
    found = {**inner, **outer}
    if rules:
        found["x-kubernetes-validations"] = rules
    return found
