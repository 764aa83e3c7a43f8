"""Pages of a list, and lines of a watch: each object's identity is read, the rest of it only when somebody wants it.

At rest a full list has nothing new, and an object as Python sees it is five times as large as its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvtier_operator.facts import Body, Key

__all__ = ["LIST_CHUNK", "Change", "Listed", "Page", "change", "page"]

LIST_CHUNK: Final = 500
"""Objects in one answer, which is held as text: a real Node has 15 KB, and five times that as Python objects."""


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""


class _Head(msgspec.Struct):
    metadata: _Metadata


class _PageMetadata(msgspec.Struct):
    following: str = msgspec.field(name="continue", default="")
    version: str = msgspec.field(name="resourceVersion", default="")


class _Page(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    metadata: _PageMetadata = msgspec.field(default_factory=_PageMetadata)
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


_PAGE = msgspec.json.Decoder(_Page)
_HEAD = msgspec.json.Decoder(_Head)
_EVENT = msgspec.json.Decoder(_Event)
_STATUS = msgspec.json.Decoder(_Status)


class Listed:
    """One object of a list."""

    __slots__ = ("_kind", "_text", "identity")

    def __init__(self, text: msgspec.Raw, kind: dict[str, str]) -> None:
        """`kind`: apiVersion and kind, which items of a list do not repeat. Raises msgspec.MsgspecError."""
        self._text = text
        self._kind = kind
        meta = _HEAD.decode(text).metadata
        self.identity: tuple[Key, str, str] = (meta.namespace, meta.name), meta.uid, meta.resource_version

    def body(self) -> Body:
        """All of it."""
        found: dict[str, Any] = msgspec.json.decode(self._text)
        return self._kind | found


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of a list. `following` is the token of the next one; empty: it is the last. `version` is the list's."""

    items: list[Listed]
    following: str
    version: str


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a watch. `type` is ADDED, MODIFIED, DELETED, BOOKMARK (of the item only the version counts) or ERROR."""

    type: str
    item: Listed
    code: int = 0
    message: str = ""


def page(text: bytes) -> Page:
    """Raises msgspec.MsgspecError."""
    found = _PAGE.decode(text)
    kind = {"apiVersion": found.api_version, "kind": found.kind.removesuffix("List")}
    items = [Listed(item, kind) for item in found.items or ()]
    return Page(items, found.metadata.following, found.metadata.version)


def change(line: bytes) -> Change:
    """Raises msgspec.MsgspecError."""
    found = _EVENT.decode(line)
    item = Listed(found.object, {})
    if found.type != "ERROR":
        return Change(found.type, item)
    status = _STATUS.decode(found.object)
    return Change(found.type, item, status.code, status.message)
