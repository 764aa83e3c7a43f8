"""Volumes without an image: slot files in a plain directory. What `HostAttested` and `SealOnly` have in common.

Nothing is mounted and no key is kvtier's, so an erasure works on the files: moved out of reach, read back, overwritten
where the backend asks for it, punched, removed. Whatever else lies in the volume (a stock engine's `*.rank_N`, `*.tmp`,
`.o_direct_probe*`) was put there by its consumer and goes the same way.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier_api.errors import EraseIncomplete, KernelError, UnsafePath
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.file_batches import Batch, overwrite_files, places_of, read_files, still_held
from kvtier_node.kernel import constants, files, libc
from kvtier_node.kernel.refusal import shown
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.receipts import Step
from kvtier_node.sampling import BLOCK_BYTES, Range, SampleResult, end_of_file, joined, merge
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = [
    "bytes_needed",
    "create_directories",
    "fence",
    "overwrite_slots",
    "probe_files",
    "read_back_slots",
    "refuse_open",
    "remove_directories",
]

_DEEPEST: Final = 16
_MOST_MOVED: Final = 100_000
_LISTED: Final = 5
_LETS_GO_S: Final = 2.0
"""A measurement of `kvtier node`, or a backup, has a file open for an instant."""
_ASK_AGAIN_S: Final = 0.05
_BELOW: Final = (
    constants.RESOLVE_BENEATH
    | constants.RESOLVE_NO_SYMLINKS
    | constants.RESOLVE_NO_MAGICLINKS
    | constants.RESOLVE_NO_XDEV
)


def bytes_needed(slots_bytes: int) -> int:
    """Files in a directory of the tier's own file system: the slots and a little for names and extents."""
    return slots_bytes + (1 << 20)


