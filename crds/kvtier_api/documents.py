"""From text or plain data to models: the only place where kvtier reads an object's fields by name.

`load_documents` is for files that people write, `parse_object` for what the API server returns. Both refuse unknown
fields, and values that a cluster would refuse.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from pydantic import ValidationError

from kvtier_api.erasure import KVCacheErasure
from kvtier_api.errors import InvalidResource, NotFound
from kvtier_api.hostile_yaml import MAX_SIZE_BYTES, read_documents
from kvtier_api.meta import API_VERSION, Resource
from kvtier_api.problems import field_path, invalid_resource, nearest
from kvtier_api.store import KVCacheStore
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import KVCacheVolume

__all__ = ["KINDS", "load_documents", "parse_object"]

KINDS: Final[dict[str, type[Resource]]] = {
    "KVCacheTier": KVCacheTier,
    "KVCacheVolume": KVCacheVolume,
    "KVCacheErasure": KVCacheErasure,
    "KVCacheStore": KVCacheStore,
}

ResourceT = TypeVar("ResourceT", bound=Resource)


def load_documents(origin: Path | str, *, source: str = "") -> list[Resource]:
    """The objects in a YAML file (a `Path`) or in YAML text (a `str`), in their order. Empty documents are passed over.

    `source` names the text in errors; a file names itself. The same kind, namespace and name twice is an error.
    Raises NotFound where there is no such file, InvalidResource that names file, document, field, value and remedy.
    """
    if isinstance(origin, Path):
        source = source or str(origin)
        origin = _read_file(origin, source)
    source = source or "(text)"
    found: list[Resource] = []
    seen: dict[tuple[str, str], int] = {}
    for number, data in read_documents(origin, source):
        where = f"{source}: document {number}"
        resource = parse_object(data, source=where)
        identity = (type(resource).__name__, resource.key)
        if identity in seen:
            raise InvalidResource(
                f"{identity[0]} {identity[1]} is already in document {seen[identity]}",
                obj=where,
                remedy="rename one or remove it",
            )
        seen[identity] = number
        found.append(resource)
    return found


def _read_file(path: Path, source: str) -> str:
    try:
        # O_NONBLOCK: a FIFO in a directory of manifests must not stop the agent.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise InvalidResource("not a regular file", obj=source, remedy="name a YAML file")
            data = file.read(MAX_SIZE_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFound("the file does not exist", obj=source, remedy="check the name") from error
    except OSError as error:
        raise InvalidResource(
            f"cannot be read: {error.strerror}", obj=source, remedy="check the name and its permissions"
        ) from error
    if len(data) > MAX_SIZE_BYTES:
        raise InvalidResource(f"more than {MAX_SIZE_BYTES} bytes", obj=source, remedy="split the file")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidResource(f"not UTF-8 text (byte {error.start})", obj=source, remedy="save it as UTF-8") from error


@overload
def parse_object(data: object, *, source: str = "") -> Resource: ...
@overload
def parse_object(data: object, *, source: str = "", kind: type[ResourceT]) -> ResourceT: ...
def parse_object(data: object, *, source: str = "", kind: type[Resource] | None = None) -> Resource:
    """The model of one object, by its `apiVersion` and `kind`. With `kind`, any other kind is an error.

    `source` (a file and document, or nothing) comes first in errors. Raises InvalidResource.
    """
    model = _model_of(data, source)
    if kind is not None and model is not kind:
        raise InvalidResource(
            f"a {model.__name__} where a {kind.__name__} is needed", obj=source, remedy=f"give a {kind.__name__}"
        )
    name = _name_of(data)
    where = f"{source}, {model.__name__} {name}" if source else f"{model.__name__} {name}"
    _refuse_nulls(data, (), where)
    try:
        # Snake_case is for Python: a document knows the aliases only, as the API server does.
        return model.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise invalid_resource(error, model, where) from error


def _model_of(data: object, source: str) -> type[Resource]:
    if not isinstance(data, Mapping):
        raise InvalidResource("not a mapping", obj=source, remedy="write apiVersion, kind, metadata and spec")
    version, kind = data.get("apiVersion"), data.get("kind")
    if version != API_VERSION:
        raise InvalidResource(
            "not an apiVersion of kvtier" if version is not None else "no apiVersion",
            obj=f"{source}: apiVersion = {str(version)[:80]!r}" if source else f"apiVersion = {str(version)[:80]!r}",
            remedy=f"write apiVersion: {API_VERSION}",
        )
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        meant = nearest(str(kind), KINDS)
        raise InvalidResource(
            "not a kind of kvtier" if kind is not None else "no kind",
            obj=f"{source}: kind = {str(kind)[:80]!r}" if source else f"kind = {str(kind)[:80]!r}",
            remedy=f"did you mean '{meant}'?" if meant else f"write one of {', '.join(KINDS)}",
        )
    return model


def _name_of(data: object) -> str:
    metadata = data.get("metadata") if isinstance(data, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return name[:80] if isinstance(name, str) else "(no name)"


def _refuse_nulls(data: object, location: tuple[str | int, ...], where: str) -> None:
    """A field without a value: the API server refuses or drops it, depending on its default. Here it is an error.

    Metadata is the API server's own, which writes nulls (`creationTimestamp: null`).
    """
    children: Sequence[tuple[Any, Any]] = ()
    if isinstance(data, Mapping):
        children = [(key, value) for key, value in data.items() if location or key not in ("metadata", "status")]
    elif isinstance(data, list):
        children = list(enumerate(data))
    for key, value in children:
        if value is None:
            raise InvalidResource(
                "a field without a value",
                obj=f"{where}: {field_path((*location, key))}",
                remedy="write a value or leave the field out",
            )
        _refuse_nulls(value, (*location, key), where)
