"""The backing image of a volume, its loop device, and the ext4 in it: what `Fscrypt` and `DmCrypt` have in common.

The image is preallocated (its size is the hard quota, and there is no ENOSPC at run time) and attached by inode,
never by path. ext4 has no journal here: a journal would keep copies, and the file system never outlives its key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.backends.plain import overwrite_file
from kvtier_node.kernel import bounded, files, loop, mounts
from kvtier_node.paths import Directory
from kvtier_node.places import IMAGE_NAME, MOUNT_NAME
from kvtier_node.receipts import Step
from kvtier_node.sampling import Range, SampleResult
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = [
    "attached",
    "bytes_needed",
    "create_image",
    "detach_all",
    "discard_image",
    "make_file_system",
    "mount_volume",
    "mounted_root",
    "open_image",
    "read_back",
    "read_back_file",
    "remove_image",
    "slot_ranges",
    "unmount_volume",
]

MIB: Final = 1 << 20
_LIMIT_S: Final = 60.0


def bytes_needed(slots_bytes: int) -> int:
    """Image size for slot files of `slots_bytes` in all: ext4's own metadata and reserve come on top."""
    overhead = 32 * MIB + slots_bytes // 512
    return -(-(slots_bytes + overhead) // MIB) * MIB


def create_image(place: Directory, size_bytes: int) -> int:
    """Create and preallocate `volume.img`; return its descriptor. Raises InsufficientSpace, ForeignData."""
    fd = place.create_file(IMAGE_NAME, 0o600)
    try:
        files.preallocate(fd, size_bytes, path=f"{place.path}/{IMAGE_NAME}")
        os.fsync(fd)
        place.fsync()
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_image(place: Directory, flags: int = os.O_RDWR) -> int | None:
    """A descriptor of `volume.img`, or None where there is none."""
    if IMAGE_NAME not in place.names():
        return None
    return place.open_file(IMAGE_NAME, flags)


def attached(image_fd: int) -> list[loop.LoopDevice]:
    """The loop devices on this inode, whatever path they were made by."""
    info = os.fstat(image_fd)
    return loop.find_by_backing(info.st_dev, info.st_ino)


def detach_all(image_fd: int) -> list[Step]:
    """Detach every loop device of the image. One that is still held goes when its last user does; that is said."""
    steps = []
    for device in attached(image_fd):
        loop.detach(device)
    left = attached(image_fd)
    if left:
        names = ", ".join(device.path for device in left)
        steps.append(
            Step(
                "loop-detach", None, f"{names} is still held by a mount elsewhere; the kernel frees it with that mount"
            )
        )
    else:
        steps.append(Step("loop-detach", True, "no loop device has the image"))
    return steps


def make_file_system(device: str, *, features: str) -> None:
    """ext4 without a journal on `device`. Lazily initialised tables, so that the time does not grow with the size."""
    bounded.run_tool(
        ["mkfs.ext4", "-q", "-F", "-O", features, "-m", "0", "-N", "128", "-T", "largefile4", "-L", "kvtier",
         "-E", "nodiscard,lazy_itable_init=1,root_owner=0:0", device],
        timeout_s=_LIMIT_S,
    )  # fmt: skip


def mount_volume(place: Directory, device: str) -> None:
    """Mount `device` on `<place>/mnt` (nodev, nosuid, noexec, noatime)."""
    with place.child(MOUNT_NAME) as target:
        bounded.call(
            "kvtier_node.children.mounting:mount", timeout_s=_LIMIT_S, fds={"target": target.fd}, source=device
        )


@contextmanager
def mounted_root(place: Directory) -> Iterator[Directory | None]:
    """The root of what is mounted on `<place>/mnt`, or None while it is a plain directory or absent."""
    if MOUNT_NAME not in place.names():
        yield None
        return
    with place.child(MOUNT_NAME, same_device=False) as root:
        if os.fstat(root.fd).st_dev == os.fstat(place.fd).st_dev:
            yield None
        else:
            yield root


def unmount_volume(place: Directory) -> Step:
    """Take everything off `<place>/mnt`, so that no path leads there any more. Raises KernelError."""
    count = 0
    while True:
        with mounted_root(place) as root:
            if root is None:
                break
            bounded.call("kvtier_node.children.mounting:unmount", timeout_s=_LIMIT_S, fds={"root": root.fd})
        count += 1
        if count > 16:
            raise KernelError(
                "still mounted after 16 unmounts", obj=f"{place.path}/{MOUNT_NAME}", remedy="see who mounts there"
            )
    return Step("fence", True, f"unmounted {count} time(s)" if count else "nothing was mounted")


def leaked_mounts(device: int) -> list[str]:
    """Mounts of the device in any mount namespace, as `pid:path`: a leaked one keeps the file system alive, not the key."""
    return [f"pid {pid}: {point}" for pid, point in mounts.mounts_elsewhere(device)]


def slot_ranges(root: Directory, request: VolumeRequest) -> list[Range]:
    """Where the slot files lie in the image, from the file system's own extent map, first to last address.

    Preallocated extents do not move. Without FIEMAP_FLAG_SYNC: nothing is written back for the sake of an erasure.
    """
    found = []
    with root.child(SLOTS_DIRECTORY, owner_uid=request.uid) as slots:
        for directory, name in walk_files(slots, request.uid):
            fd = open_consumer_file(directory, name, os.O_RDONLY)
            if fd is not None:
                found += [Range(part.physical, part.length) for part in files.extents(fd, sync=False)]
                os.close(fd)
    return joined(found)


def joined(ranges: list[Range]) -> list[Range]:
    """The same bytes in as few ranges as can be, in order, none twice."""
    result: list[Range] = []
    for part in sorted(ranges, key=lambda part: part.offset):
        if result and part.offset <= result[-1].offset + result[-1].length:
            last = result.pop()
            end = max(last.offset + last.length, part.offset + part.length)
            result.append(Range(last.offset, end - last.offset))
        else:
            result.append(part)
    return result


def read_back_file(fd: int, ranges: Sequence[Range]) -> SampleResult:
    """Sample `ranges` of the file or device `fd` in a reader of its own."""
    answer = bounded.call(
        "kvtier_node.children.reading:read_ranges",
        timeout_s=_LIMIT_S,
        fds={"file": fd},
        ranges=[[part.offset, part.length] for part in ranges],
    )
    return SampleResult(**answer)


def read_back(fd: int, ranges: Sequence[Range]) -> list[Step]:
    """Sample `ranges` raw. Plaintext in them would mean that encryption failed: then all of it is overwritten as well."""
    result = read_back_file(fd, ranges)
    steps = [Step("read-back", result.plaintext == 0, result.sentence())]
    if result.plaintext:
        written = overwrite_file(fd)
        again = read_back_file(fd, ranges)
        steps.append(Step("overwrite", True, f"{written} bytes overwritten with random bytes, fdatasync done"))
        steps.append(Step("read-back-after-overwrite", again.plaintext == 0, again.sentence()))
    return steps


def discard_image(image_fd: int) -> Step:
    """Give every block of the image back and read the result: all of it must be zeros."""
    size = os.fstat(image_fd).st_size
    files.punch_hole(image_fd, 0, size)
    os.fdatasync(image_fd)
    result = read_back_file(image_fd, [Range(0, size)])
    return Step("discard", result.empty == result.blocks, f"punched {size} bytes; {result.sentence()}")


def remove_image(place: Directory) -> Step:
    """Remove `volume.img` and `mnt`; `place.json` stays until the erasure is on record."""
    for name in place.names():
        if name == IMAGE_NAME:
            place.unlink(name)
        elif name == MOUNT_NAME:
            place.rmdir(name)
    place.fsync()
    return Step("remove", True, "image and mount point removed")
