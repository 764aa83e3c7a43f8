"""Kubernetes quantities as bytes and Go durations as seconds, exactly.

Both types are numbers (`ByteSize` an int of bytes, `Seconds` a float of seconds) that remember the text they were
written as, so that an object is serialised as its author wrote it. Arithmetic is exact; a part of a byte counts as a
byte, as in apimachinery's `Quantity.Value()`.

Grammar: apimachinery `resource.Quantity` without a sign, without sub-unit suffixes (n, u, m) and without leading or
trailing dots; Go `time.ParseDuration` in hours, minutes, seconds and milliseconds, whole numbers, in this order. CEL's
`duration()` reads the same text, so days are refused here as there.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

__all__ = ["DURATION_PATTERN", "QUANTITY_PATTERN", "SLOT_SIZE_PATTERN", "ByteSize", "Seconds", "SlotSize", "invalid"]

QUANTITY_PATTERN: Final = r"^[0-9]{1,19}([.][0-9]{1,9})?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$"
SLOT_SIZE_PATTERN: Final = r"^[1-9][0-9]{0,9}([KMG]i)?$"
# Each part is bounded so that CEL's duration() and Go's int64 of nanoseconds cannot overflow.
DURATION_PATTERN: Final = r"^([0-9]{1,6}h)?([0-9]{1,7}m)?([0-9]{1,9}s)?([0-9]{1,9}ms)?$"
TEXT_LIMIT: Final = 32

_BINARY: Final = {f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGTPE")}
_DECIMAL: Final = {letter: 1000 ** (power + 1) for power, letter in enumerate("kMGTPE")}
_QUANTITY: Final = re.compile(r"([0-9]{1,19}(?:[.][0-9]{1,9})?)(?:([KMGTPE]i|[kMGTPE])|[eE]([0-9]{1,2}))?", re.ASCII)
_SLOT_SIZE: Final = re.compile(r"([1-9][0-9]{0,9})([KMG]i)?", re.ASCII)
_DURATION: Final = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,7})m)?(?:([0-9]{1,9})s)?(?:([0-9]{1,9})ms)?", re.ASCII)
_DAYS: Final = re.compile(r"([0-9]{1,5})d", re.ASCII)
_INT64_MAX: Final = 2**63 - 1


def invalid(cause: str, remedy: str, *, field: str = "") -> PydanticCustomError:
    """The error that a validator of this package raises: what is wrong, what to do, below which field."""
    return PydanticCustomError("kvtier", "{cause}", {"cause": cause, "remedy": remedy, "field": field})


def _parse_bytes(text: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise invalid("not a quantity of bytes", "write a number and a unit, such as 100Gi, 1.5Gi or 500M")
    number, unit, exponent = match.groups()
    factor = 10 ** int(exponent) if exponent else _BINARY.get(unit) or _DECIMAL.get(unit) or 1
    size = math.ceil(Fraction(number) * factor)
    if size > _INT64_MAX:
        raise invalid("more than 2^63-1 bytes", "write a smaller quantity")
    return size


class ByteSize(int):
    """Bytes; `ByteSize("1.5Gi")` or `ByteSize(4096)`. `text` is what it was written as.

    Raises a PydanticCustomError (a ValueError) that says what is wrong and what to write.
    """

    text: str | int

    def __new__(cls, value: str | int) -> Self:
        if isinstance(value, ByteSize):
            text: str | int = value.text
        elif isinstance(value, bool) or not isinstance(value, int | str):
            raise invalid("not a quantity of bytes", "write a number and a unit, such as 100Gi")
        else:
            text = value
        self = super().__new__(cls, cls._parse(text))
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str | int]:  # type: ignore[override]
        return (self.text,)

    def __str__(self) -> str:
        return str(self.text)

    @classmethod
    def _parse(cls, text: str | int) -> int:
        if isinstance(text, str):
            return _parse_bytes(text)
        if text < 0:
            raise invalid("a negative number of bytes", "write zero or more")
        if text > _INT64_MAX:
            raise invalid("more than 2^63-1 bytes", "write a smaller quantity")
        return text

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(lambda size: size.text)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return cls._int_or_string(QUANTITY_PATTERN, 0)

    @staticmethod
    def _int_or_string(pattern: str, minimum: int) -> dict[str, Any]:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": pattern,
            "maxLength": TEXT_LIMIT,
            "minimum": minimum,
        }


class SlotSize(ByteSize):
    """Bytes of one slot: a multiple of 4096, written as a whole number of bytes, Ki, Mi or Gi.

    Fewer spellings than `ByteSize`, because the API server can check "multiple of 4096" on these alone:
    its `quantity(...).asInteger()` fails for values such as 1.5Mi.
    """

    @classmethod
    def _parse(cls, text: str | int) -> int:
        size = text
        if isinstance(text, str):
            match = _SLOT_SIZE.fullmatch(text)
            if match is None:
                raise invalid("not a size of a slot", "write a whole number of bytes, Ki, Mi or Gi, such as 1Mi")
            size = int(match[1]) * _BINARY.get(match[2] or "", 1)
        if not isinstance(size, int) or size < 4096 or size % 4096:
            raise invalid("not a multiple of 4096 bytes", "write a multiple of 4Ki, such as 64Ki or 1Mi")
        return super()._parse(size)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return cls._int_or_string(SLOT_SIZE_PATTERN, 4096) | {
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == int ? self % 4096 == 0 : "
                    "self.matches('(^|[02468])[048]Ki$|[13579][26]Ki$|[MG]i$') || "
                    "(self.matches('^[0-9]+$') && int(self) >= 4096 && int(self) % 4096 == 0)",
                    "message": "must be a multiple of 4096 bytes, such as 64Ki or 1Mi",
                }
            ]
        }


class Seconds(float):
    """Seconds; `Seconds("1h30m")`. `text` is what it was written as. Greater than zero.

    Raises a PydanticCustomError (a ValueError) that says what is wrong and what to write.
    """

    text: str

    def __new__(cls, value: str) -> Self:
        text = value.text if isinstance(value, Seconds) else value
        self = super().__new__(cls, cls._parse(text))
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)

    def __str__(self) -> str:
        return self.text

    @staticmethod
    def _parse(text: object) -> float:
        if isinstance(text, int | float) and not isinstance(text, bool):
            raise invalid("a duration without a unit", f"write '{text}s' for seconds")
        if not isinstance(text, str):
            raise invalid("not a duration", "write one such as 30s, 1h30m or 250ms")
        if days := _DAYS.fullmatch(text):
            raise invalid("days are not a unit of a duration", f"write '{int(days[1]) * 24}h'")
        match = _DURATION.fullmatch(text)
        if not text or match is None:
            raise invalid(
                "not a duration", "write hours, minutes, seconds, milliseconds in this order, such as 30s or 1h30m"
            )
        hours, minutes, seconds, milliseconds = (int(part or 0) for part in match.groups())
        total_ms = ((hours * 60 + minutes) * 60 + seconds) * 1000 + milliseconds
        if total_ms == 0:
            raise invalid("a duration of zero", "write more than zero, such as 1s")
        return total_ms / 1000

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls, serialization=core_schema.plain_serializer_function_ser_schema(lambda seconds: seconds.text)
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "type": "string",
            "pattern": DURATION_PATTERN,
            "minLength": 1,
            "maxLength": TEXT_LIMIT,
            "x-kubernetes-validations": [
                {"rule": "self.matches('[1-9]')", "message": "must be more than zero, such as 1s"}
            ],
        }
