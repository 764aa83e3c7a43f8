"""What happens to open stores when the process forks: the child gets no keys, the parent goes on.

Python calls these hooks for `os.fork` and what builds on it (multiprocessing's fork method). A fork by C code does not
call them: then only the kernel's part holds (raw keys are wiped by MADV_WIPEONFORK), and the store refuses by its
process id.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["ForkAware", "guard"]


class ForkAware(Protocol):
    def before_fork(self) -> None: ...
    def after_fork_in_parent(self) -> None: ...
    def after_fork_in_child(self) -> None: ...


_guarded: weakref.WeakSet[ForkAware] = weakref.WeakSet()
_held: list[ForkAware] = []
_lock = threading.Lock()


def guard(one: ForkAware) -> None:
    """Call its methods around every fork, as long as it lives."""
    with _lock:
        _guarded.add(one)


def _before() -> None:
    _lock.acquire()
    _held.extend(_guarded)
    for one in _held:
        one.before_fork()


def _in_parent() -> None:
    for one in _held:
        one.after_fork_in_parent()
    _held.clear()
    _lock.release()


def _in_child() -> None:
    global _lock  # noqa: PLW0603
    for one in _held:
        one.after_fork_in_child()
    _held.clear()
    _guarded.clear()
    _lock = threading.Lock()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
