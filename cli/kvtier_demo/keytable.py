"""The layer-0 keys of a model's vocabulary, prepared so that a match in any bytes is found fast.

A layer-0 key depends on the token and its position alone: RoPE(position) · W_k · norm(embedding[token]). RoPE turns
pairs of elements and leaves the length of each pair as it was, so the lengths identify the token at any position, and
the angles then give the position. This module holds tables and arithmetic; what to search is `attack`'s subject.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Element", "KeyTable"]

Element = Literal["bfloat16", "float16", "float32"]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_CELL_DIMENSIONS: Final = 6
_CELL_LEVELS: Final = 36
_CELL_BITS: Final = 24
_CELL_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
# Relative error of one stored element, with room for engines that rotate in the cache's own precision.
_TOLERANCE: Final[dict[str, float]] = {"bfloat16": 0.012, "float16": 0.003, "float32": 0.001}
_BATCH: Final = 1024


@dataclass(frozen=True)
class KeyTable:
    """keys: float32 [vocabulary, kv_heads, head_dim], before RoPE; inv_freq: float64 [head_dim / 2], radians a
    position; element: how the cache stores a number. RoPE pairs element i with i + head_dim / 2, as Llama's does.
    """

    keys: Floats
    inv_freq: npt.NDArray[np.float64]
    max_positions: int
    element: Element

    @property
    def head_dim(self) -> int:
        return int(self.keys.shape[2])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def element_bytes(self) -> int:
        return 4 if self.element == "float32" else 2

    @property
    def tolerance(self) -> float:
        return _TOLERANCE[self.element]

    def numbers(self, raw: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> Floats:
        """Stored elements as float32. Random bytes may give infinities and NaN; no comparison holds for those."""
        if self.element == "bfloat16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if self.element == "float16":
            return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
        return np.ascontiguousarray(raw).view(np.float32)

    @cached_property
    def lengths(self) -> Floats:
        """[vocabulary · kv_heads, head_dim / 2]: length of each pair; the row is token · kv_heads + head."""
        flat = self.keys.reshape(-1, self.head_dim)
        half = self.head_dim // 2
        return np.hypot(flat[:, :half], flat[:, half:]).astype(np.float32)

    @cached_property
    def bounds(self) -> tuple[Floats, Floats]:
        """Shortest and longest length of each pair over all keys, tolerance included."""
        low, high = self.lengths.min(axis=0), self.lengths.max(axis=0)
        return (low * (1 - self.tolerance)).astype(np.float32), (high * (1 + self.tolerance)).astype(np.float32)

    @cached_property
    def pair_order(self) -> list[int]:
        """Pairs in the order in which they are tested: those first whose lengths differ most between keys."""
        spread = self.lengths.std(axis=0) / self.lengths.mean(axis=0)
        return [int(pair) for pair in np.argsort(-spread)]

    @property
    def cell_pairs(self) -> list[int]:
        return self.pair_order[:_CELL_DIMENSIONS]

    def _cell_index(self, levels: npt.NDArray[np.uint64]) -> Ints:
        """Hash of a cell: levels is [n, dimensions]."""
        number = np.zeros(len(levels), dtype=np.uint64)
        for column in range(levels.shape[1]):
            number = number * np.uint64(_CELL_LEVELS + 2) + levels[:, column]
        return ((number * _CELL_MULTIPLIER) >> np.uint64(64 - _CELL_BITS)).astype(np.int64)

    def _levels(self, lengths: Floats) -> npt.NDArray[np.uint64]:
        scale = _CELL_LEVELS / self.bounds[1][self.cell_pairs]
        return np.clip(lengths * scale, 0, _CELL_LEVELS + 1).astype(np.uint64)

    @cached_property
    def _cells(self) -> npt.NDArray[np.bool_]:
        """True at the hash of each cell that some key, give or take the tolerance, lies in."""
        cells = np.zeros(1 << _CELL_BITS, dtype=np.bool_)
        own = self.lengths[:, self.cell_pairs]
        ends = (self._levels(own * np.float32(1 - self.tolerance)), self._levels(own * np.float32(1 + self.tolerance)))
        for choice in itertools.product((0, 1), repeat=len(self.cell_pairs)):
            cells[self._cell_index(np.stack([ends[end][:, i] for i, end in enumerate(choice)], axis=1))] = True
        return cells

    def in_cells(self, lengths: Floats) -> npt.NDArray[np.bool_]:
        """Which rows of [n, len(cell_pairs)] lie in a cell with a key. Lets through every true match."""
        return self._cells[self._cell_index(self._levels(lengths))]

    def nearest(self, windows: Floats) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """For each window [n, head_dim]: the row of `lengths` nearest to its pair lengths, and whether it is near."""
        half = self.head_dim // 2
        rows = np.zeros(len(windows), dtype=np.int64)
        near = np.zeros(len(windows), dtype=np.bool_)
        squares = np.square(self.lengths).sum(axis=1)
        for start in range(0, len(windows), _BATCH):
            part = windows[start : start + _BATCH]
            lengths = np.hypot(part[:, :half], part[:, half:])
            own = np.square(lengths).sum(axis=1)
            # |a - b|² without |a|², which is the same for all candidates of a row.
            partial = squares[None, :] - 2 * (lengths @ self.lengths.T)
            best = partial.argmin(axis=1)
            distance = np.maximum(partial[np.arange(len(part)), best] + own, 0)
            rows[start : start + _BATCH] = best
            near[start : start + _BATCH] = distance <= own * self.tolerance**2 + 1e-5 * own
        return rows, near

    @cached_property
    def _turns(self) -> tuple[Floats, Floats]:
        angles = self.inv_freq[:, None] * np.arange(self.max_positions)[None, :]
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def positions(self, windows: Floats, rows: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """For each window and its row: the position whose rotation fits best, and whether every element then fits."""
        half = self.head_dim // 2
        found = np.zeros(len(windows), dtype=np.int64)
        fits = np.zeros(len(windows), dtype=np.bool_)
        keys = self.keys.reshape(-1, self.head_dim)
        cosines, sines = self._turns
        for start in range(0, len(windows), _BATCH):
            part = windows[start : start + _BATCH]
            key = keys[rows[start : start + _BATCH]]
            first, second, u, v = part[:, :half], part[:, half:], key[:, :half], key[:, half:]
            score = (first * u + second * v) @ cosines + (second * u - first * v) @ sines
            best = score.argmax(axis=1)
            cos, sin = cosines[:, best].T, sines[:, best].T
            error = np.square(first - (u * cos - v * sin)) + np.square(second - (v * cos + u * sin))
            found[start : start + _BATCH] = best
            fits[start : start + _BATCH] = error.sum(axis=1) <= self.tolerance**2 * np.square(part).sum(axis=1)
        return found, fits
