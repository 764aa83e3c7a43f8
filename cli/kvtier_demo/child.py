"""Starts a consumer, hands it the prompt on a pipe, waits for its report, and kills it for real."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from pydantic import TypeAdapter, ValidationError

from kvtier_api.errors import KernelError, KvtierError
from kvtier_demo.consumer import Failure, Report
from kvtier_demo.model import ModelConfig

__all__ = ["Consumer", "consumer_command"]

_ANSWER: TypeAdapter[Report | Failure] = TypeAdapter(Report | Failure)
_READY_DEADLINE_S = 90.0
_END_DEADLINE_S = 60.0


def consumer_command(mode: str, config: ModelConfig, *options: str) -> list[str]:
    """Command line of a consumer. It holds no secret: the prompt goes through the pipe."""
    return [sys.executable, "-m", "kvtier_demo.consumer", "--mode", mode, "--model", config.model_dump_json(), *options]


class Consumer:
    """A consumer, alone or under a guardian (`command` may begin with `kvtier run ... --`).

    Use it as a context manager: whatever happens, no process is left behind.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, close_fds=True
        )
        self._pidfd = -1
        self._report: Report | None = None

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # it ended before it read the prompt, which is still buffered
                self._process.stdin.close()  # end of file: the consumer ends, and its guardian erases
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)

    def serve(self, prompt: str, *, deadline_s: float = _READY_DEADLINE_S) -> Report:
        """Send the prompt; return the consumer's report.

        Raises KvtierError with the consumer's own cause where it failed, KernelError where it ended or stayed silent.
        """
        assert self._process.stdin is not None  # noqa: S101 - for the type checker; PIPE was asked for
        try:
            self._process.stdin.write(json.dumps({"prompt": prompt}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended already; what it said, if anything, is read below
        line = self._read_line(deadline_s)
        try:
            answer = _ANSWER.validate_json(line)
        except ValidationError as error:
            raise KernelError("the consumer ended without a report", obj="kvtier_demo.consumer") from error
        if isinstance(answer, Failure):
            raise KvtierError(answer.cause, obj=answer.obj, remedy=answer.remedy)
        self._pidfd = os.pidfd_open(answer.pid)
        self._report = answer
        return answer

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None  # noqa: S101
        fd = self._process.stdout.fileno()
        end = time.monotonic() + deadline_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left_s = end - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    raise KernelError(
                        f"the consumer gave no report within {deadline_s:g} s", obj="kvtier_demo.consumer"
                    )
                part = os.read(fd, 65536)
                if not part:
                    break
                line += part
        return line

    def sigkill(self, *, deadline_s: float = _END_DEADLINE_S) -> float:
        """SIGKILL the consumer itself (not its guardian); return the CLOCK_MONOTONIC seconds at which it was dead."""
        if self._pidfd < 0:
            raise KernelError("the consumer has not reported yet", obj="kvtier_demo.consumer")
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)  # readable once the process is dead
            if not selector.select(deadline_s):
                raise KernelError(f"the consumer did not die within {deadline_s:g} s", obj=f"pid {self._process.pid}")
        return time.monotonic()

    def wait(self, *, deadline_s: float = _END_DEADLINE_S) -> int:
        """Exit status of the command that was started: the consumer's, or its guardian's after it erased."""
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise KernelError(f"did not end within {deadline_s:g} s", obj=f"pid {self._process.pid}") from error
