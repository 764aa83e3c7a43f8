"""A gate before the files of a pod's volume: a container that is new to the volume waits until the guardian has looked.

kubelet starts a container anew in its pod without any call to the driver, and sooner than a watch may see the old one's end. The
kernel asks about each open instead (`kernel.fanotify`). Who opens first after the volume was empty goes through, and so does the
whole of its container: every process of its mount namespace, while one lives that was there when it came or went through since.
Whoever else opens waits until the guardian has seen that a container inside still lives, and lets it in too, or that none does,
and has emptied the files. So it reads nothing of the old one, however fast it starts.

Only opens by the pod's own processes wait. One that waits too long is refused (EPERM), and its container fails: better than that
it reads what could not be erased. If this process ends, everything goes on: a gate holds while its agent lives.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Self

from kvtier_api.errors import KernelError, NotFound
from kvtier_node.kernel.fanotify import OpenAttempt, OpenPermissions
from kvtier_node.kernel.processes import PidFd, mount_namespace
from kvtier_node.pods.members import PodMembers

__all__ = ["Gate"]

_HELD_S: Final = 60.0
"""Seconds that an open waits at most. To empty a volume takes less than one; it is tried again meanwhile."""
_MOST: Final = 256
"""Opens that wait at once (more are refused), and processes of a container that are kept: each takes descriptors."""
_LOOK_S: Final = 1.0
_END_S: Final = 5.0


@dataclass
class _Waiting:
    number: int
    """Nobody else's, unlike `namespace`: the kernel gives a mount namespace's number to the next one when it has ended."""
    attempt: OpenAttempt
    namespace: int
    until: float

    def waits(self) -> bool:
        """False: its process was killed."""
        return self.attempt.process is not None and not self.attempt.process.exited()


class Gate:
    """Of one volume. It starts shut: nobody of the pod goes through before `begin`.

    A thread of its own answers the kernel. It opens no file of the volume, and never waits for somebody who does.
    """

    def __init__(self, permissions: OpenPermissions, members: PodMembers, held_s: float) -> None:
        self._permissions = permissions
        self._members = members
        self._held_s = held_s
        self._lock = threading.Lock()
        self._shut = True
        self._empty = False
        self._entered = False
        self._inside: dict[int, dict[int, PidFd]] = {}
        self._waiting: list[_Waiting] = []
        self._numbers = itertools.count()
        self._new: list[OpenAttempt] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = False
        self.failure: BaseException | None = None
        """Why its thread ended by itself; then nobody waits any more."""
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)

    @classmethod
    def before(cls, file_system: int, members: PodMembers, *, held_s: float = _HELD_S) -> Self:
        """Before all files of the file system that the descriptor is of. Raises KernelError where the kernel cannot."""
        permissions = OpenPermissions()
        try:
            permissions.mark_file_system(file_system)
            gate = cls(permissions, members, held_s)
        except BaseException:
            permissions.close()
            raise
        gate._thread.start()
        return gate

    # for the guardian

    def begin(self, users: list[PidFd], *, empty: bool) -> None:
        """`users` have the volume already, and are the gate's from now on; `empty`: nothing was written yet."""
        with self._lock:
            for user in users:
                namespace = mount_namespace(user.pid)
                if namespace is None:
                    user.close()
                else:
                    self._inside.setdefault(namespace, {})[user.pid] = user
            self._entered = bool(self._inside)
            self._empty = empty and not self._inside
            self._reopen()

    def in_use(self) -> bool | None:
        """Whether a container that went through lives. None: none did since the beginning, or since the volume was emptied."""
        with self._lock:
            self._forget_ended()
            return True if self._inside else (False if self._entered else None)

    @property
    def users(self) -> list[int]:
        """Living processes of the containers inside: those that were there when their container came, or went through since."""
        with self._lock:
            self._forget_ended()
            return [pid for users in self._inside.values() for pid in users]

    def waiting(self) -> frozenset[int]:
        """Opens by containers that are new to the volume, which wait for the guardian."""
        with self._lock:
            return frozenset(each.number for each in self._waiting if each.waits())

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Nobody of the pod goes through while the block runs, wherever it is."""
        with self._lock:
            self._shut = True
        try:
            yield
        finally:
            with self._lock:
                self._reopen()

    def emptied(self) -> None:
        """Nothing is left of those who were inside, none of whom lives. While `shut`."""
        with self._lock:
            self._empty = True
            self._entered = False

    def let_in(self, opens: Collection[int]) -> None:
        """The containers of these `waiting` go through: the volume is theirs too. Not one that came since."""
        with self._lock:
            self._forget_ended()
            for each in self._waiting:
                if each.number in opens and each.namespace not in self._inside:
                    self._enter(each)
            self._reopen()

    def close(self) -> None:
        """Refuse whoever waits, and ask about nothing any more. Idempotent."""
        if self._ending:
            return
        self._ending = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    # the thread

    def _run(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._permissions, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            while not self._ending:
                poll.poll(_LOOK_S * 1000)
                self._new.extend(self._permissions.attempts())
                while self._new:
                    self._decide(self._new[0])
                    del self._new[0]
                self._refuse(before=time.monotonic())
        except BaseException as error:  # noqa: BLE001  whatever it is, no open may be left without an answer
            self.failure = error
        finally:
            for attempt in self._new:
                self._permissions.answer(attempt, allowed=False)
            self._refuse()
            self._permissions.close()
            with self._lock:
                for users in self._inside.values():
                    for user in users.values():
                        user.close()
                self._inside.clear()

    def _decide(self, attempt: OpenAttempt) -> None:
        with self._lock:  # nearly every open: of a process that went through before, and still lives
            user = next((users[attempt.pid] for users in self._inside.values() if attempt.pid in users), None)
            if user is not None and not self._shut and not user.exited():
                self._permissions.answer(attempt, allowed=True)
                return
        try:
            if attempt.pid in (0, os.getpid()) or not self._members.has(attempt.pid):
                self._permissions.answer(attempt, allowed=True)
                return
        except OSError:  # whose it is cannot be told
            self._permissions.answer(attempt, allowed=False)
            return
        namespace = mount_namespace(attempt.pid)
        if namespace is None or attempt.process is None or attempt.process.exited():
            self._permissions.answer(attempt, allowed=False)  # it was killed while it waited
            return
        with self._lock:
            if len(self._waiting) >= _MOST:
                self._permissions.answer(attempt, allowed=False)
                return
            self._waiting.append(_Waiting(next(self._numbers), attempt, namespace, time.monotonic() + self._held_s))
            if not self._shut:
                self._reopen()

    def _refuse(self, before: float | None = None) -> None:
        """Those that wait since too long, and those that were killed; all without `before`."""
        with self._lock:
            late = [each for each in self._waiting if before is None or each.until < before or not each.waits()]
            self._waiting = [each for each in self._waiting if each not in late]
            for each in late:
                self._permissions.answer(each.attempt, allowed=False)

    # with the lock held

    def _reopen(self) -> None:
        self._shut = False
        self._forget_ended()
        still = []
        for each in self._waiting:
            if each.namespace not in self._inside and self._empty:
                self._enter(each)
            if (users := self._inside.get(each.namespace)) is not None:
                if each.attempt.pid not in users and len(users) < _MOST and each.attempt.process is not None:
                    users[each.attempt.pid], each.attempt.process = each.attempt.process, None
                self._permissions.answer(each.attempt, allowed=True)
            else:
                still.append(each)
        self._waiting = still

    def _enter(self, waiting: _Waiting) -> None:
        """Its container is inside while one of its processes of this moment lives: then the number can be nobody else's.

        Not if it was killed meanwhile: those who have the number now may be another container, which came since.
        """
        users: dict[int, PidFd] = {}
        # With no descriptor left, those stand for it who were found, and who goes through now (`_reopen`).
        with suppress(OSError, KernelError):
            for pid in self._members.all():
                if len(users) < _MOST and mount_namespace(pid) == waiting.namespace:
                    with suppress(NotFound):
                        users[pid] = PidFd.open(pid)
        if waiting.waits():
            self._inside[waiting.namespace] = users
            self._empty = False
            self._entered = True
        else:
            for user in users.values():
                user.close()

    def _forget_ended(self) -> None:
        for namespace, users in list(self._inside.items()):
            for pid in [pid for pid, user in users.items() if user.exited()]:
                users.pop(pid).close()
            if not users:
                del self._inside[namespace]
