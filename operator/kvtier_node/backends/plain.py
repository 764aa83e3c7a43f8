"""Volumes without an image: slot files in a plain directory. What `HostAttested` and `SealOnly` have in common.

Nothing is mounted and no key is kvtier's, so an erasure works on the files: moved out of reach, read back, overwritten
where the backend asks for it, punched, removed. Whatever else lies in the volume (a stock engine's `*.rank_N`, `*.tmp`,
`.o_direct_probe*`) was put there by its consumer and goes the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.kernel import bounded, files
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.receipts import Step
from kvtier_node.sampling import BLOCK_BYTES, SampleResult
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = [
    "bytes_needed",
    "create_directories",
    "fence",
    "merge",
    "overwrite_slots",
    "read_back_slots",
    "remove_directories",
]

_LIMIT_S: Final = 60.0
_SLOWEST_BYTES_PER_S: Final = 20 << 20


def bytes_needed(slots_bytes: int) -> int:
    """Files in a directory of the tier's own file system: the slots and a little for names and extents."""
    return slots_bytes + (1 << 20)


def create_directories(place: Directory) -> None:
    """`mnt/slots`, closed to everybody but root until the slot files are in it."""
    with place.mkdir(MOUNT_NAME, 0o711) as root:
        root.mkdir(SLOTS_DIRECTORY, 0o700).close()


def each_file(place: Directory, request: VolumeRequest, visit: Callable[[str, int], None]) -> int:
    """Call `visit(path, fd)` for every regular file of the volume; return how many there were.

    A file with more than one name that kvtier did not make is left alone: it may be a link to something elsewhere.
    """
    count = 0
    with slot_directory(place, request) as slots:
        for directory, name in list_files(slots, request):
            fd = open_consumer_file(directory, name, os.O_RDWR)
            if fd is None:
                continue
            try:
                info = os.fstat(fd)
                if info.st_nlink == 1 or info.st_ino in request.own_inodes:
                    visit(f"{directory.path}/{name}", fd)
                    count += 1
            finally:
                os.close(fd)
    return count


@contextmanager
def slot_directory(place: Directory, request: VolumeRequest) -> Iterator[Directory | None]:
    """`<place>/mnt/slots`, or None where it is not there any more."""
    if MOUNT_NAME not in place.names():
        yield None
        return
    with place.child(MOUNT_NAME) as root:
        if SLOTS_DIRECTORY not in root.names():
            yield None
            return
        with root.child(SLOTS_DIRECTORY, owner_uid=request.uid) as slots:
            yield slots


def list_files(slots: Directory | None, request: VolumeRequest) -> Iterator[tuple[Directory, str]]:
    if slots is not None:
        yield from walk_files(slots, request.uid)


def fence(place: Directory, request: VolumeRequest) -> Step:
    """Take the slot directory from its consumer: root's, 0700. No new open by anybody but root succeeds."""
    with slot_directory(place, request) as slots:
        if slots is None:
            return Step("fence", True, "the volume was not there")
        slots.chown(os.geteuid(), os.getegid())
        slots.chmod(0o700)
    return Step("fence", True, "the slot directory is closed to its consumer")


def read_back_slots(place: Directory, request: VolumeRequest) -> tuple[SampleResult, int]:
    """Sample every file of the volume with the second reader; the sums, and the number of files."""
    results: list[SampleResult] = []

    def visit(_path: str, fd: int) -> None:
        size = os.fstat(fd).st_size // BLOCK_BYTES * BLOCK_BYTES
        if size:
            answer = bounded.call(
                "kvtier_node.children.reading:read_ranges", timeout_s=_LIMIT_S, fds={"file": fd}, ranges=[[0, size]]
            )
            results.append(SampleResult(**answer))

    count = each_file(place, request, visit)
    return merge(results), count


def merge(results: list[SampleResult]) -> SampleResult:
    """The sums of several samples."""
    return SampleResult(
        blocks=sum(result.blocks for result in results),
        empty=sum(result.empty for result in results),
        ciphertext=sum(result.ciphertext for result in results),
        plaintext=sum(result.plaintext for result in results),
        plaintext_at=[at for result in results for at in result.plaintext_at][:8],
        direct=all(result.direct for result in results),
    )


def overwrite_file(fd: int) -> int:
    """Overwrite one open file in a child with a limit by its size; the bytes written. Raises KernelError, OSError."""
    limit_s = _LIMIT_S + os.fstat(fd).st_size / _SLOWEST_BYTES_PER_S
    answer = bounded.call("kvtier_node.children.overwriting:overwrite", timeout_s=limit_s, fds={"file": fd})
    return int(answer["written"])


def overwrite_slots(place: Directory, request: VolumeRequest) -> Step:
    """Overwrite every file of the volume with random bytes. Raises KernelError when one cannot be."""
    total = 0

    def visit(_path: str, fd: int) -> None:
        nonlocal total
        total += overwrite_file(fd)

    count = each_file(place, request, visit)
    return Step("overwrite", True, f"{total} bytes of {count} files overwritten with random bytes, fdatasync done")


def remove_directories(place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
    """Punch and unlink every file, then remove `mnt`. A file that another process still holds stays punched."""
    punched = 0

    def visit(path: str, fd: int) -> None:
        nonlocal punched
        size = os.fstat(fd).st_size
        if discard and size:
            files.punch_hole(fd, 0, size)
            os.fdatasync(fd)
            if files.extents(fd, sync=True):
                raise KernelError("blocks are left after the punch", obj=path, remedy="kvtier tries again")
            punched += size

    count = each_file(place, request, visit)
    if MOUNT_NAME in place.names():
        with place.child(MOUNT_NAME) as root:
            root.remove_tree_contents()
        place.rmdir(MOUNT_NAME)
    place.fsync()
    steps = [Step("remove", True, f"{count} files and the directory removed")]
    if discard:
        steps.insert(0, Step("discard", True, f"{punched} bytes punched; no extent is left"))
    return steps
