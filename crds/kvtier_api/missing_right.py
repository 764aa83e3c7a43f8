"""What a refusal (403) of an API server says: whether it is a role that is missing.

Its authorizer has words of its own (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters); a policy, and a namespace that
ends, have others.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["missing_right"]

_OF_A_ROLE: Final = re.compile(r'is forbidden: (User ".*" cannot .*)', re.DOTALL)


def missing_right(message: str) -> str | None:
    """User, verb, kind and namespace, without the object's name; None where the refusal is of another kind."""
    found = _OF_A_ROLE.search(message)
    return found[1] if found else None
