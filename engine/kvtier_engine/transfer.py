"""Moving one run of one rank: seal and write, or read and open. Runs in an I/O thread, without the store's lock.

Sealing reads the caller's memory and opening writes it directly; only ciphertext passes through staging. Without
seals, page-aligned memory goes to the file as it is. What fails here is told by outcome, or raised as OSError.

A thread seals and opens in its turn only (`io_threads.Turn`), and gives the turn back before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from kvtier_engine.io_threads import Turn
from kvtier_engine.jobs import Outcome
from kvtier_engine.keys import KeyRing
from kvtier_engine.runs import Run
from kvtier_engine.sealing import TierBinding, open_slot, seal_slots
from kvtier_engine.slotfile import SlotFile
from kvtier_engine.staging import PAGE_BYTES, StagingBuffer, StagingRing

__all__ = ["Moved", "Transfer"]

_MOST_FAILURES: Final = 4


class Moved(NamedTuple):
    """One outcome per slot. `failure` is why the run could not be moved as a whole, and was moved slot by slot."""

    verdicts: list[Outcome]
    failure: OSError | None = None


def _move(
    move: Callable[[int, Sequence[memoryview]], None],
    offset: int,
    whole: Sequence[memoryview],
    slots: Sequence[memoryview],
    done: Outcome,
) -> Moved:
    """Move adjacent slots at once; where that fails, one at a time: a bad sector costs the block that lies on it.

    After a few failures the rest is given up: on a dying disk each may take half a minute. Raises OSError for a run of
    one slot.
    """
    try:
        move(offset, whole)
    except OSError as error:
        if len(slots) == 1:
            raise
        failure = error
    else:
        return Moved([done] * len(slots))
    verdicts: list[Outcome] = []
    for slot in slots:
        verdict = Outcome.IO_ERROR
        if verdicts.count(Outcome.IO_ERROR) < _MOST_FAILURES:
            with suppress(OSError):  # told by the outcome, and counted by the first failure
                move(offset, [slot])
                verdict = done
        verdicts.append(verdict)
        offset += len(slot)
    return Moved(verdicts, failure)


def _page_aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0


class Transfer:
    """`sealed` False writes plain slots: then nothing but the index tells a corrupt slot from a good one."""

    def __init__(
        self, *, keys: KeyRing, staging: StagingRing, binding: TierBinding, slot_size_bytes: int, sealed: bool
    ) -> None:
        self._keys = keys
        self._staging = staging
        self._binding = binding
        self._size = slot_size_bytes
        self._sealed = sealed

    def store(self, run: Run, position: int, rank: int, file: SlotFile, turn: Turn) -> Moved:
        """Write a run to one rank's file and note its tags. EXPIRED when its key is gone. Raises OSError.

        Called in the thread's turn, which it ends when what is to be written stands ready.
        """
        views = run.views[position]
        offset = run.first_slot * self._size
        if not self._sealed and self._passes_as_it_is(views, file):
            turn.end()
            if not self._keys.readable(run.seals[0].key_number):
                return Moved([Outcome.EXPIRED] * len(views))
            run.tags[position] = [b""] * len(views)
            return _move(file.write, offset, views, views, Outcome.STORED)
        # Nobody waits for a buffer in his turn: those who have the buffers may be waiting for theirs.
        with self._staging.lend(turn.end) as buffer:
            turn.begin()
            if self._sealed:
                tags = self._seal(run, views, rank, buffer)
                if tags is None:
                    return Moved([Outcome.EXPIRED] * len(views))
            else:
                tags = [b""] * len(views)
                for view, slot in zip(views, self._slots(buffer, len(views)), strict=True):
                    self._pad(view, slot)
            turn.end()
            run.tags[position] = tags
            whole = buffer.run[: len(views) * self._size]
            return _move(file.write, offset, [whole], self._slots(buffer, len(views)), Outcome.STORED)

    def _slots(self, buffer: StagingBuffer, count: int) -> list[memoryview]:
        return [room[: self._size] for room in buffer.rooms[:count]]

    def _passes_as_it_is(self, views: list[memoryview], file: SlotFile) -> bool:
        return all(len(view) == self._size and (not file.direct or _page_aligned(view)) for view in views)

    def _all_whole(self, views: list[memoryview]) -> bool:
        return set(map(len, views)) == {self._size}

    def _seal(self, run: Run, views: list[memoryview], rank: int, buffer: StagingBuffer) -> list[bytes] | None:
        with self._keys.cipher(run.seals[0].key_number) as aead:
            if aead is None:
                return None
            rooms = buffer.rooms[: len(views)]
            if self._all_whole(views):
                return seal_slots(aead, self._binding, run.seals, rank=rank, plains=views, rooms=rooms)
            tags = []
            for seal, view, room in zip(run.seals, views, rooms, strict=True):
                self._pad(view, buffer.scratch)
                tags += seal_slots(aead, self._binding, (seal,), rank=rank, plains=(buffer.scratch,), rooms=(room,))
            buffer.scratch[:] = bytes(self._size)
            return tags

    def _pad(self, view: memoryview, room: memoryview) -> None:
        room[: len(view)] = view
        if len(view) < self._size:
            room[len(view) :] = bytes(self._size - len(view))

    def load(self, run: Run, position: int, rank: int, file: SlotFile, turn: Turn) -> Moved:
        """Read a run of one rank into the caller's memory. Raises OSError."""
        views = run.views[position]
        offset = run.first_slot * self._size
        numbers = {seal.key_number for seal in run.seals}
        if not any(map(self._keys.readable, numbers)):
            return Moved([Outcome.EXPIRED] * len(views))
        if not self._sealed and self._passes_as_it_is(views, file):
            moved = _move(file.read, offset, views, views, Outcome.LOADED)
        else:
            with self._staging.lend() as buffer:
                whole = buffer.run[: len(views) * self._size]
                moved = _move(file.read, offset, [whole], self._slots(buffer, len(views)), Outcome.LOADED)
                turn.begin()
                (self._open if self._sealed else self._copy)(run, position, rank, buffer, moved.verdicts)
                turn.end()
        # Looked at again, after the bytes are in the caller's memory: the key may have come of age, or been dropped,
        # while they were read.
        gone = {number for number in numbers if not self._keys.readable(number)}
        outcomes = moved.verdicts
        if gone or outcomes.count(Outcome.LOADED) < len(outcomes):
            for k, seal in enumerate(run.seals):
                if outcomes[k] is Outcome.LOADED and seal.key_number in gone:
                    outcomes[k] = Outcome.EXPIRED
                if outcomes[k] is not Outcome.LOADED:
                    views[k][:] = bytes(len(views[k]))
        return moved

    def _open(self, run: Run, position: int, rank: int, buffer: StagingBuffer, outcomes: list[Outcome]) -> None:
        """Decrypt what was read (LOADED so far) into the caller's memory, and enter what came of it."""
        views, tags = run.views[position], run.tags[position]
        # From the last to the first: a slot's tag is put where the next slot begins, which is opened by then.
        order = [k for k in range(len(run.seals) - 1, -1, -1) if outcomes[k] is Outcome.LOADED]
        for number, group in groupby(order, key=lambda k: run.seals[k].key_number):
            with self._keys.cipher(number) as aead:
                for k in group:
                    if aead is None:
                        outcomes[k] = Outcome.EXPIRED
                        continue
                    view = views[k]
                    padded = len(view) < self._size
                    plain = buffer.scratch if padded else view
                    good = open_slot(
                        aead, self._binding, run.seals[k], rank=rank, tag=tags[k], room=buffer.rooms[k], plain=plain
                    )
                    if not good:
                        outcomes[k] = Outcome.BAD_TAG
                    if padded:
                        view[:] = buffer.scratch[: len(view)]
                        buffer.scratch[:] = bytes(self._size)

    def _copy(self, run: Run, position: int, rank: int, buffer: StagingBuffer, outcomes: list[Outcome]) -> None:  # noqa: ARG002
        for view, room, outcome in zip(run.views[position], buffer.rooms, outcomes, strict=False):
            if outcome is Outcome.LOADED:  # else the buffer holds what was moved before
                view[:] = room[: len(view)]
