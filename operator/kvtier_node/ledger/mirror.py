"""The mirror: `receipts.jsonl`, every receipt a second time, so that a lost ledger does not lose the chain.

The ledger comes first: a line is appended after its receipt is committed. So the mirror may be behind, and is caught
up; a mirror that is ahead proves that the ledger has lost commits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import VerificationFailed
from kvtier_node.receipts.chain import verify_chain
from kvtier_node.receipts.encoding import hash_of, utc_now
from kvtier_node.receipts.receipt import Receipt, read_receipt
from kvtier_node.state_dir import StateDirectory

__all__ = ["MIRROR_NAME", "NO_MIRROR", "MirrorEnd", "append", "read_end", "restorable", "set_aside"]

MIRROR_NAME: Final = "receipts.jsonl"
_TAIL_SIZE_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class MirrorEnd:
    """The last whole line: its receipt's number (0: none) and hash; `torn`: bytes after it, of an append cut short."""

    seq: int
    hash: str
    size_bytes: int
    torn: bool


NO_MIRROR: Final = MirrorEnd(0, "", 0, torn=False)


def read_end(state: StateDirectory) -> MirrorEnd:
    """Where the mirror ends. Raises VerificationFailed if its last whole line is not a receipt."""
    if state.file_status(MIRROR_NAME) is None:
        return NO_MIRROR
    fd = state.open_file(MIRROR_NAME, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        start = max(0, size - _TAIL_SIZE_BYTES)
        tail = os.pread(fd, _TAIL_SIZE_BYTES, start)
    finally:
        os.close(fd)
    whole = tail.rfind(b"\n") + 1
    if not whole:
        if start:
            raise VerificationFailed("its last line is too long", obj=state.path_of(MIRROR_NAME))
        return MirrorEnd(0, "", 0, torn=bool(tail))
    line = tail[tail.rfind(b"\n", 0, whole - 1) + 1 : whole - 1]
    receipt = read_receipt(line)
    return MirrorEnd(receipt.seq, hash_of(line), start + whole, torn=whole != len(tail))


def append(state: StateDirectory, end: MirrorEnd, lines: list[bytes]) -> None:
    """Append whole lines after `end`, durably; a torn line there goes. Raises OSError."""
    new = state.file_status(MIRROR_NAME) is None
    fd = state.open_file(MIRROR_NAME, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(fd, end.size_bytes)
        view = memoryview(b"".join(line + b"\n" for line in lines))
        offset = end.size_bytes
        while view:
            written = os.pwrite(fd, view, offset)
            offset, view = offset + written, view[written:]
        os.fsync(fd)
    finally:
        os.close(fd)
    if new:
        state.sync()


def set_aside(state: StateDirectory) -> str:
    """Move a mirror that contradicts the ledger away, for the evidence; return its new name."""
    aside = f"{MIRROR_NAME}.damaged-{utc_now().replace(':', '').replace('-', '')}"
    state.move(MIRROR_NAME, aside)
    state.sync()
    return aside


def restorable(lines: list[bytes], public_key: bytes | None) -> tuple[list[Receipt], list[str]]:
    """The longest verified beginning of a mirror (a torn last line left out), and what was wrong after it."""
    lines = [line.removesuffix(b"\n") for line in lines]
    check = verify_chain(lines, public_key=public_key, require_head=False)
    if check.ok:
        return [read_receipt(line) for line in lines], []
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        if verify_chain(lines[:middle], public_key=public_key, require_head=False).ok:
            low = middle
        else:
            high = middle - 1
    return [read_receipt(line) for line in lines[:low]], check.problems
