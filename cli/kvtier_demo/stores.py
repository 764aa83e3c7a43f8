"""The one place where the demonstration meets kvtier's slot store."""

from __future__ import annotations

from typing import Final

from kvtier_api.errors import EngineError
from kvtier_engine import SlotStore

__all__ = ["KvtierStore", "kvtier_store"]

_TENANT: Final = b"kvtier-demo"  # the trusted salt, which a server takes from the authenticated tenant


class KvtierStore:
    """kvtier's slot store as a `generate.BlockStore`: one block at a time, waited for."""

    def __init__(self, store: SlotStore, block_bytes: int) -> None:
        self._store = store
        self._block_bytes = block_bytes

    @property
    def direct(self) -> bool:
        return all(rank.direct for rank in self._store.stats().ranks)

    def put(self, key: bytes, block: bytes) -> None:
        """Raises EngineError where the block was not stored: the demonstration must not show what did not happen."""
        outcome = self._store.put(key, [block] * len(self._store.config.files), tenant=_TENANT)
        if not outcome.ok:
            raise EngineError(f"the slot store did not store a block ({outcome.value})", obj="SlotStore.put")

    def get(self, key: bytes) -> bytes | None:
        buffers = [bytearray(self._block_bytes) for _ in self._store.config.files]
        return bytes(buffers[0]) if self._store.get(key, buffers, tenant=_TENANT).ok else None


def kvtier_store(block_bytes: int) -> KvtierStore:
    """The store of the volume that `kvtier run` gave this process. Raises EngineError, VerificationFailed, NotFound."""
    store = SlotStore.from_environment()
    if store.config.slot_size_bytes < block_bytes:
        raise EngineError(
            f"a block of {block_bytes} bytes does not fit", obj=f"slotSize {store.config.slot_size_bytes}"
        )
    return KvtierStore(store, block_bytes)
