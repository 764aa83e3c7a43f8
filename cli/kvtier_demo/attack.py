"""Recovers a prompt from the bytes of any file, knowing only the model: what anyone can do with a left-over slot file.

It knows neither where blocks lie nor their size nor the order of layers; it slides a window of one key over the file
and asks whether the bytes are the layer-0 key of some token of the vocabulary at some position. Random bytes, and
ciphertext, match nothing. It is here so that operators see on their own data why plaintext KV-cache files are prompts.

Limits: blocks of several requests that lie interleaved cannot be told apart by layer 0 alone; requests whose blocks lie
together can. Keys that start at no multiple of `alignment_bytes` are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvtier_api.errors import UsageError
from kvtier_demo.keytable import KeyTable
from kvtier_demo.rawimage import Bytes, chunks

__all__ = ["GAP", "AttackedModel", "Hit", "KeyTable", "Recovery", "recover_prompt"]

GAP: Final = " […] "
_DEFAULT_ALIGNMENT_BYTES: Final = 64
_LONGEST_ALIGNMENT_BYTES: Final = 4096


class Decoder(Protocol):
    """What the attack needs of a tokeniser; tokenisers are public."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def prompt_part(self, tokens: Sequence[int]) -> list[int]: ...


class AttackedModel(Protocol):
    """What the attack needs of a model; weights are public, or at hand where the file is."""

    @property
    def tokenizer(self) -> Decoder: ...

    def key_table(self) -> KeyTable: ...


@dataclass(frozen=True)
class Hit:
    """A layer-0 key found: its offset in bytes, and the token, position and KV head that it is the key of."""

    offset: int
    position: int
    token: int
    kv_head: int


