"""A slot file as vLLM's simple disk backend makes it (0.28 to 0.33), so that the demonstration shows the real thing.

Facts, written anew here: the name `<disk_path>.rank_<N>`; a pre-existing file is unlinked; opened with
O_RDWR|O_CREAT|O_EXCL|O_NOFOLLOW|O_DIRECT, mode 0600; ftruncate, so sparse; slot s at s times the block size; no header,
no checksum; the map of blocks in memory only; nothing unlinks it at the end. This is what kvtier replaces: use it for
nothing else.
"""

from __future__ import annotations

import errno
import mmap
import os

from kvtier_api.errors import EngineError
from kvtier_demo.kvblocks import ALIGNMENT_BYTES
from kvtier_demo.rawimage import chunks

__all__ = ["StockDisk", "wipe_leftover"]


class StockDisk:
    """A plain slot file. `capacity_bytes` is apparent size; `direct` says whether O_DIRECT worked."""

    def __init__(self, disk_path: str, *, rank: int, capacity_bytes: int, block_bytes: int) -> None:
        if block_bytes % ALIGNMENT_BYTES:
            raise EngineError(
                f"a block must be a multiple of {ALIGNMENT_BYTES} bytes", obj=f"block_bytes={block_bytes}"
            )
        self.path = f"{disk_path}.rank_{rank}"
        self.block_bytes = block_bytes
        self.slots = capacity_bytes // block_bytes
        self._slot_of: dict[bytes, int] = {}
        # Anonymous memory is page-aligned, as O_DIRECT asks.
        self._staging = mmap.mmap(-1, block_bytes)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system has no O_DIRECT. The engine's own switch for it is use_page_cache.
            self._fd = os.open(self.path, flags, 0o600)
            self.direct = False
        os.ftruncate(self._fd, self.slots * block_bytes)

    def put(self, key: bytes, block: bytes) -> None:
        """Write `block` to the next free slot. Raises EngineError when all are used (this stand-in never evicts)."""
        slot = self._slot_of.get(key, len(self._slot_of))
        if slot >= self.slots:
            raise EngineError("all slots are used", obj=self.path, remedy="give more capacity, or a shorter prompt")
        self._staging[:] = block
        written = os.pwritev(self._fd, [self._staging], slot * self.block_bytes)
        if written != self.block_bytes:
            raise EngineError(f"short write of {written} bytes", obj=self.path)
        self._slot_of[key] = slot

    def get(self, key: bytes) -> bytes | None:
        slot = self._slot_of.get(key)
        if slot is None or os.preadv(self._fd, [self._staging], slot * self.block_bytes) != self.block_bytes:
            return None
        return bytes(self._staging)

    def close(self) -> None:
        """Close. The file stays, as the stock engine leaves it."""
        os.close(self._fd)
        self._staging.close()


def wipe_leftover(path: str) -> None:
    """Overwrite and unlink the demonstration's own slot file, if it is there.

    On flash and on copy-on-write file systems an overwrite promises little: that is the reason for kvtier.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for offset, own, _ in chunks(path, overlap_bytes=0):
            os.pwrite(fd, bytes(own), offset)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    os.unlink(path)
