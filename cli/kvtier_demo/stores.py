"""The one place where the demonstration meets kvtier's slot store."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KvtierStore", "kvtier_store"]


class KvtierStore:
    """kvtier's slot store as a `generate.BlockStore`: one block per job, waited for."""

    def __init__(self, store: Any, block_bytes: int) -> None:
        self._store = store
        self._block_bytes = block_bytes

    @property
    def direct(self) -> bool:
        return bool(self._store.direct)

    def put(self, key: bytes, block: bytes) -> None:
        self._store.put([key], [memoryview(bytearray(block))]).result()

    def get(self, key: bytes) -> bytes | None:
        buffer = bytearray(self._block_bytes)
        return bytes(buffer) if all(self._store.get([key], [memoryview(buffer)]).result()) else None


def kvtier_store(block_bytes: int) -> KvtierStore:
    """The store of the volume that `kvtier run` gave this process. Raises EngineError, VerificationFailed."""
    engine: Any = importlib.import_module("kvtier_engine")
    return KvtierStore(engine.SlotStore.from_environment(), block_bytes)
