"""Read what dm-log-writes recorded, and rebuild the disk as it was at every FLUSH or FUA: each is a possible cut.

The format (drivers/md/dm-log-writes.c): sector 0 holds the superblock; then, one after another, a sector with an
entry's head and the data written. The target appends writes as they complete and puts those that a FLUSH made durable
before it; so the disk after all entries up to a FLUSH or FUA is what is left if every later write is lost.
Standard library only: hosts and guests both use it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

MAGIC = 0x6A736677736872
FLUSH, FUA, DISCARD, MARK, METADATA = 1, 2, 4, 8, 16
_SECTOR = 512  # sector numbers count 512 bytes, whatever the device's block size
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One record. `at` and `size` in bytes, on the device; `data_at`: where its data lies in the log; `mark`: its text."""

    number: int
    at: int
    size: int
    flags: int
    data_at: int
    mark: str = ""

    @property
    def is_barrier(self) -> bool:
        return bool(self.flags & (FLUSH | FUA))


class LogWrites:
    """An opened log. `entries` gives only what the superblock counts: it is written after the data it counts."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        magic, version, self.entry_count, self.block_size = _SUPER.unpack(os.pread(self.fd, _SUPER.size, 0))
        if magic != MAGIC or version != 1:
            os.close(self.fd)
            raise ValueError(f"{os.fspath(path)} is no dm-log-writes log: magic {magic:#x}, version {version}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def entries(self) -> Iterator[Entry]:
        position = self.block_size
        for number in range(self.entry_count):
            head = os.pread(self.fd, self.block_size, position)
            sector, sectors, flags, data_len = _ENTRY.unpack_from(head)
            position += self.block_size
            mark = ""
            if flags & MARK:
                mark = head[_ENTRY.size : _ENTRY.size + data_len].rstrip(b"\0").decode(errors="replace")
            yield Entry(number, sector * _SECTOR, sectors * _SECTOR, flags, position, mark)
            if not flags & (DISCARD | MARK):
                position += sectors * _SECTOR

    def apply(self, entry: Entry, target_fd: int) -> None:
        """Do to the target what the entry did to the device. A discard reads as zeros afterwards."""
        done = 0
        while done < entry.size and not entry.flags & MARK:
            length = min(_CHUNK, entry.size - done)
            data = bytes(length) if entry.flags & DISCARD else os.pread(self.fd, length, entry.data_at + done)
            if len(data) < length:
                raise ValueError(f"log ends within entry {entry.number}: {len(data)} of {length} bytes")
            done += os.pwrite(target_fd, data, entry.at + done)

    def states(self, target_fd: int) -> Iterator[tuple[Entry, list[str]]]:
        """Bring the target from its first state to each barrier in turn; gives that entry and the marks before it."""
        marks: list[str] = []
        for entry in self.entries():
            self.apply(entry, target_fd)
            if entry.flags & MARK:
                marks.append(entry.mark)
            if entry.is_barrier:
                os.fsync(target_fd)
                yield entry, list(marks)
