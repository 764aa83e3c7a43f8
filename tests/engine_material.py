"""What engine tests are made of: block contents, and a clock that the test moves."""

from __future__ import annotations

SLOT_BYTES = 8192


class HandClock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def block(seed: object, size: int = SLOT_BYTES) -> bytes:
    """Bytes that differ by seed and are not random, so that plaintext on disk would be found."""
    unit = f"<{seed}>".encode()
    return (unit * (size // len(unit) + 1))[:size]
