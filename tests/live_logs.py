"""Logs that are read while their processes write them: a line that is not whole yet is not read yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["json_lines", "whole_lines"]


def whole_lines(path: Path, *, since: int = 0) -> list[str]:
    """From that byte on. A file that is not there, yet or any more, has none."""
    try:
        with path.open("rb") as file:
            file.seek(since)
            data = file.read()
    except FileNotFoundError:
        return []
    return data[: data.rfind(b"\n") + 1].decode().splitlines()


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those lines that hold a JSON object, for others write there too."""
    return (json.loads(line) for line in whole_lines(path) if line.startswith("{"))
