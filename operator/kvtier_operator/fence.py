"""The fence around writes: open while the Lease is surely held, by the monotonic clock. Shared between two threads."""

from __future__ import annotations

import threading
import time

from kvtier_operator.problems import NotLeading

__all__ = ["Fence"]


class Fence:
    """Closed at first. `open_until` moves only forward; `close` is for ever."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until_s = 0.0
        self._closed = False

    def open_until(self, monotonic_s: float) -> None:
        with self._lock:
            self._until_s = max(self._until_s, monotonic_s)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    @property
    def is_open(self) -> bool:
        with self._lock:
            return not self._closed and time.monotonic() < self._until_s

    def check(self) -> None:
        """Before each write. Raises NotLeading."""
        if not self.is_open:
            raise NotLeading("the Lease is not held", remedy="another replica acts now; this one waits for its turn")