def probe_files(tier: Directory) -> str | None:
    """Why slot files cannot be made, mapped and punched in the tier's directory, or None. Tried on a file without a name."""
    try:
        fd = os.open(tier.fd_path(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            libc.fallocate(fd, 0, 0, BLOCK_BYTES)
            files.extents(fd)
            files.punch_hole(fd, 0, BLOCK_BYTES)
        finally:
            os.close(fd)
    except OSError as error:
        return f"{files.filesystem_type(tier.fd)} lacks what slot files need: {error.strerror}"
    return None


def create_directories(place: Directory) -> None:
    """`mnt/slots`, closed to everybody but root until the slot files are in it."""
    with place.mkdir(MOUNT_NAME, 0o711) as root:
        root.mkdir(SLOTS_DIRECTORY, 0o700).close()


@contextmanager
def slot_directory(place: Directory) -> Iterator[Directory | None]:
    """`<place>/mnt/slots`, whatever its owner made of its mode, or None where it is not there any more."""
    if MOUNT_NAME not in place.names():
        yield None
        return
    with place.child(MOUNT_NAME) as root:
        if SLOTS_DIRECTORY not in root.names():
            yield None
            return
        with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
            yield slots


@dataclass
class Visited:
    """How many files were visited, and the paths of those that were left alone: they have names elsewhere too."""

    count: int = 0
    elsewhere: list[str] = field(default_factory=list)


def each_file(
    place: Directory,
    request: VolumeRequest,
    work: Callable[[Sequence[tuple[str, int]]], None],
    *,
    weigh: Callable[[int], int] = lambda _: 0,
) -> Visited:
    """Call `work` with every regular file of the volume, once each, as paths and descriptors in batches (`Batch`).

    A file that kvtier did not make, and that has a name outside the volume, is left alone and listed: what lies there may
    be anybody's. Raises Busy while another process holds a lease on one.
    """
    visited = Visited()
    seen: set[int] = set()
    with slot_directory(place) as slots:
        if slots is None:
            return visited
        names = Counter(
            info.st_ino
            for directory, name in walk_files(slots)
            if (info := directory.stat_if_there(name)) is not None and stat.S_ISREG(info.st_mode) and info.st_nlink > 1
        )
        with Batch(work, weigh=weigh) as batch:
            for directory, name in walk_files(slots):
                fd = open_consumer_file(directory, name, os.O_RDWR)
                if fd is None:
                    continue
                path = f"{directory.path}/{name}"
                info = os.fstat(fd)
                ours = info.st_nlink <= max(1, names[info.st_ino]) or info.st_ino in request.own_inodes
                if info.st_ino in seen or not ours:
                    os.close(fd)
                    if not ours:
                        visited.elsewhere.append(path)
                    continue
                seen.add(info.st_ino)
                visited.count += 1
                batch.add(path, fd)
    return visited


def fence(place: Directory, request: VolumeRequest) -> Step:
    """Take the slot directory from its consumer: root's, 0700. No new open by anybody but root succeeds.

    What the consumer did to modes, to attributes (immutable, append-only) and to the depth of the tree is undone: none of it
    may keep a file from being erased.
    """
    with slot_directory(place) as slots:
        if slots is None:
            return Step("fence", True, "the volume was not there")
        files.clear_protection(slots.fd)
        slots.chown(os.geteuid(), os.getegid())
        slots.chmod(0o700)
        moved = 0
        while (found := _open_up(slots, slots, request, moved)) > moved:
            moved = found
    return Step("fence", True, "the slot directory is closed to its consumer")


def refuse_open(place: Directory, request: VolumeRequest) -> None:
    """Behind the fence nobody opens a file any more; raise EraseIncomplete while another process still has one open.

    It could go on writing into what was overwritten, and be seen by no look before: too deep in the tree, or where the
    guardian had no descriptors to look with.
    """

    until = time.monotonic() + _LETS_GO_S

    def ask(opened: Sequence[tuple[str, int]]) -> None:
        while held := still_held(opened):
            if time.monotonic() < until:
                time.sleep(_ASK_AGAIN_S)
                continue
            raise EraseIncomplete(
                "another process has it open or mapped, and could go on writing",
                obj=shown(held[0]),
                remedy="end the processes that hold it (lsof +D, or fuser); kvtier tries again by itself",
            )

    each_file(place, request, ask)


def _open_up(top: Directory, directory: Directory, request: VolumeRequest, moved: int, depth: int = 0) -> int:
    """Make everything below writable by us; move what is too deep up to `top`. How many directories were moved so far."""
    for name in directory.names():
        info = directory.stat_if_there(name)
        if info is None:
            continue
        if stat.S_ISREG(info.st_mode):
            if info.st_nlink == 1 or info.st_ino in request.own_inodes:
                _unprotect(directory, name, os.O_RDONLY, 0o600)
        elif stat.S_ISDIR(info.st_mode):
            if depth >= _DEEPEST:
                if moved >= _MOST_MOVED:
                    raise UnsafePath("too many levels", obj=shown(directory.path), remedy="look who made it, remove it")
                os.rename(name, f"kvtier-{secrets.token_hex(8)}", src_dir_fd=directory.fd, dst_dir_fd=top.fd)
                moved += 1
                continue
            fd = _unprotect(directory, name, os.O_RDONLY | os.O_DIRECTORY, 0o700, keep=True)
            if fd is not None:
                with Directory(fd, f"{directory.path}/{name}") as below:
                    below.chown(os.geteuid(), os.getegid())  # or who stands in it goes on making files
                    below.chmod(0o700)
                    moved = _open_up(top, below, request, moved, depth + 1)
    return moved


def _unprotect(directory: Directory, name: str, flags: int, mode: int, *, keep: bool = False) -> int | None:
    """Give one entry `mode`, and take its protecting attributes away; its descriptor, with `keep`. None: a mount, or gone."""
    try:
        found = libc.openat2(directory.fd, name, os.O_PATH | os.O_NOFOLLOW, 0, _BELOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.EXDEV:
            return None
        raise
    try:
        path = f"/proc/self/fd/{found}"
        if os.fstat(found).st_uid == os.geteuid() and os.geteuid() != 0:
            os.chmod(path, mode)  # root needs no mode, and an immutable file takes none
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:
        return None  # a lease on it: the visit of the file says so
    finally:
        os.close(found)
    files.clear_protection(fd)
    if keep:
        return fd
    os.close(fd)
    return None


def written_ranges(fd: int) -> list[Range]:
    """Whole blocks of the file that were ever written, by the file system's own map; preallocated ones were not."""
    whole = os.fstat(fd).st_size // BLOCK_BYTES * BLOCK_BYTES
    found = []
    for part in files.extents(fd, sync=True):
        if part.flags & constants.FIEMAP_EXTENT_UNWRITTEN:
            continue
        begin = part.logical // BLOCK_BYTES * BLOCK_BYTES
        end = min(-(-(part.logical + part.length) // BLOCK_BYTES) * BLOCK_BYTES, whole)
        if end > begin:
            found.append(Range(begin, end - begin))
    return joined(found)


def read_back_slots(place: Directory, request: VolumeRequest, *, overwritten: bool = False) -> tuple[SampleResult, int]:
    """Sample the written parts of every file of the volume with the second reader; the sums, and the number of files.

    Once the files were `overwritten`, nothing can be said of ends within a block (`sampling.end_of_file`).
    """
    results: list[SampleResult] = []
    ranges: dict[int, list[Range]] = {}

    def weigh(fd: int) -> int:
        ranges[fd] = written_ranges(fd)
        return places_of(ranges[fd])

    def read(opened: Sequence[tuple[str, int]]) -> None:
        results.extend(read_files(opened, ranges))
        for _, fd in opened:
            results.append(end_of_file(fd, overwritten=overwritten))

    visited = each_file(place, request, read, weigh=weigh)
    return merge(results), visited.count


def overwrite_file(fd: int) -> int:
    """Overwrite one open file in a child with a limit by its size; the bytes written. Raises KernelError, OSError."""
    return overwrite_files([(f"descriptor {fd}", fd)])


def overwrite_slots(place: Directory, request: VolumeRequest) -> Step:
    """Overwrite every file of the volume with random bytes. Raises KernelError when one cannot be."""
    total = 0

    def overwrite(opened: Sequence[tuple[str, int]]) -> None:
        nonlocal total
        total += overwrite_files(opened)

    visited = each_file(place, request, overwrite)
    if visited.count == 0:
        return Step("overwrite", None, "no file was there to overwrite")
    return Step(
        "overwrite", True, f"{total} bytes of {visited.count} files overwritten with random bytes, fdatasync done"
    )


def remove_directories(place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
    """Give back the blocks of every file and unlink it, then remove `mnt`. One that another process holds stays empty."""
    freed = 0

    def give_back(opened: Sequence[tuple[str, int]]) -> None:
        nonlocal freed
        if not discard:
            return
        for _, fd in opened:
            freed += os.fstat(fd).st_blocks * 512
            os.ftruncate(fd, 0)  # a punch leaves what lies beyond the size, and half of a last block
        for path, fd in opened:  # only now: the first one waits for the journal, and the others are in it
            os.fdatasync(fd)
            if files.extents(fd, sync=True):
                raise KernelError("blocks are left after the discard", obj=shown(path), remedy="kvtier tries again")

    visited = each_file(place, request, give_back)
    if MOUNT_NAME in place.names():
        with place.child(MOUNT_NAME) as root:
            root.remove_tree_contents()
        place.rmdir(MOUNT_NAME)
    place.fsync()
    steps = []
    if discard and visited.count:
        steps.append(Step("discard", True, f"{freed} bytes given back; no extent is left"))
    elif discard:
        steps.append(Step("discard", None, "no file was there to give blocks back"))
    steps.append(Step("remove", True, f"{visited.count} files and the directory removed"))
    if visited.elsewhere:
        listed = ", ".join(shown(path) for path in visited.elsewhere[:_LISTED])
        steps.append(
            Step(
                "linked-elsewhere",
                None,
                f"{len(visited.elsewhere)} file(s) that the consumer linked have names outside the volume, where their bytes"
                f" were not touched: {listed}",
            )
        )
    return steps
