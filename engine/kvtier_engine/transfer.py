"""Moving one run of one rank: seal and write, or read and open. Runs in an I/O thread, without the store's lock.

Sealing reads the caller's memory and opening writes it directly; only ciphertext passes through staging. Without
seals, page-aligned memory goes to the file as it is. What fails here is told by outcome, or raised as OSError.
"""

from __future__ import annotations

import os
import threading
from itertools import groupby
from typing import Final

import numpy as np

from kvtier_engine.jobs import Outcome
from kvtier_engine.keys import KeyRing
from kvtier_engine.runs import Run
from kvtier_engine.sealing import TierBinding, open_slot, seal_slot
from kvtier_engine.slotfile import SlotFile
from kvtier_engine.staging import PAGE_BYTES, StagingBuffer, StagingRing

__all__ = ["Transfer"]

_SMALL_SLOT_BYTES: Final = 512 << 10


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
        # More sealing threads than processors would only hand the interpreter lock, and the caches, to each other; with
        # small slots that begins at two.
        cores = os.cpu_count() or 1
        few = min(2, cores) if slot_size_bytes < _SMALL_SLOT_BYTES else cores
        self._sealers = threading.BoundedSemaphore(few)

    def store(self, run: Run, position: int, rank: int, file: SlotFile) -> list[bytes] | None:
        """Write a run to one rank's file; returns its tags, or None when its key is gone. Raises OSError."""
        views = run.views[position]
        offset = run.first_slot * self._size
        if not self._sealed and self._passes_as_it_is(views, file):
            if not self._keys.readable(run.seals[0].key_number):
                return None
            file.write(offset, views)
            return [b""] * len(views)
        with self._staging.lend() as buffer:
            if self._sealed:
                tags = self._seal(run, views, rank, buffer)
                if tags is None:
                    return None
            else:
                tags = [b""] * len(views)
                for k, view in enumerate(views):
                    self._pad(view, buffer.run[k * self._size : (k + 1) * self._size])
            file.write(offset, [buffer.run[: len(views) * self._size]])
            return tags

    def _passes_as_it_is(self, views: list[memoryview], file: SlotFile) -> bool:
        return all(len(view) == self._size and (not file.direct or _page_aligned(view)) for view in views)

    def _seal(self, run: Run, views: list[memoryview], rank: int, buffer: StagingBuffer) -> list[bytes] | None:
        tags = []
        with self._sealers, self._keys.cipher(run.seals[0].key_number) as aead:
            if aead is None:
                return None
            for k, (seal, view) in enumerate(zip(run.seals, views, strict=True)):
                padded = len(view) < self._size
                if padded:
                    self._pad(view, buffer.scratch)
                plain = buffer.scratch if padded else view
                # The tag lands where the next slot begins, and is overwritten by it.
                tags.append(
                    seal_slot(aead, self._binding, seal, rank=rank, plain=plain, room=buffer.run[k * self._size :])
                )
                if padded:
                    buffer.scratch[:] = bytes(self._size)
        return tags

    def _pad(self, view: memoryview, room: memoryview) -> None:
        room[: len(view)] = view
        if len(view) < self._size:
            room[len(view) :] = bytes(self._size - len(view))

    def load(self, run: Run, position: int, rank: int, file: SlotFile) -> list[Outcome]:
        """Read a run of one rank into the caller's memory; one outcome per slot. Raises OSError."""
        views = run.views[position]
        offset = run.first_slot * self._size
        if not any(self._keys.readable(seal.key_number) for seal in run.seals):
            return [Outcome.EXPIRED] * len(views)
        if not self._sealed and self._passes_as_it_is(views, file):
            file.read(offset, views)
            outcomes = [Outcome.LOADED] * len(views)
        else:
            with self._staging.lend() as buffer:
                file.read(offset, [buffer.run[: len(views) * self._size]])
                outcomes = (self._open if self._sealed else self._copy)(run, position, rank, buffer)
        # Looked at again, after the bytes are in the caller's memory: the key may have come of age, or been dropped,
        # while they were read.
        for k, seal in enumerate(run.seals):
            if outcomes[k] is Outcome.LOADED and not self._keys.readable(seal.key_number):
                outcomes[k] = Outcome.EXPIRED
            if outcomes[k] is not Outcome.LOADED:
                views[k][:] = bytes(len(views[k]))
        return outcomes

    def _open(self, run: Run, position: int, rank: int, buffer: StagingBuffer) -> list[Outcome]:
        outcomes = [Outcome.EXPIRED] * len(run.seals)
        # From the last to the first: a slot's tag is put where the next slot begins, which is opened by then.
        order = range(len(run.seals) - 1, -1, -1)
        for number, group in groupby(order, key=lambda k: run.seals[k].key_number):
            with self._sealers, self._keys.cipher(number) as aead:
                if aead is None:
                    continue
                for k in group:
                    view, tag = run.views[position][k], run.tags[position][k]
                    padded = len(view) < self._size
                    plain = buffer.scratch if padded else view
                    room = buffer.run[k * self._size :]
                    good = open_slot(aead, self._binding, run.seals[k], rank=rank, tag=tag, room=room, plain=plain)
                    outcomes[k] = Outcome.LOADED if good else Outcome.BAD_TAG
                    if padded:
                        view[:] = buffer.scratch[: len(view)]
                        buffer.scratch[:] = bytes(self._size)
        return outcomes

    def _copy(self, run: Run, position: int, rank: int, buffer: StagingBuffer) -> list[Outcome]:  # noqa: ARG002
        for k, view in enumerate(run.views[position]):
            view[:] = buffer.run[k * self._size : k * self._size + len(view)]
        return [Outcome.LOADED] * len(run.seals)