@dataclass
class Recovery:
    """What an attack found. `sequences`: a map of position to token for each request, the longest first."""

    text: str
    hits: list[Hit]
    sequences: list[dict[int, int]]
    scanned_bytes: int
    seconds: float

    @property
    def tokens_recovered(self) -> int:
        """Tokens of the longest sequence, its specials and answer included."""
        return len(self.sequences[0]) if self.sequences else 0

    def matching(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from position 0 on, the best sequence has in place."""
        return max((sum(s.get(p) == t for p, t in enumerate(tokens)) for s in self.sequences), default=0)


def recover_prompt(
    path: str | Path, model: AttackedModel, *, alignment_bytes: int = _DEFAULT_ALIGNMENT_BYTES
) -> Recovery:
    """Search the file or block device at `path` for layer-0 keys of `model`, and read the prompt off them.

    `alignment_bytes`: a power of two, at least the size of one element, at most 4096; keys are sought at its multiples.
    Raises NotFound and KernelError as `rawimage.chunks` does, UsageError for another alignment.
    """
    began = time.monotonic()
    table = model.key_table()
    if (
        alignment_bytes & (alignment_bytes - 1)
        or not table.element_bytes <= alignment_bytes <= _LONGEST_ALIGNMENT_BYTES
    ):
        raise UsageError(
            f"must be a power of two from {table.element_bytes} to {_LONGEST_ALIGNMENT_BYTES}",
            obj=f"alignment_bytes={alignment_bytes}",
        )
    window_bytes = table.head_dim * table.element_bytes
    hits: list[Hit] = []
    scanned = 0
    for offset, own, data in chunks(path, overlap_bytes=window_bytes - table.element_bytes):
        hits.extend(_search(data, offset, table, alignment_bytes))
        scanned += own
    hits = sorted(set(hits), key=lambda hit: hit.offset)
    sequences = _assemble(hits)
    text = _text(sequences[0], model.tokenizer) if sequences else ""
    return Recovery(text, hits, sequences, scanned, time.monotonic() - began)


def _search(data: Bytes, offset: int, table: KeyTable, alignment_bytes: int) -> list[Hit]:
    raw: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    usable = data[: len(data) - len(data) % table.element_bytes]
    raw = usable.view(np.uint16) if table.element_bytes == 2 else usable.view(np.uint32)
    starts = _plausible(raw, table, alignment_bytes // table.element_bytes)
    if not len(starts):
        return []
    windows = table.numbers(raw[starts[:, None] + np.arange(table.head_dim)[None, :]])
    rows, near = table.nearest(windows)
    starts, windows, rows = starts[near], windows[near], rows[near]
    positions, fits = table.positions(windows, rows)
    return [
        Hit(
            offset + int(start) * table.element_bytes,
            int(position),
            int(row) // table.kv_heads,
            int(row) % table.kv_heads,
        )
        for start, position, row in zip(starts[fits], positions[fits], rows[fits], strict=True)
    ]


def _plausible(
    raw: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], table: KeyTable, step: int
) -> npt.NDArray[np.int64]:
    """Windows (by their first element) whose pair lengths could be a key's: pair by pair, each on what is left.

    Random bytes lose half or more of the windows at each pair, zeros all of them at the first.
    """
    half = table.head_dim // 2
    low, high = table.bounds
    starts = np.arange(0, max(len(raw) - table.head_dim + 1, 0), step, dtype=np.int64)
    kept: list[npt.NDArray[np.float32]] = []
    with np.errstate(over="ignore", invalid="ignore"):
        for order, pair in enumerate(table.pair_order):
            if not len(starts):
                break
            length = np.hypot(table.numbers(raw[starts + pair]), table.numbers(raw[starts + pair + half]))
            keep = (length >= low[pair]) & (length <= high[pair])
            starts = starts[keep]
            if order < len(table.cell_pairs):
                kept = [column[keep] for column in kept] + [length[keep]]
            if order == len(table.cell_pairs) - 1:
                starts = starts[table.in_cells(np.stack(kept, axis=1))]
    return starts


@dataclass
class _Sequence:
    """A request being put together; `echo` are the positions of an unbroken run that repeats what was known."""

    tokens: dict[int, int] = field(default_factory=dict)
    echo: list[int] = field(default_factory=list)


def _assemble(hits: Sequence[Hit]) -> list[dict[int, int]]:
    """Requests, the longest first. A hit goes to the request last added to that it does not contradict.

    A new request whose first tokens repeat those of another (a shared prefix) is given them.
    """
    recent: list[_Sequence] = []
    for hit in hits:
        for index, sequence in enumerate(recent):
            known = sequence.tokens.get(hit.position)
            if known not in (None, hit.token):
                continue
            if known is None:
                sequence.echo = []
            elif sequence.echo and hit.position == sequence.echo[-1] + 1:
                sequence.echo.append(hit.position)
            elif not sequence.echo or hit.position != sequence.echo[-1]:
                sequence.echo = [hit.position]
            sequence.tokens[hit.position] = hit.token
            recent.insert(0, recent.pop(index))
            break
        else:
            shared = recent[0] if recent else _Sequence()
            prefix = shared.echo if shared.echo and shared.echo[-1] == hit.position - 1 else []
            recent.insert(0, _Sequence({position: shared.tokens[position] for position in prefix}))
            recent[0].tokens[hit.position] = hit.token
    return sorted((sequence.tokens for sequence in recent), key=len, reverse=True)


def _text(tokens: dict[int, int], tokenizer: Decoder) -> str:
    """The prompt's text; what is missing between found tokens shows as GAP."""
    runs: list[list[int]] = []
    expected = 0
    for position in sorted(tokens):
        if position != expected or not runs:
            runs.append([])
        runs[-1].append(tokens[position])
        expected = position + 1
    parts: list[str] = [GAP] if min(tokens) > 0 else []
    for index, run in enumerate(runs):
        prompt = tokenizer.prompt_part(run)
        parts.append((GAP if index else "") + tokenizer.decode(prompt))
        if len(prompt) < len(run):
            break
    return "".join(parts)
