"""stdin, stdout and stderr of the command: what is missing is opened, and what takes nothing has an exit code of its own.

Libraries below turn a closed pipe into an exit code of theirs (typer and rich: 1), so stdout speaks of it in words of kvtier's:
`ReaderGone`, or `KernelError` for all else that keeps output from being written.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from kvtier_api.errors import KernelError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["ReaderGone", "let_go", "open_missing", "watch_stdout"]


class ReaderGone(Exception):
    """Nobody reads stdout any more. No OSError: those are taken for something else on the way."""


class _Stdout(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError as error:
            raise ReaderGone from error
        except OSError as error:
            raise KernelError(
                f"the output cannot be written: {error.strerror}",
                obj="stdout",
                remedy="free space there, or send the output elsewhere",
            ) from error


def open_missing() -> None:
    """A descriptor from 0 to 2 that is closed would be given to the next file that is opened: a ledger, say."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115  for as long as the process lives


def watch_stdout() -> None:
    """From now on writing to stdout raises ReaderGone or KernelError, at the latest when it is flushed."""
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper) or old.fileno() != 1:
        return  # it was missing, or is somebody's who has put his own in its place
    old.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Stdout(1, "w", closefd=False)),
        encoding=old.encoding,
        errors=old.errors,
        line_buffering=old.line_buffering,
        write_through=old.write_through,
    )


def let_go() -> None:
    """What stdout and stderr did not take would change the exit code, when the interpreter ends and tries again."""
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError, ReaderGone, KernelError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
