"""The read-back after an erasure: which places are read, and what the bytes there look like.

The plan follows NIST SP 800-88: at least 1,000 subsections of equal size, two places in each at random, and always the
first and the last address. The reader is a process of its own with a descriptor of its own, past the page cache
where the file system allows it: it trusts nothing that the eraser believes.

A block of 4 KiB is *empty* (all zero), *ciphertext* (Huffman coding alone cannot shorten it: at least about 7.96 bits
of entropy a byte) or *plaintext*. Keys and values in bf16, fp16, fp32 and int8, and text, are well below that. Data that was
compressed before it was stored is not told from ciphertext: docs/limitations.md says so.

What is less than a block can't be told that way. A sealing engine writes whole blocks, so the end of a file within one is not
its work, and counts as plaintext (`end_of_file`).
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = [
    "BLOCK_BYTES",
    "BlockKind",
    "Range",
    "SampleResult",
    "classify",
    "end_of_file",
    "joined",
    "merge",
    "plan_offsets",
    "sample",
]

BLOCK_BYTES: Final = 4096
SUBSECTIONS: Final = 1000
PLACES_EACH: Final = 2
_ZEROS: Final = bytes(BLOCK_BYTES)
_LISTED: Final = 8


class BlockKind(StrEnum):
    EMPTY = "empty"
    CIPHERTEXT = "ciphertext"
    PLAINTEXT = "plaintext"


@dataclass(frozen=True)
class Range:
    """Bytes [offset, offset + length) of a file or device; both are multiples of BLOCK_BYTES."""

    offset: int
    length: int


def joined(ranges: Sequence[Range]) -> list[Range]:
    """The same bytes in as few ranges as can be, in order, none twice."""
    result: list[Range] = []
    for part in sorted(ranges, key=lambda part: part.offset):
        if result and part.offset <= result[-1].offset + result[-1].length:
            last = result.pop()
            end = max(last.offset + last.length, part.offset + part.length)
            result.append(Range(last.offset, end - last.offset))
        else:
            result.append(part)
    return result


@dataclass(frozen=True)
class SampleResult:
    """How many sampled blocks are of which kind; where the first few plaintext blocks lie; whether the page cache was avoided.

    `unclear`: ends of files, each less than a block, of which nothing can be said.
    """

    blocks: int
    empty: int
    ciphertext: int
    plaintext: int
    plaintext_at: list[int]
    direct: bool
    unclear: int = 0

    @property
    def clean(self) -> bool | None:
        """Whether no plaintext was found; None where nothing was looked at."""
        return self.plaintext == 0 if self.blocks else None

    def sentence(self) -> str:
        ends = f"; {self.unclear} end(s) of files, less than a block each, can't be judged" if self.unclear else ""
        if self.blocks == 0:
            return f"nothing was looked at: no whole block of {BLOCK_BYTES} bytes was there to read{ends}"
        where = f", first at byte {self.plaintext_at[0]}" if self.plaintext_at else ""
        how = "past the page cache" if self.direct else "through the page cache"
        return (
            f"{self.blocks} blocks of {BLOCK_BYTES} bytes read {how}: "
            f"{self.empty} empty, {self.ciphertext} ciphertext, {self.plaintext} plaintext{where}{ends}"
        )

    def why_unknown(self) -> str:
        """Why a sample without plaintext does not show sealed slots; "" where it does."""
        if self.ciphertext:
            return ""
        return f"nothing but zeros where it was looked: {self.sentence()}" if self.blocks else "no slot is used yet"


def classify(block: bytes) -> BlockKind:
    """What `block` (any multiple of 4096 bytes) looks like."""
    if not any(block) if len(block) != BLOCK_BYTES else block == _ZEROS:
        return BlockKind.EMPTY
    # memLevel 9: one Huffman tree over the whole block; a lower one cuts it into pieces too short for statistics.
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    size = len(coder.compress(block)) + len(coder.flush())
    return BlockKind.CIPHERTEXT if size >= len(block) else BlockKind.PLAINTEXT


def plan_offsets(ranges: Sequence[Range], seed: int | None = None) -> Iterator[int]:
    """Offsets of the blocks to read, over `ranges` laid end to end: each block at most once, in rising order.

    Ranges that hold no more blocks than the plan has places are read whole. `seed` is for tests only.
    """
    counts = [part.length // BLOCK_BYTES for part in ranges]
    total = sum(counts)
    wanted: set[int] = set()
    if total <= SUBSECTIONS * PLACES_EACH:
        wanted.update(range(total))
    else:
        chance = random.Random(seed) if seed is not None else random.SystemRandom()  # noqa: S311  a sample, not a secret
        wanted.update((0, total - 1))
        for section in range(SUBSECTIONS):
            low, high = section * total // SUBSECTIONS, (section + 1) * total // SUBSECTIONS
            wanted.update(chance.sample(range(low, high), min(PLACES_EACH, high - low)))
    index, before = 0, 0
    for block in sorted(wanted):
        while block - before >= counts[index]:
            before += counts[index]
            index += 1
        yield ranges[index].offset + (block - before) * BLOCK_BYTES


def sample(fd: int, ranges: Sequence[Range], *, direct: bool) -> SampleResult:
    """Read the planned blocks of `fd` and classify them. `direct` says how the descriptor was opened. Raises OSError."""
    tally = dict.fromkeys(BlockKind, 0)
    plaintext_at: list[int] = []
    with mmap.mmap(-1, BLOCK_BYTES) as buffer:  # page-aligned, as O_DIRECT wants it
        for offset in plan_offsets(ranges):
            got = os.preadv(fd, [buffer], offset)
            if got != BLOCK_BYTES:
                raise OSError(errno.EIO, f"read {got} of {BLOCK_BYTES} bytes at byte {offset}")
            kind = classify(buffer[:])
            tally[kind] += 1
            if kind is BlockKind.PLAINTEXT and len(plaintext_at) < _LISTED:
                plaintext_at.append(offset)
    return SampleResult(
        blocks=sum(tally.values()),
        empty=tally[BlockKind.EMPTY],
        ciphertext=tally[BlockKind.CIPHERTEXT],
        plaintext=tally[BlockKind.PLAINTEXT],
        plaintext_at=plaintext_at,
        direct=direct,
    )


def end_of_file(fd: int, *, overwritten: bool = False) -> SampleResult:
    """What the last bytes of a file show, where it ends within a block: nothing while they are zeros, else plaintext.

    Too few bytes to tell random ones by: once they were `overwritten`, nothing can be said of them. Raises OSError.
    """
    size = os.fstat(fd).st_size
    begin = size - size % BLOCK_BYTES
    found = any(os.pread(fd, size - begin, begin))
    plain = found and not overwritten
    return SampleResult(
        blocks=int(plain),
        empty=0,
        ciphertext=0,
        plaintext=int(plain),
        plaintext_at=[begin] if plain else [],
        direct=not plain,
        unclear=int(found and overwritten),
    )


def merge(results: Sequence[SampleResult]) -> SampleResult:
    """The sums of several samples; of none, a sample of nothing."""
    return SampleResult(
        blocks=sum(result.blocks for result in results),
        empty=sum(result.empty for result in results),
        ciphertext=sum(result.ciphertext for result in results),
        plaintext=sum(result.plaintext for result in results),
        plaintext_at=[at for result in results for at in result.plaintext_at][:_LISTED],
        direct=all(result.direct for result in results),
        unclear=sum(result.unclear for result in results),
    )
