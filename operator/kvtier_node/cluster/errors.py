"""What goes wrong between the agent and the API server, as kvtier's errors."""

from __future__ import annotations

from kvtier_api.errors import KvtierError

__all__ = ["ApiUnavailable"]


class ApiUnavailable(KvtierError):
    """The API server does not answer, or asks to be left alone (429, 5xx). Nothing is known; it is tried again."""
