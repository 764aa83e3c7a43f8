"""Every disk that a power cut could have left, mounted one after another inside a guest, from a dm-log-writes log.

A state is a sparse copy in memory, so that what ext4 and the program under test repair does not reach the next state.
System calls instead of tools: there are hundreds of states, and a process costs more here than a mount.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from uml.logwrites import Entry, LogWrites

from umlguest import blockdev

# linux/loop.h
LOOP_CTL_GET_FREE, LOOP_CONFIGURE, LOOP_CLR_FD, LO_FLAGS_AUTOCLEAR = 0x4C82, 0x4C0A, 0x4C01, 4
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class State:
    """The disk after all entries up to the barrier `entry`; `marks`: what the recording had marked before it.

    `torn`: how many of the writes that came after it, and that no barrier had made durable yet, are on the disk too.
    """

    entry: Entry
    marks: list[str]
    image: Path
    torn: int = 0

    @contextmanager
    def mounted(self, kind: str = "ext4", place: Path = Path("/mnt/state")) -> Iterator[Path]:
        """Mount this state read-write, as the next boot would; the journal is recovered by the kernel."""
        place.mkdir(exist_ok=True)
        with _loop(self.image) as device:
            _check(_LIBC.mount(device.encode(), str(place).encode(), kind.encode(), 0, None), f"mount {device}")
            yield place
            _check(_LIBC.umount2(str(place).encode(), 0), f"umount {place}")


def states(
    log_device: str,
    disk_bytes: int,
    first_mark: str = "",
    *,
    shard: int = 0,
    shards: int = 1,
    chance: random.Random | None = None,
) -> Iterator[State]:
    """Each barrier's state, those before `first_mark` left out. The disk was all zeros when the recording began.

    Of those, the states `shard`, `shard + shards`, …: several machines can share the work. With `chance` each is followed by
    a torn one: some of the writes that the disk had taken, and not yet made durable, are there, in any combination.
    """
    blockdev.load("loop")
    base, copy = Path("/dev/shm/replay.base"), Path("/dev/shm/replay.copy")
    with LogWrites(log_device) as log, open(base, "w+b") as target:
        target.truncate(disk_bytes)
        groups = _groups(log)
        marks: list[str] = []
        number = -1
        for group, following in itertools.zip_longest(groups, groups[1:], fillvalue=[]):
            for entry in group:
                log.apply(entry, target.fileno())
            marks += [entry.mark for entry in group if entry.mark]
            if not group[-1].is_barrier or (first_mark and first_mark not in marks):
                continue
            number += 1
            if number % shards != shard:
                continue
            _copy_sparse(target.fileno(), copy, disk_bytes)
            yield State(group[-1], list(marks), copy)
            writes = [entry for entry in following if entry.size]
            if chance is not None and len(writes) > 1:
                _copy_sparse(target.fileno(), copy, disk_bytes)
                some = [entry for entry in writes if chance.random() < 0.5]
                with open(copy, "r+b") as torn:
                    for entry in some:
                        log.apply(entry, torn.fileno())
                yield State(group[-1], marks + [entry.mark for entry in following if entry.mark], copy, len(some))


def _groups(log: LogWrites) -> list[list[Entry]]:
    """The log's entries, cut after each barrier."""
    groups: list[list[Entry]] = [[]]
    for entry in log.entries():
        groups[-1].append(entry)
        if entry.is_barrier:
            groups.append([])
    return [group for group in groups if group]


def _copy_sparse(source_fd: int, target: Path, size: int) -> None:
    with open(target, "w+b") as file:
        file.truncate(size)
        position = 0
        while position < size:
            try:
                position = os.lseek(source_fd, position, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                return
            end = os.lseek(source_fd, position, os.SEEK_HOLE)
            while position < end:
                data = os.pread(source_fd, min(end - position, 1 << 20), position)
                position += os.pwrite(file.fileno(), data, position)


@contextmanager
def _loop(image: Path) -> Iterator[str]:
    control = os.open("/dev/loop-control", os.O_RDWR)
    try:
        device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
    finally:
        os.close(control)
    backing = os.open(image, os.O_RDWR)
    loop = os.open(device, os.O_RDWR)
    try:
        # struct loop_config: fd, block_size, struct loop_info64 (its lo_flags at offset 52 of 232), 8 reserved words
        info = bytearray(232)
        struct.pack_into("=I", info, 52, LO_FLAGS_AUTOCLEAR)
        fcntl.ioctl(loop, LOOP_CONFIGURE, struct.pack("=II", backing, 512) + bytes(info) + bytes(64))
        yield device
    finally:
        os.close(loop)  # the last close detaches it
        os.close(backing)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
