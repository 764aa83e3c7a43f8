"""How signed records are written down: canonical JSON, times and durations. docs/formats.md, "Receipt".

One byte sequence per value, so that a signature and a hash have one meaning. Receipts hold no floating-point numbers:
a duration is a decimal string of seconds with six digits after the point.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer, StringConstraints

__all__ = ["HEX_256", "ZERO_HASH", "Hex256", "Seconds", "Time", "canonical_json", "hash_of", "seconds", "utc_now"]

HEX_256: Final = r"^[0-9a-f]{64}$"
ZERO_HASH: Final = "0" * 64
_MICROSECOND: Final = Decimal("0.000001")


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, UTF-8 unescaped, no NaN. Raises ValueError for what JSON cannot hold."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def hash_of(canonical: bytes) -> str:
    return hashlib.sha256(canonical).hexdigest()


def utc_now() -> str:
    """The time in UTC, ISO 8601, always with six digits of the second and a `Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds(value: float | str | Decimal) -> Decimal:
    """A duration in seconds, to the microsecond. Raises ValueError for what is no finite number."""
    try:
        number = Decimal(str(value))
        if number.is_finite():
            return number.quantize(_MICROSECOND)
    except InvalidOperation as error:
        raise ValueError(f"not a duration in seconds: {value!r}") from error
    raise ValueError(f"not a finite duration: {value!r}")


Seconds = Annotated[Decimal, BeforeValidator(seconds), PlainSerializer(str, return_type=str)]
Time = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]
Hex256 = Annotated[str, StringConstraints(pattern=HEX_256)]
