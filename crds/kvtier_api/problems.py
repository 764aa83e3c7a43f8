"""Turn pydantic's errors into one InvalidResource: the field's full path, the value, what is wrong, what to write.

Values that may hold a secret are not shown: those of unknown fields, of references to credentials, of the user part
of a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvtier_api.errors import InvalidResource

__all__ = ["field_path", "invalid_resource", "nearest"]

_SHOWN: Final = 80
_MOST: Final = 10
_USERINFO: Final = re.compile(r"(?<=//)[^/\s]*@")

_REMEDIES: Final = {
    "missing": "add it",
    "bool_type": "write true or false, without quotes",
    "int_type": "write a whole number, without quotes",
    "int_from_float": "write a whole number",
    "string_type": "write text, in quotes where it looks like a number",
    "list_type": "write a list",
    "tuple_type": "write a list",
    "dict_type": "write a mapping of names to values",
    "model_type": "write a mapping of fields to values",
    "model_attributes_type": "write a mapping of fields to values",
    "timezone_aware": "write the time with its zone, such as 2026-01-31T12:00:00Z",
}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant, whatever its case."""
    by_lower = {name.lower(): name for name in known}
    plain = word.lower().replace("_", "").replace("-", "")
    found = get_close_matches(plain, by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def field_path(location: Iterable[str | int]) -> str:
    """`("spec", "secondary", 0, "type")` as "spec.secondary[0].type"."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{_bounded(part, 100)}" if path else _bounded(part, 100)
    return path


def invalid_resource(error: ValidationError, model: type[BaseModel], source: str) -> InvalidResource:
    """All that is wrong, at most ten lines; the first one is the error's own object."""
    lines = [_line(detail, model) for detail in error.errors(include_url=False)]
    where, cause, remedy = lines[0]
    if len(lines) > 1:
        others = "".join(f"; also {path}: {text} ({fix})" for path, text, fix in lines[1:_MOST])
        more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        cause, remedy = f"{cause} ({remedy}){others}{more}", f"correct all {len(lines)}"
    return InvalidResource(cause, obj=f"{source}: {where}" if source else where, remedy=remedy)


def _line(detail: ErrorDetails, root: type[BaseModel]) -> tuple[str, str, str]:
    context: Mapping[str, Any] = detail.get("ctx", {})
    kind = detail["type"]
    location = detail["loc"]
    if kind == "extra_forbidden":
        known = _known_fields(root, location[:-1])
        meant = nearest(str(location[-1]), known)
        remedy = f"did you mean '{meant}'?" if meant else f"known here: {', '.join(known)}"
        return field_path(location), "no such field", remedy
    value = detail["input"]
    if kind == "kvtier":
        below = context["field"]
        for part in filter(None, below.split(".")):
            location = (*location, part)
            value = value.get(part) if isinstance(value, Mapping) else None
        cause, remedy = context["cause"], context["remedy"]
    else:
        cause = detail["msg"][:1].lower() + detail["msg"][1:]
        remedy = _REMEDIES.get(kind, "")
        if kind == "missing":
            cause = "a field that is needed is missing"
        elif kind in ("enum", "literal_error"):
            cause, remedy = "not one of the values", f"write {context['expected']}"
        elif kind == "string_pattern_mismatch":
            cause, remedy = "not in the form that is needed", f"match {context['pattern']}"
        elif not remedy:
            remedy = "write a value that fits"
    path = field_path(location)
    if kind == "missing" or value is None or isinstance(value, Mapping | list | BaseModel):
        return path, cause, remedy
    return f"{path} = {_shown(value, path)}", cause, remedy


def _shown(value: object, path: str) -> str:
    if "credential" in path.lower():
        return "(not shown)"
    text = _USERINFO.sub("***@", _bounded(str(value), 4 * _SHOWN))
    return _bounded(repr(text) if isinstance(value, str) else text, _SHOWN)


def _bounded(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


def _known_fields(root: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """Names that a document may use at a location of a model."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            continue
        fields = model.model_fields.values() if model is not None else ()
        model = next((_model_in(field.annotation) for field in fields if field.alias == part), None)
    return [field.alias or name for name, field in model.model_fields.items()] if model is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)
