"""Slot files: made and preallocated per rank, and watched by a descriptor of the agent's own.

The names are the stock backend's (`<prefix>.rank_<N>`). The agent keeps one descriptor to each file of the slot directory, so
that an unlink by the next process frees nothing before it is erased, and so that the kernel can answer whether anybody
else has it open (`kernel.lease`). Who the consumer is, and what its end means, is left to `consumers` and `lifecycle`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self

from kvtier_api.errors import UnsafePath
from kvtier_api.marker import MARKER_NAME, SLOTS_DIRECTORY, Marker
from kvtier_node.kernel import files, lease
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME

__all__ = ["SlotWatch", "create", "open_consumer_file", "slot_names"]

_DEEPEST: Final = 32
_NOT_A_FILE: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV})


def slot_names(prefix: str, ranks: int) -> list[str]:
    """The stock backend's names, by rank."""
    return [f"{prefix}.rank_{rank}" for rank in range(ranks)]


def open_consumer_file(slots: Directory, name: str, flags: int) -> int | None:
    """A descriptor of a regular file in a slot directory, whoever owns it and whatever other names it has.

    For looking, and for erasing; None where the name is gone or is not a regular file of the directory's own device.
    """
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=slots.fd)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_dev == os.fstat(slots.fd).st_dev:
        return fd
    os.close(fd)
    return None


def walk_files(directory: Directory, uid: int, depth: int = _DEEPEST) -> Iterator[tuple[Directory, str]]:
    """Every name below a slot directory that is no directory, with the directory it is in; subdirectories first.

    A consumer may make subdirectories (vLLM's `fs` tier and LMCache do). No link is followed and no mount entered.
    Raises UnsafePath for a directory that is not the consumer's, or too deep: somebody else's hand.
    """
    for name in directory.names():
        info = directory.stat_if_there(name)
        if info is None:
            continue
        if not stat.S_ISDIR(info.st_mode):
            yield directory, name
        elif depth == 0:
            raise UnsafePath(
                f"more than {_DEEPEST} directories deep", obj=f"{directory.path}/{name}", remedy="look who made it"
            )
        else:
            with directory.child(name, owner_uid=uid) as below:
                yield from walk_files(below, uid, depth - 1)


def create(place: Directory, marker: Marker, *, uid: int, gid: int) -> list[int]:
    """Make and preallocate the slot files and the marker, give the directory to the consumer; the inode numbers by rank.

    Raises InsufficientSpace when the preallocation does not fit, ForeignData when a name is taken.
    """
    inodes = []
    with place.child(MOUNT_NAME, same_device=False) as root:
        with root.child(SLOTS_DIRECTORY) as slots:
            for name in marker.slot_files:
                fd = slots.create_file(name, 0o600)
                try:
                    files.preallocate(fd, marker.bytes_per_rank, path=f"{slots.path}/{name}")
                    os.fchown(fd, uid, gid)
                    os.fsync(fd)
                    inodes.append(os.fstat(fd).st_ino)
                finally:
                    os.close(fd)
            slots.fsync()
            slots.chown(uid, gid)
        root.write_file_atomic(MARKER_NAME, marker.to_bytes(), 0o444)
        root.fsync()
    return inodes


@dataclass
class SlotWatch:
    """The agent's descriptors of what lies in one slot directory. Only the volume's guardian holds one."""

    _uid: int
    _held: dict[tuple[int, int], int] = field(default_factory=dict)
    _directory: Directory | None = None

    @classmethod
    def open(cls, place: Directory, uid: int) -> Self:
        """Watch the volume at `place`, whose slot directory belongs to `uid`. Raises NotFound, UnsafePath."""
        watch = cls(uid)
        with place.child(MOUNT_NAME, same_device=False) as root:
            watch._directory = root.child(SLOTS_DIRECTORY, owner_uid=uid)
        watch.refresh()
        return watch

    def refresh(self) -> int:
        """Take a descriptor of every new file; erase and let go each unlinked file that nobody uses any more.

        Returns the number of unlinked files that were erased.
        """
        if self._directory is None:
            return 0
        for name in self._directory.names():
            info = self._directory.stat_if_there(name)
            if info is None or (info.st_dev, info.st_ino) in self._held:
                continue
            fd = open_consumer_file(self._directory, name, os.O_RDWR)
            if fd is None:
                continue
            opened = os.fstat(fd)
            if (opened.st_dev, opened.st_ino) in self._held:
                os.close(fd)
            else:
                self._held[(opened.st_dev, opened.st_ino)] = fd
        erased = 0
        for identity, fd in list(self._held.items()):
            info = os.fstat(fd)
            if info.st_nlink == 0 and lease.sole_holder(fd):
                if info.st_size:
                    files.punch_hole(fd, 0, info.st_size)
                os.close(fd)
                del self._held[identity]
                erased += 1
        return erased

    def holders(self) -> int:
        """How many files somebody else has open or mapped; a fork that inherited one counts. 0: nobody."""
        return sum(not lease.sole_holder(fd) for fd in self._held.values()) + self._holders_below()

    def _holders_below(self) -> int:
        """The same for files in subdirectories, which are too many to keep a descriptor of each."""
        if self._directory is None:
            return 0
        busy = 0
        for directory, name in walk_files(self._directory, self._uid):
            info = directory.stat_if_there(name)
            if info is None or (info.st_dev, info.st_ino) in self._held:
                continue
            fd = open_consumer_file(directory, name, os.O_RDWR)
            if fd is not None:
                busy += not lease.sole_holder(fd)
                os.close(fd)
        return busy

    def used_bytes(self) -> int:
        """Bytes allocated to the files, unlinked ones included."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._held.values())

    def close(self) -> None:
        """Let everything go: a descriptor of the agent's own must not keep a key or a mount alive."""
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        if self._directory is not None:
            self._directory.close()
            self._directory = None
