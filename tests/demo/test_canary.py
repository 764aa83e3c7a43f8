"""The canary search counts planted bytes exactly, whatever model they came from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from requirements import need_module

need_module("numpy")

from kvtier_demo.canary import CanaryHits, count_canaries, pieces_of  # noqa: E402
from kvtier_demo.rawimage import CHUNK_BYTES, allocated_bytes, chunks, copy_data  # noqa: E402

TEXT = "the canary sings in the raw image"


def test_pieces_are_counted_wherever_they_lie_at_multiples_of_64(tmp_path: Path) -> None:
    block = os.urandom(4096)
    image = tmp_path / "image"
    image.write_bytes(os.urandom(1 << 20) + block + os.urandom(64) + block[640:1280] + os.urandom(100))
    assert count_canaries(image, pieces_of([block]), TEXT) == CanaryHits(64 + 10, 0, True)


def test_half_a_piece_is_no_hit(tmp_path: Path) -> None:
    block = os.urandom(64)
    image = tmp_path / "image"
    image.write_bytes(block[:32] + os.urandom(32))
    assert count_canaries(image, pieces_of([block]), TEXT).total == 0


def test_zeros_and_padding_are_no_canaries(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(1 << 20))
    assert pieces_of([bytes(4096)]) == []
    assert count_canaries(image, pieces_of([os.urandom(64) + bytes(4032)]), TEXT).total == 0


@pytest.mark.parametrize("offset", [0, 3, CHUNK_BYTES - 5, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_the_text_is_found_at_any_byte_and_counted_once(offset: int, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes([1]) * offset + TEXT.encode() + bytes([1]) * 100)
    assert count_canaries(image, [], TEXT).texts == 1


def test_a_piece_beyond_a_border_is_counted_once_even_with_a_long_text(tmp_path: Path) -> None:
    piece = os.urandom(64)
    image = tmp_path / "image"
    image.write_bytes(bytes([1]) * CHUNK_BYTES + piece + bytes([1]) * 8192)
    assert count_canaries(image, pieces_of([piece]), "long " * 500).block_pieces == 1


def test_a_text_too_short_to_mean_anything_is_said_to_be_unsearched(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"hi" * 1000)
    assert count_canaries(image, [], "hi") == CanaryHits(0, 0, False)


def test_holes_are_skipped_and_everything_else_is_read(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(1 << 36)
        file.seek(1 << 35)
        file.write(TEXT.encode())
    assert count_canaries(image, [], TEXT).texts == 1
    assert sum(own for _, own, _ in chunks(image, overlap_bytes=0)) == allocated_bytes(image) < 1 << 20


def test_a_copy_holds_the_same_bytes_at_the_same_places(tmp_path: Path) -> None:
    image, copy = tmp_path / "image", tmp_path / "copy"
    with image.open("wb") as file:
        file.write(os.urandom(CHUNK_BYTES + 4097))
        file.seek(3 * CHUNK_BYTES)
        file.write(os.urandom(5000))
    copy_data(image, copy)
    assert copy.read_bytes() == image.read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        copy_data(image, copy)
