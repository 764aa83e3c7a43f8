"""Quantities and durations: exact, the same text back, and errors that say what to write."""

from __future__ import annotations

import copy
import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from kvtier_api.quantity import ByteSize, Seconds, SlotSize

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18} | {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
LIMIT = 2**63 - 1


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1.5Gi", 1610612736),
        ("100Gi", 107374182400),
        ("500M", 500_000_000),
        ("1e3", 1000),
        ("2E3", 2000),
        ("1E", 10**18),
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("0.5Ki", 512),
        ("0.1", 1),
        ("1.3Gi", 1395864372),
        ("9223372036854775807", LIMIT),
    ],
)
def test_quantities_are_exact(text: str | int, size_bytes: int) -> None:
    assert ByteSize(text) == size_bytes


@given(st.integers(0, 10**12), st.integers(0, 10**9 - 1), st.sampled_from(sorted(UNITS)))
@example(1, 500_000_000, "Gi")
def test_a_quantity_is_its_exact_product_with_a_part_of_a_byte_counted_whole(whole: int, part: int, unit: str) -> None:
    text = f"{whole}.{part:09d}{unit}"
    exact = math.ceil((Fraction(whole) + Fraction(part, 10**9)) * UNITS[unit])
    if exact > LIMIT:
        with pytest.raises(PydanticCustomError):
            ByteSize(text)
    else:
        assert ByteSize(text) == exact
        assert ByteSize(text).text == text


@given(st.integers(0, LIMIT))
def test_bytes_round_trip_as_integer_and_as_text(size: int) -> None:
    assert ByteSize(size) == ByteSize(str(size)) == size
    assert ByteSize(size).text == size
    assert ByteSize(ByteSize(size)).text == size


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_named_error(text: str) -> None:
    for kind in (ByteSize, SlotSize, Seconds):
        try:
            kind(text)  # type: ignore[operator]
        except PydanticCustomError as error:
            assert error.context is not None
            assert error.context["remedy"]


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.integers(0, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int, milliseconds: int) -> None:
    text = "".join(
        f"{n}{unit}" for n, unit in ((hours, "h"), (minutes, "m"), (seconds, "s"), (milliseconds, "ms")) if n
    )
    if text:
        assert Seconds(text) == (hours * 3600_000 + minutes * 60_000 + seconds * 1000 + milliseconds) / 1000
        assert Seconds(text).text == text


@given(st.integers(1, 10**9), st.sampled_from(["", "Ki", "Mi", "Gi"]))
def test_a_slot_size_is_accepted_exactly_when_it_is_a_multiple_of_4096(number: int, unit: str) -> None:
    size = number * UNITS[unit]
    if size % 4096 == 0:
        assert SlotSize(f"{number}{unit}") == size
    else:
        with pytest.raises(PydanticCustomError, match="multiple of 4096"):
            SlotSize(f"{number}{unit}")


@pytest.mark.parametrize(("text", "remedy"), [("7d", "168h"), (30, "30s"), ("0s", "1s"), ("1h1h", "order")])
def test_a_wrong_duration_says_what_to_write(text: str, remedy: str) -> None:
    with pytest.raises(PydanticCustomError) as raised:
        Seconds(text)
    assert raised.value.context is not None
    assert remedy in raised.value.context["remedy"]


def test_arabic_digits_are_no_digits() -> None:
    for kind, text in ((ByteSize, "\u0661Gi"), (SlotSize, "\u0664Ki"), (Seconds, "\u0661s")):
        with pytest.raises(PydanticCustomError):
            kind(text)  # type: ignore[operator]


def test_copies_and_pickles_keep_the_text() -> None:
    for value in (ByteSize("1.5Gi"), SlotSize("64Ki"), Seconds("1h30m")):
        for twin in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert (twin, twin.text, type(twin)) == (value, value.text, type(value))
