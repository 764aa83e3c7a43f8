"""The figures of the demonstration, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["DemoFigures", "ProtectedFigures", "StockFigures", "print_report", "to_json"]


@dataclass(frozen=True)
class StockFigures:
    """The stock way. Bytes, tokens and seconds as measured after SIGKILL; `recovered_text` is from the file alone."""

    tokens_recovered: int
    word_for_word: bool
    bytes_on_disk: int
    canary_hits: int
    reload_hits: int
    reload_identical: bool
    o_direct: bool
    attack_s: float
    recovered_text: str = field(repr=False)


@dataclass(frozen=True)
class ProtectedFigures:
    """Through kvtier: the worst figures over the image while the consumer lived and after its death.

    `receipt_id` and `verified` are of the erasure that followed; `weaker` says what this run protects less than a
    volume with a key of its own does.
    """

    backend: str
    tokens_recovered: int
    bytes_searched: int
    bytes_on_disk: int
    canary_hits: int
    reload_hits: int
    reload_identical: bool
    death_to_erased_s: float
    attack_s: float
    receipt_id: str
    verified: bool
    weaker: list[str]


@dataclass(frozen=True)
class DemoFigures:
    """All of it. `kvtier` is None where only the stock part was asked for."""

    prompt_tokens: int
    stock: StockFigures
    kvtier: ProtectedFigures | None


def to_json(figures: DemoFigures) -> str:
    """The figures of the table, without the recovered text: what is piped into a file should not hold a prompt."""
    document = asdict(figures)
    del document["stock"]["recovered_text"]
    return json.dumps(document, indent=2, ensure_ascii=False)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


_ROWS: list[tuple[str, Callable[[StockFigures], str], Callable[[ProtectedFigures], str]]] = [
    ("reload hits before the kill", lambda s: str(s.reload_hits), lambda k: str(k.reload_hits)),
    ("logits identical after the reload", lambda s: _yes(s.reload_identical), lambda k: _yes(k.reload_identical)),
    ("prompt tokens recovered", lambda s: str(s.tokens_recovered), lambda k: str(k.tokens_recovered)),
    ("canary hits in the raw bytes", lambda s: str(s.canary_hits), lambda k: str(k.canary_hits)),
    ("bytes on disk after SIGKILL", lambda s: f"{s.bytes_on_disk:,}", lambda k: f"{k.bytes_on_disk:,}"),
    ("seconds from death to erased", lambda _: "never", lambda k: f"{k.death_to_erased_s:.3f}"),
    ("receipt", lambda _: "none", lambda k: k.receipt_id),
    ("receipt verified", lambda _: "-", lambda k: _yes(k.verified)),
]


def print_report(figures: DemoFigures, console: Console) -> None:
    """Print what was recovered, then the table, then what was weaker."""
    stock, kvtier = figures.stock, figures.kvtier
    same = "word for word" if stock.word_for_word else "in part"
    console.print(
        Panel(Text(stock.recovered_text), title=f"recovered from the stock slot file, {same}", border_style="red")
    )
    table = Table(title=f"SIGKILL with a prompt of {figures.prompt_tokens} tokens in the KV cache")
    table.add_column("")
    table.add_column("stock slot file", justify="right", style="red")
    if kvtier is not None:
        table.add_column(f"kvtier ({kvtier.backend})", justify="right", style="green")
    for name, of_stock, of_kvtier in _ROWS:
        table.add_row(name, of_stock(stock), *([of_kvtier(kvtier)] if kvtier is not None else []))
    console.print(table)
    for line in kvtier.weaker if kvtier is not None else []:
        console.print(Text(f"weaker here: {line}", style="yellow"))
