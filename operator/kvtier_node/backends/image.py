"""The backing image of a volume, its loop device, and the ext4 in it: what `Fscrypt` and `DmCrypt` have in common.

The image is preallocated (its size is the hard quota, and there is no ENOSPC at run time) and attached by inode,
never by path. ext4 has no journal here: a journal would keep copies, and the file system never outlives its key.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvtier_api.errors import Busy, EraseIncomplete, ForeignData, KernelError, UnsafePath
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.backends.plain import overwrite_file
from kvtier_node.kernel import bounded, constants, files, loop, mounts
from kvtier_node.kernel.files import FileIdentity
from kvtier_node.paths import Directory
from kvtier_node.places import IMAGE_NAME, MOUNT_NAME
from kvtier_node.receipts import Step
from kvtier_node.sampling import Range, SampleResult, joined
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = [
    "attached",
    "bytes_needed",
    "create_image",
    "detach_all",
    "devices_of",
    "discard_image",
    "make_file_system",
    "mount_volume",
    "mounted_root",
    "open_image",
    "read_back",
    "read_back_file",
    "release_image",
    "remove_image",
    "slot_ranges",
    "unmount_volume",
]

MIB: Final = 1 << 20
_NO_ADDRESS: Final = (
    constants.FIEMAP_EXTENT_UNKNOWN | constants.FIEMAP_EXTENT_DELALLOC | constants.FIEMAP_EXTENT_DATA_INLINE
)
_LIMIT_S: Final = 60.0
_DISCARD_TRIES: Final = 5
_DISCARD_PAUSE_S: Final = 0.1


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


def open_image(place: Directory, request: VolumeRequest, flags: int = os.O_RDWR) -> int | None:
    """A descriptor of `volume.img`, or None where there is none. Raises ForeignData for another file under its name."""
    if IMAGE_NAME not in place.names():
        return None
    fd = place.open_file(IMAGE_NAME, flags)
    # Numbers of devices may change at a restart; the image was made on the place's own.
    info, made_as = os.fstat(fd), request.image and request.image.inode
    if made_as in (None, info.st_ino) and info.st_dev == os.fstat(place.fd).st_dev:
        return fd
    os.close(fd)
    raise ForeignData(
        f"another file has the image's name: inode {info.st_ino}, not {made_as}",
        obj=f"{place.path}/{IMAGE_NAME}",
        remedy="look whose it is, and move it away; kvtier touches nothing of it",
    )


def attached(image_fd: int) -> list[loop.LoopDevice]:
    """The loop devices on this inode, whatever path they were made by."""
    info = os.fstat(image_fd)
    return loop.find_by_backing(info.st_dev, info.st_ino)


def devices_of(place: Directory, request: VolumeRequest) -> list[loop.LoopDevice]:
    """The volume's loop devices, also where its image has lost its name, or has another one beside it.

    An inode number alone proves nothing once the file is gone: another file may have it. Then the name under which the
    kernel attached the image must be the place's own, or end like it: when the container that attached it was replaced, the
    kernel's path begins where that container's mount did (ANOLISA#2965), and the volume's id is in it still. Raises
    EraseIncomplete where that can't be told.
    """
    try:
        fd = open_image(place, request, os.O_RDONLY)
    except (UnsafePath, ForeignData):
        fd = None  # a second name, another owner, another file: it is the record that counts
    if fd is not None:
        try:
            return attached(fd)
        finally:
            os.close(fd)
    if request.image is None:
        return []
    own = f"{place.path}/{IMAGE_NAME}"
    own_end = f"/{os.path.basename(place.path)}/{IMAGE_NAME}"
    found = []
    for device in loop.find_by_backing(request.image.device, request.image.inode):
        backing = loop.backing_path(device)
        if backing is not None and backing.removesuffix(" (deleted)").endswith(own_end):
            found.append(device)
        elif backing is not None and not _is_another_file(backing, request.image):
            raise EraseIncomplete(
                f"the image is gone, and {device.path} may hold it under another name: {backing}",
                obj=own,
                remedy=f"look what it is (losetup -l); detach it if it is this volume's (losetup -d {device.path})",
            )
    return found


def _is_another_file(path: str, made: FileIdentity) -> bool:
    """Whether the file at `path` has the image's number by now, and is proven not to be the image itself."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # another namespace's path, or the file lost its name, too: nothing is proven
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or (info.st_dev, info.st_ino) != (made.device, made.inode):
            return False  # that name leads elsewhere by now
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return made.excludes(readable)
    finally:
        os.close(readable)


def detach_all(devices: Sequence[loop.LoopDevice]) -> list[Step]:
    """Detach the loop devices. One that is still held goes when its last user does; that is said."""
    held = [device.path for device in devices if not loop.detach(device)]
    if held:
        names = ", ".join(held)
        return [
            Step(
                "loop-detach", None, f"{names} is still held by a mount elsewhere; the kernel frees it with that mount"
            )
        ]
    return [Step("loop-detach", True, "no loop device has the image")]


def make_file_system(device: str, *, features: str) -> None:
    """ext4 without a journal on `device`. Lazily initialised tables, so that the time does not grow with the size."""
    bounded.run_tool(
        ["mkfs.ext4", "-q", "-F", "-b", "4096", "-O", features, "-m", "0", "-N", "16384", "-T", "largefile4", "-L", "kvtier",
         "-E", "nodiscard,lazy_itable_init=1,root_owner=0:0", device],
        timeout_s=_LIMIT_S,
    )  # fmt: skip


def mount_volume(place: Directory, device: str) -> None:
    """Mount `device` on `<place>/mnt` (nodev, nosuid, noexec, noatime). Raises KernelError."""
    with place.child(MOUNT_NAME) as target:
        try:
            bounded.call(
                "kvtier_node.children.mounting:mount", timeout_s=_LIMIT_S, fds={"target": target.fd}, source=device
            )
        except OSError as error:
            raise KernelError(
                f"the new file system cannot be mounted: {error.strerror}",
                obj=f"{device} on {target.path}",
                remedy="see the kernel log: a disk that loses writes, most likely",
            ) from error


@contextmanager
def mounted_root(place: Directory) -> Iterator[Directory | None]:
    """The root of what is mounted on `<place>/mnt`, or None while it is a plain directory or absent."""
    if MOUNT_NAME not in place.names():
        yield None
        return
    with place.child(MOUNT_NAME, same_device=False, any_owner=True) as root:
        yield root if root.is_mount_point() else None


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
    """Mounts of the device in other mount namespaces: a leaked one keeps the file system alive, not the key."""
    return [f"pid {pid}: {point}" for pid, point in mounts.mounts_elsewhere(device)]


def slot_ranges(root: Directory) -> list[Range]:
    """Where the slot files lie in the image, from the file system's own extent map, first to last address.

    Preallocated extents do not move. Without FIEMAP_FLAG_SYNC: nothing is written back for the sake of an erasure. What
    has no address yet (delayed allocation, data in the inode) is left out.
    """
    found = []
    with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
        for directory, name in walk_files(slots):
            try:
                fd = open_consumer_file(directory, name, os.O_RDONLY)
            except (Busy, OSError):
                continue  # the areas of the slot files are on record; this only adds to them
            if fd is not None:
                try:
                    extents = files.extents(fd, sync=False)
                finally:
                    os.close(fd)
                found += [Range(part.physical, part.length) for part in extents if not part.flags & _NO_ADDRESS]
    return joined(found)


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
    if not ranges:
        return [Step("read-back", None, "where the slot files lay is not known any more")]
    result = read_back_file(fd, ranges)
    steps = [Step("read-back", result.clean, result.sentence())]
    if result.plaintext:
        written = overwrite_file(fd)
        again = read_back_file(fd, ranges)
        steps.append(Step("overwrite", True, f"{written} bytes overwritten with random bytes, fdatasync done"))
        steps.append(Step("read-back-after-overwrite", again.clean, again.sentence()))
    return steps


def discard_image(image_fd: int) -> Step:
    """Give every block of the image back and read the result. Raises EraseIncomplete unless all of it is zeros.

    A mount namespace that was copied a moment ago (a container that starts) keeps the file system for as long as its copy
    lives, and its end writes the superblock once more: so this is done again a few times.
    """
    size = os.fstat(image_fd).st_size
    if size == 0:  # a crash came between its creation and its preallocation
        return Step("discard", True, "the image was never given a byte")
    for attempt in range(_DISCARD_TRIES):
        time.sleep(_DISCARD_PAUSE_S * attempt)
        files.punch_hole(image_fd, 0, size)
        os.fdatasync(image_fd)
        result = read_back_file(image_fd, [Range(0, size)])
        if result.empty == result.blocks:
            return Step("discard", True, f"punched {size} bytes; {result.sentence()}")
    raise EraseIncomplete(
        f"the image is not all zeros after the discard: {result.sentence()}",
        obj=IMAGE_NAME,
        remedy="kvtier tries again by itself; see the kernel log",
    )


def release_image(place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
    """Discard the image, detach its loop devices, remove it and the mount point; `place.json` stays."""
    steps = []
    devices = devices_of(place, request)
    fd = open_image(place, request)
    if fd is not None:
        try:
            if discard:
                steps.append(discard_image(fd))
        finally:
            os.close(fd)
    steps += detach_all(devices)
    steps.append(remove_image(place))
    return steps


def remove_image(place: Directory) -> Step:
    """Remove `volume.img` and `mnt`; `place.json` stays until the erasure is on record."""
    for name in place.names():
        if name == IMAGE_NAME:
            place.unlink(name)
        elif name == MOUNT_NAME:
            place.rmdir(name)
    place.fsync()
    return Step("remove", True, "image and mount point removed")
