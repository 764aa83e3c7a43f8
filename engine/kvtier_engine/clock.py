"""The engine's one clock: seconds since boot, suspend included.

CLOCK_BOOTTIME cannot be set, so a wall clock that jumps (NTP, an administrator, a restored virtual machine image)
neither prolongs nor shortens a block's life; and it runs on while the machine sleeps, so a block ages in a suspended
machine too (clock_gettime(2)). Tests pass a clock of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Clock", "boot_clock"]

Clock = Callable[[], float]


def boot_clock() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
