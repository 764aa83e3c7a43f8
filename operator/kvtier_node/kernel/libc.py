"""System calls that Python's `os` lacks, by ctypes. Each raises `OSError(errno, strerror, path)`.

It knows kernel structures and no policy: what an error means is said by its callers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from typing import Any

from kvtier_node.kernel import constants as c

__all__ = [
    "attributes",
    "capget",
    "capset",
    "clear_ambient_set",
    "drop_from_bounding_set",
    "fallocate",
    "fanotify_init",
    "fanotify_mark",
    "file_system_magic",
    "in_bounding_set",
    "ioctl",
    "lock_all_memory",
    "mount",
    "no_core_dumps",
    "openat2",
    "set_dumpable",
    "set_parent_death_signal",
    "statx_direct_io_align",
    "statx_mount_id",
    "umount2",
]

_libc = ctypes.CDLL(None, use_errno=True)
_RACE_TRIES = 32


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


class _Statx(ctypes.Structure):
    """struct statx (linux/stat.h): 256 bytes. Only the fields that are read have names."""

    _fields_ = [
        ("stx_mask", ctypes.c_uint32),
        ("stx_blksize", ctypes.c_uint32),
        ("stx_attributes", ctypes.c_uint64),
        ("_up_to_mnt_id", ctypes.c_uint8 * 128),
        ("stx_mnt_id", ctypes.c_uint64),
        ("stx_dio_mem_align", ctypes.c_uint32),
        ("stx_dio_offset_align", ctypes.c_uint32),
        ("_spare", ctypes.c_uint64 * 12),
    ]


class _Statfs(ctypes.Structure):
    _fields_ = [("f_type", ctypes.c_long), ("_rest", ctypes.c_uint8 * 248)]


_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_libc.fanotify_init.argtypes = [ctypes.c_uint, ctypes.c_uint]
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def _failed(path: str | None) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def openat2(
    dir_fd: int,
    path: str,
    flags: int,
    mode: int = 0,
    resolve: int = c.RESOLVE_BENEATH | c.RESOLVE_NO_SYMLINKS | c.RESOLVE_NO_MAGICLINKS,
) -> int:
    """openat2(2): a descriptor (always close-on-exec) of `path` below `dir_fd`.

    EAGAIN means that a rename or mount elsewhere raced with the walk (man page); it is tried again, not for ever.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, resolve)
    name = os.fsencode(path)
    for _ in range(_RACE_TRIES):
        fd = int(
            _libc.syscall(
                ctypes.c_long(c.SYS_openat2),
                ctypes.c_int(dir_fd),
                ctypes.c_char_p(name),
                ctypes.byref(how),
                ctypes.c_size_t(ctypes.sizeof(how)),
            )
        )
        if fd >= 0:
            return fd
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise _failed(path)


def mount(source: str | None, target: str, fstype: str | None, flags: int, data: str | None) -> None:
    def text(value: str | None) -> bytes | None:
        return None if value is None else os.fsencode(value)

    if _libc.mount(text(source), text(target), text(fstype), flags, text(data)) != 0:
        raise _failed(target)


def umount2(target: str, flags: int) -> None:
    if _libc.umount2(os.fsencode(target), flags) != 0:
        raise _failed(target)


def _statx(fd: int, mask: int) -> _Statx:
    result = _Statx()
    if _libc.statx(fd, b"", c.AT_EMPTY_PATH | c.AT_SYMLINK_NOFOLLOW, mask, ctypes.byref(result)) != 0:
        raise _failed(f"descriptor {fd}")
    return result


def statx_direct_io_align(fd: int) -> tuple[int, int] | None:
    """(memory alignment, offset alignment) in bytes for O_DIRECT on this file; None: not supported, or not said."""
    result = _statx(fd, c.STATX_DIOALIGN)
    if not result.stx_mask & c.STATX_DIOALIGN or not result.stx_dio_offset_align:
        return None
    return int(result.stx_dio_mem_align), int(result.stx_dio_offset_align)


