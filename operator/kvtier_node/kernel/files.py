"""What the kernel knows of one open file: its blocks, its file system, its cached pages, its immutable bit.

By descriptor only. Where a file may lie, and who may own it, is `kvtier_node.paths`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import InsufficientSpace, KernelError
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc, mounts

__all__ = [
    "Extent",
    "FileIdentity",
    "clear_protection",
    "drop_cached_pages",
    "extents",
    "filesystem_type",
    "free_bytes",
    "has_attribute",
    "preallocate",
    "punch_hole",
    "set_immutable",
]

_EXTENTS_PER_CALL: Final = 512


@dataclass(frozen=True, slots=True)
class Extent:
    """One run of blocks (FIEMAP). Bytes; `physical` counts from the start of the file system's device."""

    logical: int
    physical: int
    length: int
    flags: int


class _FiemapExtent(ctypes.Structure):
    _fields_ = [
        ("fe_logical", ctypes.c_uint64),
        ("fe_physical", ctypes.c_uint64),
        ("fe_length", ctypes.c_uint64),
        ("fe_reserved64", ctypes.c_uint64 * 2),
        ("fe_flags", ctypes.c_uint32),
        ("fe_reserved", ctypes.c_uint32 * 3),
    ]


class _Fiemap(ctypes.Structure):
    _fields_ = [
        ("fm_start", ctypes.c_uint64),
        ("fm_length", ctypes.c_uint64),
        ("fm_flags", ctypes.c_uint32),
        ("fm_mapped_extents", ctypes.c_uint32),
        ("fm_extent_count", ctypes.c_uint32),
        ("fm_reserved", ctypes.c_uint32),
        ("fm_extents", _FiemapExtent * _EXTENTS_PER_CALL),
    ]


def preallocate(fd: int, size_bytes: int, *, path: str) -> None:
    """Give the file `size_bytes` of blocks now (fallocate mode 0), so that no later write meets ENOSPC.

    `path` is for messages. Raises InsufficientSpace with both numbers, and nothing is kept allocated then; KernelError
    where fallocate is not supported.
    """
    before = os.fstat(fd)
    # Asked first: ext4 takes every free block before it says ENOSPC, and others would meet a full disk meanwhile.
    if size_bytes - before.st_blocks * 512 > free_bytes(fd):
        raise _does_not_fit(fd, size_bytes, path)
    try:
        libc.fallocate(fd, 0, 0, size_bytes)
    except OSError as error:
        os.ftruncate(fd, before.st_size)  # what was allocated before the failure stays allocated otherwise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _does_not_fit(fd, size_bytes, path) from error
        if error.errno == errno.EFBIG:
            raise InsufficientSpace(
                f"{size_bytes} bytes were asked for, one file here holds at most {_largest_file(fd)} bytes",
                obj=path,
                remedy="ask for less, or raise RLIMIT_FSIZE",
            ) from error
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise KernelError(
                f"the file system {filesystem_type(fd)} cannot preallocate",
                obj=path,
                remedy="put the tier on ext4, XFS or f2fs",
            ) from error
        raise KernelError(f"fallocate of {size_bytes} bytes: {error.strerror}", obj=path) from error


def _does_not_fit(fd: int, size_bytes: int, path: str) -> InsufficientSpace:
    return InsufficientSpace(
        f"{size_bytes} bytes were asked for, {free_bytes(fd)} bytes are free",
        obj=path,
        remedy="ask for less, or free space on this file system",
    )


def _largest_file(fd: int) -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    by_type: int = 2 ** (os.fpathconf(fd, "PC_FILESIZEBITS") - 1) - 1
    return by_type if soft == resource.RLIM_INFINITY else min(soft, by_type)


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give `length` bytes from `offset` back to the file system; they then read as zeros. Raises OSError."""
    libc.fallocate(fd, c.FALLOC_FL_PUNCH_HOLE | c.FALLOC_FL_KEEP_SIZE, offset, length)


def extents(fd: int, *, sync: bool = True) -> list[Extent]:
    """Every extent of the file in order; `sync`: dirty pages are written first (FIEMAP_FLAG_SYNC). Raises OSError."""
    found: list[Extent] = []
    start = 0
    request = _Fiemap()
    while True:
        request.fm_start = start
        request.fm_length = c.FIEMAP_MAX_OFFSET - start
        request.fm_flags = c.FIEMAP_FLAG_SYNC if sync else 0
        request.fm_extent_count = _EXTENTS_PER_CALL
        libc.ioctl(fd, c.FS_IOC_FIEMAP, request)
        count = request.fm_mapped_extents
        for entry in request.fm_extents[:count]:
            found.append(Extent(entry.fe_logical, entry.fe_physical, entry.fe_length, entry.fe_flags))
        if count == 0 or found[-1].flags & c.FIEMAP_EXTENT_LAST:
            return found
        start = found[-1].logical + found[-1].length


def drop_cached_pages(fd: int) -> None:
    """Write back and forget this file's clean pages. Pages that are mapped or locked stay (posix_fadvise(2))."""
    try:
        os.fdatasync(fd)
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def free_bytes(fd: int) -> int:
    """Bytes that an ordinary process can still allocate on this file system (root's reserve not counted)."""
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize


