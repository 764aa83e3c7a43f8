"""Rights that the API server says are missing. For a while that may mean only that it started and has not read the roles yet."""

from __future__ import annotations

import asyncio
from typing import Final

from kvtier_api.errors import KvtierError
from kvtier_node.cluster.errors import ApiUnavailable, RightMissing

__all__ = ["MissingRights"]

_STARTING_S: Final = 60.0
"""For so long from its first refusal on."""
_FORGOTTEN_S: Final = 180.0
"""A right that was not refused for so long was there meanwhile. What is missing for good is asked for each minute."""


class MissingRights:
    """Of one agent, whatever it asks for them: verb, kind and namespace are in the API server's own words."""

    def __init__(self) -> None:
        self._refused: dict[str, tuple[float, float]] = {}

    def wait_for(self, error: KvtierError) -> None:
        """Raise ApiUnavailable, as for a server that is away, while a right that is missing may come. Else `error` is final."""
        if isinstance(error, RightMissing) and self._may_come(error):
            raise ApiUnavailable(str(error)) from error

    def _may_come(self, error: RightMissing) -> bool:
        now = asyncio.get_running_loop().time()
        first, last = self._refused.get(error.right, (now, now))
        if now - last > _FORGOTTEN_S:
            first = now
        self._refused[error.right] = (first, now)
        return now - first < _STARTING_S
