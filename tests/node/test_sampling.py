"""The read-back: what a block looks like, which blocks are read, and that a short read is an error."""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvtier_node.sampling import (
    BLOCK_BYTES,
    BlockKind,
    Range,
    classify,
    end_of_file,
    joined,
    merge,
    plan_offsets,
    sample,
)

RNG = np.random.default_rng(20)


def test_random_blocks_are_never_taken_for_plaintext() -> None:
    blocks = os.urandom(BLOCK_BYTES * 1000)
    wrong = 0
    for _ in range(50):
        wrong += sum(
            classify(blocks[at : at + BLOCK_BYTES]) is not BlockKind.CIPHERTEXT
            for at in range(0, len(blocks), BLOCK_BYTES)
        )
        blocks = os.urandom(len(blocks))
    assert wrong == 0


def test_sealed_slots_are_ciphertext() -> None:
    sealed = AESGCM(os.urandom(32)).encrypt(bytes(12), bytes(256 * BLOCK_BYTES), None)
    kinds = {classify(sealed[at : at + BLOCK_BYTES]) for at in range(0, 256 * BLOCK_BYTES, BLOCK_BYTES)}
    assert kinds == {BlockKind.CIPHERTEXT}


def test_zeros_are_empty() -> None:
    assert classify(bytes(BLOCK_BYTES)) is BlockKind.EMPTY
    assert classify(bytes(4 * BLOCK_BYTES)) is BlockKind.EMPTY
    assert classify(bytes(BLOCK_BYTES - 1) + b"\x01") is BlockKind.PLAINTEXT


def as_bf16(values: np.ndarray) -> bytes:
    return bytes(values.astype("<f4").view("<u4").__rshift__(16).astype("<u2").tobytes())


KV = RNG.normal(0, 1.3, BLOCK_BYTES)
KINDS = {
    "bf16": as_bf16(KV[: BLOCK_BYTES // 2]),
    "fp16": KV[: BLOCK_BYTES // 2].astype("<f2").tobytes(),
    "fp32": KV[: BLOCK_BYTES // 4].astype("<f4").tobytes(),
    "int8": np.clip(KV * 24, -127, 127).astype("i1").tobytes(),
    "text": (b"The patient said that the results of the test were not what she had hoped for. " * 60)[:BLOCK_BYTES],
    "tokens": struct.pack(f"<{BLOCK_BYTES // 4}I", *RNG.integers(0, 150_000, BLOCK_BYTES // 4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_and_text_are_plaintext(kind: str) -> None:
    block = KINDS[kind]
    assert len(block) == BLOCK_BYTES
    assert classify(block) is BlockKind.PLAINTEXT


def test_plan_has_first_and_last_and_two_places_in_each_of_1000_sections() -> None:
    total = 100_000
    for seed in range(20):
        blocks = [at // BLOCK_BYTES for at in plan_offsets([Range(0, total * BLOCK_BYTES)], seed)]
        assert blocks == sorted(set(blocks))
        assert blocks[0] == 0 and blocks[-1] == total - 1
        sections = [len(list(group)) for _, group in itertools.groupby(blocks, key=lambda block: block * 1000 // total)]
        assert len(sections) == 1000
        assert min(sections) >= 2


def test_plan_is_not_the_same_twice() -> None:
    part = [Range(0, 100_000 * BLOCK_BYTES)]
    assert list(plan_offsets(part)) != list(plan_offsets(part))


def test_small_ranges_are_read_whole_and_nothing_outside_them() -> None:
    parts = [Range(8 * BLOCK_BYTES, 3 * BLOCK_BYTES), Range(100 * BLOCK_BYTES, BLOCK_BYTES)]
    assert [at // BLOCK_BYTES for at in plan_offsets(parts)] == [8, 9, 10, 100]
    assert list(plan_offsets([])) == []


def test_plan_over_many_ranges_stays_inside_them() -> None:
    parts = [Range(at * 7 * BLOCK_BYTES, 5 * BLOCK_BYTES) for at in range(1000)]
    inside = {part.offset + at * BLOCK_BYTES for part in parts for at in range(5)}
    planned = list(plan_offsets(parts))
    assert set(planned) <= inside and len(set(planned)) == len(planned)
    assert parts[0].offset in planned and parts[-1].offset + 4 * BLOCK_BYTES in planned


def test_ranges_that_touch_or_overlap_are_joined() -> None:
    assert joined([Range(8, 4), Range(0, 4), Range(4, 4), Range(10, 10), Range(40, 1)]) == [Range(0, 20), Range(40, 1)]


def test_one_plaintext_block_among_many_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(os.urandom(700 * BLOCK_BYTES) + KINDS["bf16"] + bytes(300 * BLOCK_BYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        result = sample(fd, [Range(0, 1001 * BLOCK_BYTES)], direct=False)
    finally:
        os.close(fd)
    assert (result.blocks, result.empty, result.ciphertext, result.plaintext) == (1001, 300, 700, 1)
    assert result.plaintext_at == [700 * BLOCK_BYTES]
    assert str(700 * BLOCK_BYTES) in result.sentence()


def test_a_short_read_is_an_error_and_not_an_empty_block(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(3 * BLOCK_BYTES + 100))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="read 100 of 4096 bytes at byte 12288"):
            sample(fd, [Range(0, 4 * BLOCK_BYTES)], direct=False)
    finally:
        os.close(fd)


def test_the_end_of_a_file_within_a_block_is_plaintext_whatever_it_looks_like(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, begin in ((b"words", 0), (os.urandom(700), 0), (os.urandom(2 * BLOCK_BYTES) + b"w", 2 * BLOCK_BYTES)):
        path.write_bytes(content)
        with path.open("rb") as file:
            found = end_of_file(file.fileno())
            after = end_of_file(file.fileno(), overwritten=True)
        assert (found.blocks, found.plaintext, found.plaintext_at, found.clean) == (1, 1, [begin], False)
        assert (after.blocks, after.unclear, after.clean) == (0, 1, None)
    for content in (b"", bytes(700), os.urandom(BLOCK_BYTES), os.urandom(BLOCK_BYTES) + bytes(3)):
        path.write_bytes(content)
        with path.open("rb") as file:
            assert end_of_file(file.fileno()) == merge([])


def test_a_sample_of_nothing_shows_nothing() -> None:
    nothing = merge([])
    assert nothing.clean is None
    assert "nothing was looked at" in nothing.sentence()
