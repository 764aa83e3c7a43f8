"""Real slot files on the disk under tmp_path, and stores over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_material import SLOT_BYTES, HandClock
from kvtier_engine import SlotStore, StoreConfig


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def slot_files(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """Preallocated files, as the node agent makes them."""

    def make(ranks: int = 1, *, slots: int = 16, slot_size_bytes: int = SLOT_BYTES) -> tuple[str, ...]:
        paths = []
        for rank in range(ranks):
            path = tmp_path / f"slot.rank_{rank}"
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, slots * slot_size_bytes)
            paths.append(str(path))
        return tuple(paths)

    return make


@pytest.fixture
def open_store(slot_files: Callable[..., tuple[str, ...]]) -> Iterator[Callable[..., SlotStore]]:
    """Stores that are closed at the end, whatever happens."""
    stores: list[SlotStore] = []

    def make(ranks: int = 1, *, slots: int = 16, files: tuple[str, ...] | None = None, **options: Any) -> SlotStore:
        size = options.setdefault("slot_size_bytes", SLOT_BYTES)
        defaults: dict[str, Any] = {
            "ranks": tuple(range(ranks)),
            "tier_uid": "3f0c0e1a-tier",
            "volume_id": "kvv-0123456789abcdef0123",
            "salt_policy": "Required",
            "max_age_s": 3600.0,
            "harden_process": False,
            "io_depth": 2,
        }
        paths = files or slot_files(ranks, slots=slots, slot_size_bytes=size)
        store = SlotStore(StoreConfig(files=paths, **(defaults | options)))
        stores.append(store)
        return store

    yield make
    for store in stores:
        store.close()
