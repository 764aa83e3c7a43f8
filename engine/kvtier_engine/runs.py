"""Runs: items of one job whose slots are adjacent, moved by one system call per rank file.

Sealing several small slots into one buffer and writing it at once is what keeps the interpreter out of the way at
64 KiB. A run lives from the planning of a job until all ranks have moved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from kvtier_api.errors import EngineError
from kvtier_engine.jobs import Job, Outcome
from kvtier_engine.sealing import SlotSeal

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Item", "Run", "adjacent", "views_of"]

_T = TypeVar("_T")
Item: TypeAlias = "tuple[bytes, Sequence[Buffer]]"  # a block's key, and its memory for each rank of the store


class Run:
    """Adjacent slots of one job. `views[position][k]` is the caller's memory for the k-th slot and that rank file."""

    __slots__ = ("bad_medium", "digests", "items", "job", "ranks_left", "seals", "tags", "verdicts", "views")

    def __init__(
        self,
        job: Job,
        *,
        items: list[int],
        seals: list[SlotSeal],
        digests: list[bytes],
        views: list[list[memoryview]],
        tags: list[list[bytes]],
    ) -> None:
        self.job = job
        self.items = items
        self.seals = seals
        self.digests = digests
        self.views = views
        self.tags = tags
        self.ranks_left = len(views)
        self.bad_medium = False
        self.verdicts: list[Outcome] | None = None  # of the ranks that are done

    @property
    def first_slot(self) -> int:
        return self.seals[0].slot

    @property
    def slots(self) -> list[int]:
        return [seal.slot for seal in self.seals]

    def part(self, positions: Sequence[int]) -> Run:
        """A run of its own of some of the slots."""

        def chosen(column: list[_T]) -> list[_T]:
            return [column[k] for k in positions]

        return Run(
            self.job,
            items=chosen(self.items),
            seals=chosen(self.seals),
            digests=chosen(self.digests),
            views=[chosen(column) for column in self.views],
            tags=[chosen(column) for column in self.tags],
        )


def adjacent(slots: Sequence[int], most: int) -> list[range]:
    """Split positions of an ascending list of slots into ranges of neighbours, at most `most` long."""
    runs: list[range] = []
    start = 0
    for position in range(1, len(slots) + 1):
        if position == len(slots) or slots[position] != slots[position - 1] + 1 or position - start == most:
            runs.append(range(start, position))
            start = position
    return runs


def views_of(
    items: Sequence[Item], *, ranks: int, slot_size_bytes: int, writable: bool
) -> tuple[list[bytes], list[list[memoryview]]]:
    """The items' keys, and for each rank a flat byte view of each item's memory, without copying.

    Raises EngineError when an item does not suit the store.
    """

    def refuse(cause: str, remedy: str, what: str = "") -> NoReturn:
        raise EngineError(cause, obj=f"item {len(keys)}{what}", remedy=remedy)

    keys: list[bytes] = []
    views: list[list[memoryview]] = [[] for _ in range(ranks)]
    for key, buffers in items:
        if not isinstance(key, bytes):
            refuse("not bytes", "pass a block hash as bytes", ", key")
        if len(buffers) != ranks:
            refuse(f"{len(buffers)} buffers", f"one for each of the {ranks} ranks of this store")
        for column, buffer in zip(views, buffers, strict=True):
            view = memoryview(buffer)
            if not view.c_contiguous or (writable and view.readonly):
                refuse("memory that is not contiguous, or not writable", "pass a flat buffer")
            if not 0 < view.nbytes <= slot_size_bytes:
                refuse(f"{view.nbytes} bytes", f"1 to {slot_size_bytes} bytes per rank")
            column.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
        keys.append(key)
    return keys, views
