"""Pages of a list: each object's identity is read, the rest of it only when somebody wants it.

At rest a full list has nothing new, and an object as Python sees it is five times as large as its text.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvtier_operator.facts import Body, Key

__all__ = ["LIST_CHUNK", "Listed", "page"]

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


class _Page(msgspec.Struct, rename="camel"):
    api_version: str = ""
    kind: str = ""
    metadata: _PageMetadata = msgspec.field(default_factory=_PageMetadata)
    items: list[msgspec.Raw] | None = None


_PAGE = msgspec.json.Decoder(_Page)
_HEAD = msgspec.json.Decoder(_Head)


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


def page(text: bytes) -> tuple[list[Listed], str]:
    """The objects of one answer, and the token of the next one; empty: it is the last. Raises msgspec.MsgspecError."""
    found = _PAGE.decode(text)
    kind = {"apiVersion": found.api_version, "kind": found.kind.removesuffix("List")}
    return [Listed(item, kind) for item in found.items or ()], found.metadata.following
