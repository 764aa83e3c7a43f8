"""One way to print: plain data as JSON or YAML for programs, rich tables for people. stdout is for results only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtier_cli.options import OutputFormat

__all__ = ["complain", "count", "note", "show", "size", "table"]


def show(data: Any, output: OutputFormat, people: Callable[[], None]) -> None:
    """Print `data` (plain lists, dicts, strings and numbers), or call `people` for a terminal."""
    if output is OutputFormat.JSON:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    elif output is OutputFormat.YAML:
        import yaml

        yaml.safe_dump(data, sys.stdout, sort_keys=False, allow_unicode=True)
    else:
        people()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; text only, nothing of it is read as markup. As wide as it needs when stdout is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 500, highlight=False)
    made = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(Text("-" if cell is None or cell == "" else str(cell)) for cell in row))
    console.print(made)


def note(text: str) -> None:
    """A line for a person beside the result, on stderr."""
    complain(f"kvtier: {text if text.isprintable() else ascii(text)}\n")


def complain(text: str) -> None:
    """Write to stderr. A full disk or a reader that went away must not end what guards a volume."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def count(number: int, what: str) -> str:
    """1 receipt, 2 receipts."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(bytes_: int | None) -> str:
    """Bytes as people read them: 1.5 GiB."""
    if bytes_ is None:
        return "-"
    amount = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"