def statx_mount_id(fd: int) -> int:
    """The mount's number, first column of /proc/self/mountinfo (Linux 5.8)."""
    result = _statx(fd, c.STATX_MNT_ID)
    if not result.stx_mask & c.STATX_MNT_ID:
        raise OSError(errno.EOPNOTSUPP, "statx gives no mount id: Linux 5.8 or newer is needed", f"descriptor {fd}")
    return int(result.stx_mnt_id)


def attributes(fd: int) -> int:
    """STATX_ATTR_* bits that hold for this file."""
    return int(_statx(fd, 0).stx_attributes)


def file_system_magic(fd: int) -> int:
    """f_type of fstatfs(2)."""
    result = _Statfs()
    if _libc.fstatfs(fd, ctypes.byref(result)) != 0:
        raise _failed(f"descriptor {fd}")
    return int(result.f_type) & 0xFFFFFFFF


def fallocate(fd: int, mode: int, offset_bytes: int, length_bytes: int) -> None:
    """fallocate(2) itself: glibc's posix_fallocate would write zeros where the file system cannot allocate."""
    while _libc.fallocate(fd, mode, offset_bytes, length_bytes) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failed(f"descriptor {fd}")


def fanotify_init(flags: int, event_flags: int) -> int:
    """fanotify_init(2): a group's descriptor. `event_flags`: how the kernel opens files for the reader of its events."""
    fd = int(_libc.fanotify_init(flags, event_flags))
    if fd < 0:
        raise _failed(None)
    return fd


def fanotify_mark(group: int, flags: int, mask: int, fd: int) -> None:
    """fanotify_mark(2) on what the descriptor `fd` has."""
    if _libc.fanotify_mark(group, flags, mask, fd, None) != 0:
        raise _failed(f"descriptor {fd}")


def ioctl(fd: int, request: int, argument: ctypes.Structure | ctypes.Array[ctypes.c_char] | int | None = None) -> int:
    """ioctl(2) on the caller's own memory. `fcntl.ioctl` would copy the argument, keys too, to its stack."""
    pointer = ctypes.c_void_p(argument) if isinstance(argument, int) or argument is None else ctypes.byref(argument)
    result = int(_libc.ioctl(fd, request, pointer))
    if result < 0:
        raise _failed(f"descriptor {fd}")
    return result


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _failed(None)


def set_dumpable(dumpable: bool) -> None:
    """False: no core dump, and no ptrace or /proc/<pid>/mem by others of the same uid."""
    _prctl(c.PR_SET_DUMPABLE, int(dumpable))


def set_parent_death_signal(signal: int) -> None:
    """`signal` comes when the thread that forked this process ends. Check getppid() afterwards: it may be gone."""
    _prctl(c.PR_SET_PDEATHSIG, signal)


def in_bounding_set(capability: int) -> bool:
    """Whether this thread, and what it starts, can have it."""
    result = int(_libc.prctl(c.PR_CAPBSET_READ, capability, 0, 0, 0))
    if result < 0:
        raise _failed(None)
    return result == 1


def drop_from_bounding_set(capability: int) -> None:
    """Needs CAP_SETPCAP."""
    _prctl(c.PR_CAPBSET_DROP, capability)


def clear_ambient_set() -> None:
    _prctl(c.PR_CAP_AMBIENT, c.PR_CAP_AMBIENT_CLEAR_ALL)


def capget(header: ctypes.Structure, sets: ctypes.Array[Any]) -> None:
    """capget(2) of the calling thread. Raises OSError."""
    if _libc.capget(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise _failed(None)


def capset(header: ctypes.Structure, sets: ctypes.Array[Any]) -> None:
    """capset(2) of the calling thread. Raises OSError."""
    if _libc.capset(ctypes.byref(header), ctypes.byref(sets)) != 0:
        raise _failed(None)


def lock_all_memory() -> None:
    """mlockall: no page of this process goes to swap. Needs CAP_IPC_LOCK, or everything within RLIMIT_MEMLOCK."""
    if _libc.mlockall(c.MCL_CURRENT | c.MCL_FUTURE) != 0:
        raise _failed(None)


def no_core_dumps() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
