"""An API server in the small: what it does with a CRD before it stores an object, read from the generated YAML.

Defaults, then the structural schema, then every CEL rule with two independent CEL libraries. Kubernetes' own CEL
function `quantity()` is in neither, so it is given to both here (comparison of exact numbers, no more).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import cel
import celpy
import pytest
import yaml
from celpy import celtypes

MANIFESTS = Path(__file__).resolve().parents[2] / "crds" / "manifests"


class Disagreement(AssertionError):
    """The two CEL libraries say different things."""


def _quantity(text: str) -> int:
    """Milli-bytes, so that both libraries carry an integer. Written apart from kvtier_api.quantity on purpose."""
    number, unit = re.fullmatch(r"([0-9.]+)(.*)", str(text)).groups()
    powers = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
    powers |= {f"{letter}i": 2 ** (10 * (index + 1)) for index, letter in enumerate("KMGTPE")}
    factor = powers[unit] if unit in powers else 10 ** int(unit[1:])
    return min(int(Fraction(number) * factor * 10), 2**63 - 1)


def _compare(one: int, other: int) -> int:
    return (one > other) - (one < other)


def _with_cel(rule: str, variables: dict[str, Any]) -> bool:
    context = cel.Context()
    for name, value in variables.items():
        context.add_variable(name, value)
    context.add_function("quantity", _quantity)
    context.add_function("compareTo", _compare)
    return cel.evaluate(rule, context)


_PROGRAMS: dict[str, Any] = {}


def _with_celpy(rule: str, variables: dict[str, Any]) -> bool:
    if rule not in _PROGRAMS:
        environment = celpy.Environment()
        functions = {
            "quantity": lambda text: celtypes.IntType(_quantity(text)),
            "compareTo": lambda one, other: celtypes.IntType(_compare(one, other)),
        }
        _PROGRAMS[rule] = environment.program(environment.compile(rule), functions=functions)
    found = _PROGRAMS[rule].evaluate({name: celpy.json_to_cel(value) for name, value in variables.items()})
    return bool(found)


def holds(rule: str, variables: dict[str, Any]) -> bool:
    verdicts = (_with_cel(rule, variables), _with_celpy(rule, variables))
    if verdicts[0] is not True and verdicts[0] is not False:
        raise AssertionError(f"{rule}: not a boolean: {verdicts[0]!r}")
    if verdicts[0] != verdicts[1]:
        raise Disagreement(f"{rule} with {variables}: cel {verdicts[0]}, celpy {verdicts[1]}")
    return verdicts[0]


class CrdServer:
    """`refusals(object)` and `refusals(new, old)`: the messages an API server would refuse with. Empty: accepted."""

    def __init__(self) -> None:
        self.crds = {crd["spec"]["names"]["kind"]: crd for crd in map(_load, sorted(MANIFESTS.glob("*.yaml")))}

    def schema(self, kind: str) -> dict[str, Any]:
        return self.crds[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def refusals(self, new: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        schema = self.schema(new["kind"])
        new = defaulted(schema, copy.deepcopy(new))
        found = list(_schema_errors(schema, new, ""))
        # The API server evaluates rules only on what the schema accepts.
        return found or list(_rule_errors(schema, new, defaulted(schema, copy.deepcopy(old)) if old else None, ""))


def _load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def defaulted(schema: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if name not in value and "default" in part:
                value[name] = copy.deepcopy(part["default"])
            if name in value:
                value[name] = defaulted(part, value[name])
    elif isinstance(value, list) and "items" in schema:
        value = [defaulted(schema["items"], item) for item in value]
    return value


_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
}


def _schema_errors(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    if "type" in schema and not _TYPES[schema["type"]](value):
        yield f"{path}: not of type {schema['type']}"
        return
    if schema.get("x-kubernetes-int-or-string") and not (_TYPES["integer"](value) or isinstance(value, str)):
        yield f"{path}: not an integer or string"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not in enum"
    if isinstance(value, str):
        if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
            yield f"{path}: pattern"
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**9):
            yield f"{path}: length"
    elif isinstance(value, int) and not isinstance(value, bool):
        if not schema.get("minimum", -(2**63)) <= value <= schema.get("maximum", 2**63 - 1):
            yield f"{path}: range"
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", 10**9):
            yield f"{path}: too many"
        for index, item in enumerate(value):
            yield from _schema_errors(schema["items"], item, f"{path}[{index}]")
    elif isinstance(value, dict) and path != ".metadata":
        yield from _object_errors(schema, value, path)


def _object_errors(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[str]:
    if len(value) > schema.get("maxProperties", 10**9):
        yield f"{path}: too many"
    for name in schema.get("required", []):
        if name not in value:
            yield f"{path}.{name}: required"
    for name, part in value.items():
        below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
        if below is None:
            yield f"{path}.{name}: unknown field"
        else:
            yield from _schema_errors(below, part, f"{path}.{name}")


def _rule_errors(schema: dict[str, Any], new: Any, old: Any, path: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", []):
        variables = {"self": new}
        if "oldSelf" in rule["rule"]:
            if old is None:
                continue
            variables["oldSelf"] = old
        if not holds(rule["rule"], variables):
            yield f"{path}{rule.get('fieldPath', '')}: {rule['message']}"
    if isinstance(new, dict):
        for name, part in new.items():
            below = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if below is not None:
                yield from _rule_errors(below, part, old.get(name) if isinstance(old, dict) else None, f"{path}.{name}")
    elif isinstance(new, list):
        for index, item in enumerate(new):
            yield from _rule_errors(schema["items"], item, None, f"{path}[{index}]")


@pytest.fixture(scope="session")
def server() -> CrdServer:
    return CrdServer()


def tier(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": "prod"},
        "spec": {"sizePerRank": "1Gi", "ranks": 2, "path": "/var/lib/kv"} | spec,
    }


@pytest.fixture
def make_tier() -> Callable[..., dict[str, Any]]:
    return tier
