"""Counts planted bytes in a raw image: exact pieces of KV blocks, and the prompt's own text.

It needs no understanding of models, so it also finds what the attack would miss. A control (the stock file) must give
hits, or the search proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvtier_demo.rawimage import chunks

__all__ = ["PIECE_BYTES", "CanaryHits", "count_canaries", "pieces_of"]

PIECE_BYTES: Final = 64
_FEWEST_DISTINCT_BYTES: Final = 16
_SHORTEST_TEXT_BYTES: Final = 8


@dataclass(frozen=True)
class CanaryHits:
    """Pieces of blocks and whole texts found. `text_searched` is False for a text too short to mean anything."""

    block_pieces: int
    texts: int
    text_searched: bool

    @property
    def total(self) -> int:
        return self.block_pieces + self.texts


def pieces_of(blocks: Iterable[bytes]) -> list[bytes]:
    """Each block cut into pieces of 64 bytes; pieces that any file could hold (zeros, padding) are left out."""
    found: dict[bytes, None] = {}
    for block in blocks:
        for start in range(0, len(block) - PIECE_BYTES + 1, PIECE_BYTES):
            piece = block[start : start + PIECE_BYTES]
            if len(set(piece)) >= _FEWEST_DISTINCT_BYTES:
                found[piece] = None
    return list(found)


def count_canaries(path: str | Path, pieces: Iterable[bytes], text: str) -> CanaryHits:
    """Search the file or device at `path` for `pieces` at multiples of 64 bytes and for `text` as UTF-8 anywhere.

    A text of fewer than 8 bytes is not searched. Raises as `rawimage.chunks` does.
    """
    wanted = set(pieces)
    heads = np.array(sorted({int.from_bytes(piece[:8], "little") for piece in wanted}), dtype=np.uint64)
    needle = text.encode("utf-8")
    text_searched = len(needle) >= _SHORTEST_TEXT_BYTES
    overlap = max(PIECE_BYTES, len(needle)) - 1
    pieces_found = texts_found = 0
    for _, own, data in chunks(path, overlap_bytes=overlap):
        raw = data.tobytes()
        first_words = data[: own - own % PIECE_BYTES].view(np.uint64)[:: PIECE_BYTES // 8]
        if len(heads):
            place = np.minimum(np.searchsorted(heads, first_words), len(heads) - 1)
            for index in np.flatnonzero(heads[place] == first_words):
                start = int(index) * PIECE_BYTES
                pieces_found += raw[start : start + PIECE_BYTES] in wanted
        if text_searched:
            at = raw.find(needle)
            while 0 <= at < own:
                texts_found += 1
                at = raw.find(needle, at + 1)
    return CanaryHits(pieces_found, texts_found, text_searched)
