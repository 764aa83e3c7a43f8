"""Slot files: made and preallocated per rank, and watched by a descriptor of the agent's own.

The names are the stock backend's (`<prefix>.rank_<N>`). The agent keeps one descriptor to each file of the slot directory, so
that an unlink by the next process frees nothing before it is erased, and so that the kernel can answer whether anybody
else has it open (`kernel.lease`). Who the consumer is, and what its end means, is left to `consumers` and `lifecycle`.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from kvtier_api.errors import Busy
from kvtier_api.marker import MARKER_NAME, SLOTS_DIRECTORY, Marker
from kvtier_node.file_batches import Batch, overwrite_files
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import files, lease, libc
from kvtier_node.kernel.refusal import shown
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME

__all__ = ["SlotWatch", "create", "enter", "open_consumer_file", "slot_names", "walk_files"]

_DEEPEST: Final = 32
_MOST_HELD: Final = 1280
"""Descriptors that one watch keeps: those of 1024 ranks, and some of what a consumer made beside them."""
_held_by_all: Final[set[int]] = set()
"""Descriptors that the watches of this process keep. Beyond half of what it may have, files are looked at one by one."""
_BELOW: Final = c.RESOLVE_BENEATH | c.RESOLVE_NO_SYMLINKS | c.RESOLVE_NO_MAGICLINKS | c.RESOLVE_NO_XDEV
_NOT_THERE: Final = frozenset({errno.ENOENT, errno.ELOOP, errno.EXDEV, errno.ENOTDIR})
_ONLY_READABLE: Final = frozenset({errno.EPERM, errno.EACCES, errno.ETXTBSY})


def slot_names(prefix: str, ranks: int) -> list[str]:
    """The stock backend's names, by rank."""
    return [f"{prefix}.rank_{rank}" for rank in range(ranks)]


