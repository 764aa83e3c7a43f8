"""Structured log lines of the agent: JSON on a pipe or file, text on a terminal. Always stderr.

The one place that configures structlog. No line holds a key, a salt, a slot's bytes or an environment.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger as Log

from kvtier_node.ledger import Observer, Transition

__all__ = ["Log", "configure", "log_of_transitions"]


class _Lossy:
    """A stream whose lines are lost where it takes none: a full disk or a dead log service must not end the guarding."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        try:
            return self._out.write(text)
        except (OSError, ValueError):
            return 0

    def flush(self) -> None:
        try:
            self._out.flush()
        except (OSError, ValueError):
            pass


def configure(stream: TextIO | None = None, *, as_json: bool | None = None) -> Log:
    """A logger that writes to `stream` (stderr). `as_json` None: JSON unless it is a terminal."""
    out = stream or sys.stderr
    if as_json is None:
        as_json = not out.isatty()
    colors = out.isatty() and not os.environ.get("NO_COLOR")  # https://no-color.org
    renderer: Any = (
        structlog.processors.JSONRenderer(sort_keys=True) if as_json else structlog.dev.ConsoleRenderer(colors=colors)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Lossy(out))),
        cache_logger_on_first_use=True,
    )
    return cast(Log, structlog.get_logger())


def log_of_transitions(log: Log) -> Observer:
    """A ledger's observer: each arrow of each volume is a line."""

    def observe(arrow: Transition) -> None:
        log.info(
            "volume",
            volume=arrow.volume_id,
            before=arrow.before.value if arrow.before else None,
            after=arrow.after.value,
            reason=arrow.reason,
        )

    return observe