def filesystem_type(fd: int) -> str:
    """`ext4`, `xfs`, `tmpfs`…; an unknown one is its magic number in hex. ext2, ext3, ext4 differ in mountinfo only."""
    magic = libc.file_system_magic(fd)
    if magic != c.EXT_SUPER_MAGIC and magic in c.FILE_SYSTEM_NAMES:
        return c.FILE_SYSTEM_NAMES[magic]
    mount_id = libc.statx_mount_id(fd)
    device = os.fstat(fd).st_dev
    table = mounts.mountinfo()
    for entry in table:
        if entry.mount_id == mount_id:
            return entry.fs_type
    for entry in table:  # a mount that was detached from the tree: another mount of the same device says the same
        if entry.device == device:
            return entry.fs_type
    return "ext4" if magic == c.EXT_SUPER_MAGIC else hex(magic)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Which file an inode number means: numbers are given to other files once a file is gone, generations are not.

    `generation` (FS_IOC_GETVERSION) is None where the file system keeps none.
    """

    device: int
    inode: int
    generation: int | None = None

    @classmethod
    def of(cls, fd: int) -> FileIdentity:
        info = os.fstat(fd)
        return cls(info.st_dev, info.st_ino, _generation(fd))

    @classmethod
    def recorded(cls, record: Sequence[int | None]) -> FileIdentity:
        """From `as_record`."""
        device, inode, *generation = record
        return cls(int(device or 0), int(inode or 0), generation[0] if generation else None)

    def as_record(self) -> list[int | None]:
        """For a JSON record: st_dev, st_ino, generation."""
        return [self.device, self.inode, self.generation]

    def excludes(self, fd: int) -> bool:
        """Whether the open file is proven to be another one. False where the file system can't tell."""
        other = FileIdentity.of(fd)
        if (other.device, other.inode) != (self.device, self.inode):
            return True
        return None not in (self.generation, other.generation) and other.generation != self.generation


def _generation(fd: int) -> int | None:
    version = ctypes.create_string_buffer(8)
    try:
        libc.ioctl(fd, c.FS_IOC_GETVERSION, version)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise
    return int.from_bytes(version.raw[:4], sys.byteorder)  # the kernel writes an int, whatever the request's size says


def has_attribute(fd: int, attribute: int) -> bool:
    """Whether an FS_*_FL attribute (lsattr(1)) is set; a file system without such has none. Raises OSError."""
    flags = ctypes.create_string_buffer(8)
    try:
        libc.ioctl(fd, c.FS_IOC_GETFLAGS, flags)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            return False
        raise
    return bool(int.from_bytes(flags.raw[:4], "little") & attribute)


def clear_protection(fd: int) -> bool:
    """chattr -ia; whether either bit was set. A file system without such bits has none. Raises OSError."""
    flags = ctypes.create_string_buffer(8)
    try:
        libc.ioctl(fd, c.FS_IOC_GETFLAGS, flags)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            return False
        raise
    value = int.from_bytes(flags.raw[:4], "little")
    if not value & (c.FS_IMMUTABLE_FL | c.FS_APPEND_FL):
        return False
    ctypes.memmove(flags, (value & ~(c.FS_IMMUTABLE_FL | c.FS_APPEND_FL)).to_bytes(4, "little"), 4)
    libc.ioctl(fd, c.FS_IOC_SETFLAGS, flags)
    return True


def set_immutable(fd: int, immutable: bool) -> None:
    """chattr +i or -i. Needs CAP_LINUX_IMMUTABLE. Raises OSError (ENOTTY, EOPNOTSUPP: no such bit here)."""
    flags = ctypes.create_string_buffer(8)
    libc.ioctl(fd, c.FS_IOC_GETFLAGS, flags)
    value = int.from_bytes(flags.raw[:4], "little")
    value = value | c.FS_IMMUTABLE_FL if immutable else value & ~c.FS_IMMUTABLE_FL
    ctypes.memmove(flags, value.to_bytes(4, "little"), 4)
    libc.ioctl(fd, c.FS_IOC_SETFLAGS, flags)
