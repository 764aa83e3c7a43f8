"""Search a raw disk image for planted bytes: any piece of 16 bytes of any needle, at any offset, aligned or not.

A piece of 16 bytes, wherever it starts, contains one whole 8-byte word at an offset divisible by 8. So one pass over
the image's words against a table of all 8-byte windows of all needles finds every candidate, however many needles
there are; each is then compared byte for byte. Holes of a sparse image are skipped: they hold nothing.
"""

from __future__ import annotations

import base64
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 16
_WORD = 8
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Needle:
    """Bytes that must not be on a disk; `name` says what they are in a report."""

    name: str
    data: bytes


@dataclass(frozen=True)
class Hit:
    """`length` bytes of the needle, from its byte `needle_offset` on, lie at `offset` of the image."""

    name: str
    offset: int
    length: int
    needle_offset: int


def canary_lines(count: int, seed: int) -> list[bytes]:
    """`count` lines of 64 printable bytes, no two pieces of which are equal; the same for the same seed."""
    source = random.Random(seed)
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
    return [bytes(source.choices(letters, k=63)) + b"\n" for _ in range(count)]


def canary_needles(lines: Iterable[bytes]) -> list[Needle]:
    return [Needle(f"canary {number}", line) for number, line in enumerate(lines)]


def key_needles(name: str, key: bytes) -> list[Needle]:
    """A key in every form in which it leaks: raw (so its halves too), hexadecimal in both cases, base64."""
    text = key.hex()
    return [
        Needle(f"{name}, raw", key),
        Needle(f"{name}, hex", text.encode()),
        Needle(f"{name}, HEX", text.upper().encode()),
        Needle(f"{name}, base64", base64.b64encode(key)),
    ]


def search(image: Path, needles: Iterable[Needle], limit: int = 100_000) -> list[Hit]:
    """All hits, roughly in the order of the image; each run of a needle is one hit, as long as it matches.

    Stops after `limit` hits: enough to say that a disk is full of it. Raises ValueError for a needle shorter than a
    piece, or one with a window that any disk is full of (zeros, say).
    """
    wanted = list(needles)
    windows = _windows(wanted)
    words = np.array(sorted(windows), dtype="<u8")
    table = np.zeros(1 << 16, dtype=bool)
    table[(words & np.uint64(0xFFFF)).astype(np.intp)] = True
    hits: list[Hit] = []
    ends = [-1] * len(wanted)  # where the last hit of a needle ended, so that a run counts once
    starts = [-1] * len(wanted)
    with open(image, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _WORD:
            return []
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            for begin, end in _data_extents(file.fileno(), size):
                for position, value in _candidates(data, begin, end, words, table):
                    for index, inside in windows[value]:
                        if position < ends[index] and position - inside == starts[index]:
                            continue
                        hit = _extend(data, wanted[index], position, inside)
                        if hit.length >= PIECE_BYTES:
                            hits.append(hit)
                            ends[index] = hit.offset + hit.length
                            starts[index] = hit.offset - hit.needle_offset
                    if len(hits) >= limit:
                        return hits
    return hits


def count(hits: Iterable[Hit]) -> Counter[str]:
    """Hits per needle."""
    return Counter(hit.name for hit in hits)


def _windows(needles: list[Needle]) -> dict[int, list[tuple[int, int]]]:
    windows: dict[int, list[tuple[int, int]]] = {}
    for index, needle in enumerate(needles):
        if len(needle.data) < PIECE_BYTES:
            raise ValueError(f"needle {needle.name!r} is shorter than {PIECE_BYTES} bytes")
        for inside in range(len(needle.data) - _WORD + 1):
            window = needle.data[inside : inside + _WORD]
            if len(set(window)) == 1:
                raise ValueError(f"needle {needle.name!r} repeats one byte: any disk is full of that")
            windows.setdefault(int.from_bytes(window, "little"), []).append((index, inside))
    return windows


def _data_extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    while position < size:
        try:
            begin = os.lseek(fd, position, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        position = os.lseek(fd, begin, os.SEEK_HOLE)
        yield begin, position


def _candidates(
    data: mmap.mmap, begin: int, end: int, words: npt.NDArray[np.uint64], table: npt.NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    first = begin + -begin % _WORD
    for start in range(first, end, _BLOCK_BYTES):
        number = (min(start + _BLOCK_BYTES, end) - start) // _WORD
        if number == 0:
            return
        block = np.frombuffer(data, dtype="<u8", count=number, offset=start)
        # The low 16 bits rule out nearly all words; the exact comparison is left to the few others.
        places = np.flatnonzero(table[block.view("<u2")[::4]])
        values = block[places]
        found = words[np.minimum(np.searchsorted(words, values), len(words) - 1)] == values
        result = list(zip((places[found] * _WORD + start).tolist(), values[found].tolist(), strict=True))
        del block  # the map cannot be closed while an array looks into it
        yield from result


def _extend(data: mmap.mmap, needle: Needle, position: int, inside: int) -> Hit:
    text = needle.data
    low, high = inside, inside + _WORD
    shift = position - inside
    if shift >= 0 and data[shift : shift + len(text)] == text:
        return Hit(needle.name, shift, len(text), 0)
    while low > 0 and shift + low > 0 and data[shift + low - 1] == text[low - 1]:
        low -= 1
    while high < len(text) and shift + high < len(data) and data[shift + high] == text[high]:
        high += 1
    return Hit(needle.name, shift + low, high - low, low)