def open_consumer_file(slots: Directory, name: str, flags: int) -> int | None:
    """A descriptor of a regular file in a slot directory, whoever owns it and whatever other names it has.

    For looking, and for erasing; None where the name is gone or is not a regular file of the directory's own device.
    What it is, is looked at before it is opened: a FIFO does not block, a device notices nothing. Raises Busy where
    another process holds a lease on it, OSError.
    """
    try:
        found = libc.openat2(slots.fd, name, os.O_PATH | os.O_NOFOLLOW, 0, _BELOW)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    try:
        info = os.fstat(found)
        if not stat.S_ISREG(info.st_mode) or info.st_dev != os.fstat(slots.fd).st_dev:
            return None
        return _reopen(found, info, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except BlockingIOError as error:
        raise Busy(
            "another process holds a lease on it",
            obj=shown(f"{slots.path}/{name}"),
            remedy="end that process: see /proc/locks",
        ) from error
    except OSError as error:
        if error.errno == errno.ENOKEY:
            return None  # encrypted, and its key is gone: nobody opens it any more
        raise
    finally:
        os.close(found)


def enter(directory: Directory, name: str) -> Directory | None:
    """A directory of the consumer's making, whatever its name, owner or mode; None for what is none, or is a mount."""
    try:
        found = libc.openat2(directory.fd, name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, 0, _BELOW)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    try:
        fd = _reopen(found, os.fstat(found), os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(found)
    return Directory(fd, f"{directory.path}/{name}")


def _reopen(found: int, info: os.stat_result, flags: int) -> int:
    """Open what an O_PATH descriptor has. Without root, a mode of our own user's making is no reason not to look."""
    path = f"/proc/self/fd/{found}"
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except PermissionError:
        if info.st_uid != os.geteuid() or info.st_mode & stat.S_IRWXU == stat.S_IRWXU:
            raise
    os.chmod(path, stat.S_IMODE(info.st_mode) | stat.S_IRWXU)
    return os.open(path, flags | os.O_CLOEXEC)


def walk_files(directory: Directory, depth: int = _DEEPEST) -> Iterator[tuple[Directory, str]]:
    """Every name below a slot directory that is no directory, with the directory it is in; `depth` levels deep.

    A consumer may make subdirectories (vLLM's `fs` tier and LMCache do), with any name, owner and mode: none of it may
    keep its bytes from being erased. No link is followed and no mount entered.
    """
    for name in directory.names():
        info = directory.stat_if_there(name)
        if info is None:
            continue
        if not stat.S_ISDIR(info.st_mode):
            yield directory, name
        elif depth > 0:
            below = enter(directory, name)
            if below is not None:
                with below:
                    yield from walk_files(below, depth - 1)


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

    overwrite: bool = False
    """An unlinked file is overwritten before it is let go: the volume has no key of kvtier's to destroy."""
    _held: dict[tuple[int, int], int] = field(default_factory=dict)
    _directory: Directory | None = None

    @classmethod
    def open(cls, place: Directory, *, overwrite: bool) -> Self:
        """Watch the volume at `place`. Raises NotFound, UnsafePath (the directories above the slots)."""
        watch = cls(overwrite)
        with place.child(MOUNT_NAME, same_device=False) as root:
            # Its owner is the consumer, who may have set any mode.
            watch._directory = root.child(SLOTS_DIRECTORY, any_owner=True)
        try:
            watch.refresh()
        except BaseException:
            watch.close()
            raise
        return watch

    def refresh(self) -> int:
        """Take a descriptor of every new file; erase and let go each unlinked file that nobody uses any more.

        Returns the number of unlinked files that were erased.
        """
        if self._directory is None:
            return 0
        for name in self._directory.names():
            info = self._directory.stat_if_there(name)
            if info is None or not stat.S_ISREG(info.st_mode) or (info.st_dev, info.st_ino) in self._held:
                continue
            if len(self._held) >= _MOST_HELD or len(_held_by_all) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
                break
            self._take(self._directory, name)
        free = {
            identity: fd for identity, fd in self._held.items() if os.fstat(fd).st_nlink == 0 and lease.sole_holder(fd)
        }
        with Batch(self._let_go) as batch:
            for fd in free.values():
                if os.fstat(fd).st_blocks:
                    batch.add("an unlinked file", os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        for identity, fd in free.items():
            del self._held[identity]
            _release(fd)
        return len(free)

    def _let_go(self, unlinked: Sequence[tuple[str, int]]) -> None:
        """Erase files that have no name any more, through descriptors that may write."""
        if self.overwrite:
            overwrite_files(unlinked)
        for _, fd in unlinked:
            os.ftruncate(fd, 0)

    def _take(self, directory: Directory, name: str) -> None:
        try:
            fd = _open_to_look(directory, name)
        except Busy:
            return  # a lease of the consumer's own: tried again at the next look
        if fd is None:
            return
        opened = os.fstat(fd)
        if (opened.st_dev, opened.st_ino) in self._held:
            os.close(fd)
        else:
            self._held[(opened.st_dev, opened.st_ino)] = fd
            _held_by_all.add(fd)

    def holders(self) -> int:
        """How many files somebody else has open or mapped; a fork that inherited one counts. 0: nobody."""
        return sum(not lease.sole_holder(fd) for fd in self._held.values()) + self._holders_of_others()

    def _holders_of_others(self) -> int:
        """The same for files of which no descriptor is kept: those in subdirectories, and those beyond the limit."""
        if self._directory is None:
            return 0
        busy = 0
        for directory, name in walk_files(self._directory):
            info = directory.stat_if_there(name)
            if info is None or (info.st_dev, info.st_ino) in self._held:
                continue
            try:
                fd = _open_to_look(directory, name)
            except Busy:
                busy += 1
                continue
            if fd is not None:
                try:
                    busy += not lease.sole_holder(fd)
                finally:
                    os.close(fd)
        return busy

    def used_bytes(self) -> int:
        """Bytes allocated to the files, unlinked ones included."""
        return sum(os.fstat(fd).st_blocks * 512 for fd in self._held.values())

    def close(self) -> None:
        """Let everything go: a descriptor of the agent's own must not keep a key or a mount alive."""
        for fd in self._held.values():
            _release(fd)
        self._held.clear()
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _release(fd: int) -> None:
    _held_by_all.discard(fd)
    os.close(fd)


def _open_to_look(directory: Directory, name: str) -> int | None:
    """For writing where that is allowed (a lease wants no more than a descriptor; erasing does)."""
    try:
        return open_consumer_file(directory, name, os.O_RDWR)
    except OSError as error:
        if error.errno not in _ONLY_READABLE:  # immutable, append-only, or executed just now
            raise
    return open_consumer_file(directory, name, os.O_RDONLY)
