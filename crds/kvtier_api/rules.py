"""Rules of the API, each written twice side by side: in CEL for the API server, in Python for everybody else.

A `Rule` cannot exist in one language only, so a manifest that `kvtier node` accepts is one that a cluster accepts.
`check_update` applies the rules that compare an object with its predecessor. Whether the two languages say
the same is tested in tables (tests/api). What a single value must look like is the business of its field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import core_schema

from kvtier_api.errors import InvalidResource
from kvtier_api.quantity import invalid

__all__ = ["Immutable", "Rule", "RuledField", "TransitionRule", "check_update", "constant"]


@dataclass(frozen=True)
class Rule:
    """`holds(value)` in Python and `cel` over `self` must agree. `field` is relative: "encryption.sealSlots"."""

    cel: str
    holds: Callable[[Any], bool]
    message: str
    remedy: str
    field: str = ""

    def to_crd(self) -> dict[str, str]:
        return _to_crd(self.cel, f"{self.message}: {self.remedy}", self.field)


@dataclass(frozen=True)
class TransitionRule:
    """`holds(old, new)` in Python and `cel` over `self` and `oldSelf` must agree. Not evaluated at creation."""

    cel: str
    holds: Callable[[Any, Any], bool]
    message: str
    remedy: str
    field: str = ""

    def to_crd(self) -> dict[str, str]:
        return _to_crd(self.cel, f"{self.message}: {self.remedy}", self.field)


def _to_crd(cel: str, message: str, field: str) -> dict[str, str]:
    rule = {"rule": cel, "message": message}
    # The API server looks a fieldPath up in the schema, which knows nothing of what is in metadata.
    if field and not field.startswith("metadata."):
        rule["fieldPath"] = "." + field
    return rule


def constant(what: str) -> TransitionRule:
    """The value never changes after creation. Compared as it is written: 1Gi and 1024Mi differ here as in CEL."""
    return TransitionRule("self == oldSelf", _same, f"{what} cannot be changed", "create another object instead")


def _same(old: Any, new: Any) -> bool:
    return bool(_written(old) == _written(new))


def _written(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    return getattr(value, "text", value)


class RuledField:
    """Annotation of a field: `Annotated[str, RuledField(rule, …)]`."""

    def __init__(self, *rules: Rule | TransitionRule) -> None:
        self.rules = rules

    def _check(self, value: Any) -> Any:
        for rule in self.rules:
            if isinstance(rule, Rule) and not rule.holds(value):
                raise invalid(rule.message, rule.remedy, field=rule.field)
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        found: dict[str, Any] = dict(handler(schema))
        # A copy is extended: a definition that is shared by several fields must not collect the rules of one.
        found["x-kubernetes-validations"] = [
            *found.get("x-kubernetes-validations", []),
            *(rule.to_crd() for rule in self.rules),
        ]
        return found


class Immutable(RuledField):
    """Annotation of a field that never changes: `Annotated[str, Immutable("path")]`."""

    def __init__(self, what: str) -> None:
        super().__init__(constant(what))


def check_update(old: BaseModel, new: BaseModel) -> None:
    """Apply every transition rule to an object and its successor, as the API server does.

    Raises InvalidResource that names the field, or ValueError for objects of two kinds. Lists are not descended into:
    an element of an atomic list has no predecessor.
    """
    if type(old) is not type(new):
        raise ValueError(f"{type(new).__name__} cannot succeed {type(old).__name__}")
    for rule, before, after, path in _transitions(old, new, ""):
        if not rule.holds(before, after):
            where = ".".join(part for part in (path, rule.field) if part)
            raise InvalidResource(rule.message, obj=where, remedy=rule.remedy)


def _transitions(old: BaseModel, new: BaseModel, path: str) -> Iterator[tuple[TransitionRule, Any, Any, str]]:
    for rule in getattr(type(new), "rules", ()):
        if isinstance(rule, TransitionRule):
            yield rule, old, new, path
    for name, field in type(new).model_fields.items():
        before, after = getattr(old, name), getattr(new, name)
        if before is None or after is None:
            continue
        where = f"{path}.{field.alias or name}" if path else (field.alias or name)
        for annotation in field.metadata:
            if isinstance(annotation, RuledField):
                for rule in annotation.rules:
                    if isinstance(rule, TransitionRule):
                        yield rule, before, after, where
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _transitions(before, after, where)
