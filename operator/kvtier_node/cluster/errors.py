"""What goes wrong between the agent and the API server, as kvtier's errors."""

from __future__ import annotations

from kvtier_api.errors import KvtierError, NotPermitted
from kvtier_api.missing_right import missing_right

__all__ = ["ApiUnavailable", "NamespaceEnding", "RightMissing"]


class ApiUnavailable(KvtierError):
    """The API server does not answer, or asks to be left alone (429, 5xx). Nothing is known; it is tried again."""


class RightMissing(NotPermitted):
    """No role gives the agent this right; or the API server has just started, and has not read the roles yet (`rights`)."""

    @property
    def right(self) -> str:
        """User, verb, kind and namespace, without the object's name."""
        return missing_right(self.cause) or self.cause


class NamespaceEnding(NotPermitted):
    """The namespace is being deleted: what is there can be changed, and nothing new can be made in it."""
