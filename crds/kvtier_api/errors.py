"""Every error that kvtier raises on purpose, in one tree. Each names cause, object and remedy.

::

    KvtierError                 1   something failed that has no code of its own
    ├── UsageError              2   the command line is wrong
    ├── InvalidResource         3   a manifest or a field of it does not hold
    ├── NotFound                4   the tier, volume, receipt or file does not exist
    ├── NotPermitted            5   a privilege or an allowed root is missing
    │   └── UnsafePath          5   a path leads, or could be made to lead, elsewhere
    ├── ForeignData             6   something is there that kvtier did not put there
    ├── InsufficientSpace       7   what was asked for does not fit; both numbers are given
    ├── BackendUnavailable      8   no volume backend works here; each one's reason is given
    ├── Busy                    9   another process owns it; nothing was changed
    ├── KernelError            10   a system call or a tool failed or timed out
    ├── EraseIncomplete        11   a key or bytes may still be reachable; nothing is claimed
    ├── LedgerError            12   the ledger cannot be read or written
    ├── VerificationFailed     13   a receipt, chain, marker or signature does not verify
    └── EngineError            14   the slot store was used wrongly or cannot start

The numbers are the exit codes of the command line (README, "Exit codes"); they do not change within a major version.
`kvtier run` returns its command's own exit code once the command was started.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BackendUnavailable",
    "Busy",
    "EngineError",
    "EraseIncomplete",
    "ForeignData",
    "InsufficientSpace",
    "InvalidResource",
    "KernelError",
    "KvtierError",
    "LedgerError",
    "NotFound",
    "NotPermitted",
    "UnsafePath",
    "UsageError",
    "VerificationFailed",
]


class KvtierError(Exception):
    """`KvtierError(cause, obj=..., remedy=...)`.

    `cause` says what happened, `obj` names the field, path or object with its value, `remedy` what to do next.
    None of them may hold a key, a salt or bytes of a slot.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, cause: str, *, obj: str = "", remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.obj = obj
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.obj}: {self.cause}" if self.obj else self.cause
        return f"{text} ({self.remedy})" if self.remedy else text


class UsageError(KvtierError):
    exit_code = 2


class InvalidResource(KvtierError):
    exit_code = 3


class NotFound(KvtierError):
    exit_code = 4


class NotPermitted(KvtierError):
    exit_code = 5


class UnsafePath(NotPermitted):
    pass


class ForeignData(KvtierError):
    exit_code = 6


class InsufficientSpace(KvtierError):
    exit_code = 7


class BackendUnavailable(KvtierError):
    exit_code = 8


class Busy(KvtierError):
    exit_code = 9


class KernelError(KvtierError):
    exit_code = 10


class EraseIncomplete(KvtierError):
    exit_code = 11


class LedgerError(KvtierError):
    exit_code = 12


class VerificationFailed(KvtierError):
    exit_code = 13


class EngineError(KvtierError):
    exit_code = 14
