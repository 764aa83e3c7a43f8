"""The search that all claims about a raw disk rest on: it must be proven able to find."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def write_image(folder, size, pieces, *, fill=b""):
    image = folder / "image"
    with open(image, "wb") as file:
        file.truncate(size)
        file.write(fill)
        for offset, data in pieces:
            file.seek(offset)
            file.write(data)
    return image


@given(data=st.data())
@settings(max_examples=150)
def test_any_piece_of_sixteen_bytes_is_found_at_any_offset(tmp_path_factory, data):
    from uml.imagesearch import Hit, Needle, search

    # No two windows are equal, so what lies around a piece cannot lengthen it by chance.
    needle = bytes(data.draw(st.permutations(range(64))))
    start = data.draw(st.integers(0, 48))
    length = data.draw(st.integers(16, 64 - start))
    size = 1 << 16
    offset = data.draw(st.integers(0, size - length))
    image = write_image(
        tmp_path_factory.mktemp("image"), size, [(offset, needle[start : start + length])], fill=b"\xff" * size
    )
    assert search(image, [Needle("n", needle)]) == [Hit("n", offset, length, start)]


@given(offset=st.integers(0, 4096 - 15), start=st.integers(0, 49))
@settings(max_examples=50)
def test_fifteen_bytes_are_not_a_hit(tmp_path_factory, offset, start):
    from uml.imagesearch import Needle, search

    needle = bytes(range(64))
    image = write_image(
        tmp_path_factory.mktemp("image"), 4096, [(offset, needle[start : start + 15])], fill=b"\xff" * 4096
    )
    assert search(image, [Needle("n", needle)]) == []


def test_every_form_of_a_key_is_found_and_a_half_is_enough(tmp_path):
    from uml.imagesearch import count, key_needles, search

    key = os.urandom(64)
    forms = [key[:32], key[32:], key.hex().encode()[10:40], key.hex().upper().encode()[64:]]
    pieces = [(1001 * (number + 1), form) for number, form in enumerate(forms)]
    image = write_image(tmp_path, 1 << 16, pieces)
    assert count(search(image, key_needles("key", key))) == {"key, raw": 2, "key, hex": 1, "key, HEX": 1}


def test_holes_are_skipped_and_a_needle_across_a_hole_s_edge_is_found(tmp_path):
    from uml.imagesearch import canary_lines, canary_needles, search

    (line,) = canary_lines(1, seed=1)
    size = 64 << 30  # far more than could be read
    image = write_image(tmp_path, size, [((32 << 30) - 30, line)])
    assert [hit.offset for hit in search(image, canary_needles([line]))] == [(32 << 30) - 30]


def test_a_random_image_has_no_hits(tmp_path):
    from uml.imagesearch import canary_lines, canary_needles, key_needles, search

    image = write_image(tmp_path, 1 << 23, [], fill=os.urandom(1 << 23))
    needles = [*canary_needles(canary_lines(200, seed=2)), *key_needles("key", os.urandom(64))]
    assert search(image, needles) == []


def test_a_needle_that_any_disk_is_full_of_is_refused(tmp_path):
    from uml.imagesearch import Needle, search

    image = write_image(tmp_path, 4096, [])
    with pytest.raises(ValueError, match="any disk is full of that"):
        search(image, [Needle("zeros", bytes(16))])
    with pytest.raises(ValueError, match="shorter than 16"):
        search(image, [Needle("short", b"short")])
