"""What a path in a document may look like, and which lies below which. Whether it may be used is for a node to measure."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import Field

from kvtier_api.rules import Rule, RuledField

__all__ = ["PATH_LIMIT", "CleanPath", "is_below"]

PATH_LIMIT: Final = 1024
"""Characters. Leaves room below PATH_MAX (4096) for what the agent makes under the path."""

_UNPRINTABLE: Final = re.compile(r"[^ -~]")
_DOTS: Final = re.compile(r"(^|/)[.][.]?(/|$)")
_LONG_COMPONENT: Final = re.compile(r"[^/]{256}")

_PATH_RULES: Final = (
    Rule("self.startsWith('/')", lambda it: it.startswith("/"), "the path is not absolute", "begin it with '/'"),
    Rule(
        "!self.matches('[^ -~]')",
        lambda it: not _UNPRINTABLE.search(it),
        "the path has a character that is not printable ASCII",
        "use letters, digits and '._-'",
    ),
    Rule(
        "!self.matches('(^|/)[.][.]?(/|$)')",
        lambda it: not _DOTS.search(it),
        "the path has a component '.' or '..'",
        "write where it leads to",
    ),
    Rule("!self.contains('//')", lambda it: "//" not in it, "the path has an empty component", "write one '/'"),
    Rule(
        "!self.endsWith('/')",
        lambda it: not it.endswith("/"),
        "the path ends with '/', or is the root",
        "name a directory without the last '/'",
    ),
    Rule(
        "!self.matches('[^/]{256}')",
        lambda it: not _LONG_COMPONENT.search(it),
        "the path has a component of more than 255 bytes",
        "use a shorter name",
    ),
)

CleanPath = Annotated[str, Field(min_length=1, max_length=PATH_LIMIT), RuledField(*_PATH_RULES)]
"""An absolute path in its only spelling: printable ASCII, no '.', '..', '//' or last '/', not the root."""


def is_below(path: str, other: str) -> bool:
    """Whether `path` is a directory below `other`: both absolute and clean."""
    return path != other and path.startswith(f"{other.rstrip('/')}/")
