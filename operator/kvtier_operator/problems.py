"""What can go wrong between the controller and the API server, sorted by what is to be done about it.

::

    KvtierError
    └── ApiProblem          try again, after a pause that grows (`retry_after_s`: at least that long)
        ├── Conflict        read anew, decide anew
        ├── Gone            the API server has that version no more: list anew
        ├── AlreadyThere    somebody made it first: look at it
        ├── Missing         the object, or its kind, is not there
        └── Refused         the request itself does not hold, or is forbidden: trying again alone does not help
            └── RightMissing    no role allows it; or the API server has just started, and has not read the roles yet
    NotLeading              the Lease is lost: stop, write nothing
"""

from __future__ import annotations

from kvtier_api.errors import KvtierError

__all__ = ["AlreadyThere", "ApiProblem", "Conflict", "Gone", "Missing", "NotLeading", "Refused", "RightMissing"]


class ApiProblem(KvtierError):
    def __init__(self, cause: str, *, obj: str = "", remedy: str = "", code: int = 0, retry_after_s: float = 0) -> None:
        super().__init__(cause, obj=obj, remedy=remedy)
        self.code = code
        self.retry_after_s = retry_after_s


class Conflict(ApiProblem):
    pass


class AlreadyThere(ApiProblem):
    pass


class Gone(ApiProblem):
    pass


class Missing(ApiProblem):
    pass


class Refused(ApiProblem):
    pass


class RightMissing(Refused):
    pass


class NotLeading(KvtierError):
    pass
