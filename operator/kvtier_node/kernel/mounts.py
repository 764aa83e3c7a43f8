"""What is mounted where, in this mount namespace and in every other (/proc/<pid>/mountinfo, proc(5)).

Reads only; mounting is `kernel.libc`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc
from kvtier_node.kernel.processes import pids

__all__ = ["MountEntry", "is_mount_point", "mountinfo", "mounts_elsewhere", "mounts_of_device", "parse_mountinfo"]

_OCTAL = re.compile(rb"\\([0-7]{3})")
# A process or thread that ends while it is read. Nothing else is passed over.
_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo; paths as bytes decoded by `os.fsdecode`, escapes undone."""

    mount_id: int
    parent_id: int
    device: int
    """st_dev of the files in it (`os.makedev`)."""
    root: str
    """The directory of the file system that is mounted; not `/` for a bind mount."""
    mount_point: str
    options: tuple[str, ...]
    optional: tuple[str, ...]
    """`shared:N`, `master:N`, `propagate_from:N`, `unbindable`."""
    fs_type: str
    source: str
    super_options: tuple[str, ...]


def _text(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), field))


def parse_mountinfo(raw: bytes) -> list[MountEntry]:
    """Parse the whole file. Raises ValueError on a line that proc(5) does not allow."""
    entries: list[MountEntry] = []
    for line in raw.split(b"\n"):  # not splitlines: a carriage return is not escaped
        if not line:
            continue
        fields = line.split(b" ")
        try:
            dash = fields.index(b"-", 6)
            major, minor = fields[2].split(b":")
            entry = MountEntry(
                mount_id=int(fields[0]),
                parent_id=int(fields[1]),
                device=os.makedev(int(major), int(minor)),
                root=_text(fields[3]),
                mount_point=_text(fields[4]),
                options=tuple(_text(fields[5]).split(",")),
                optional=tuple(_text(field) for field in fields[6:dash]),
                fs_type=_text(fields[dash + 1]),
                source=_text(fields[dash + 2]),
                super_options=tuple(_text(fields[dash + 3]).split(",")) if len(fields) > dash + 3 else (),
            )
        except (ValueError, IndexError) as error:
            raise ValueError(f"mountinfo line not understood: {line!r}") from error
        entries.append(entry)
    return entries


def mountinfo(pid: int | str = "self") -> list[MountEntry]:
    """The mount table as process `pid` sees it. Raises OSError if the process is gone or hidden."""
    return parse_mountinfo(Path(f"/proc/{pid}/mountinfo").read_bytes())


def mounts_of_device(dev: int) -> list[MountEntry]:
    """Mounts in this namespace of the file system whose files have st_dev `dev`."""
    return [entry for entry in mountinfo() if entry.device == dev]


def _namespace(thread: str) -> str | None:
    """The mount namespace of a thread; None if this process may not ask (its capabilities are not a superset)."""
    try:
        return os.readlink(f"/proc/{thread}/ns/mnt")
    except PermissionError:
        return None


def _threads() -> Iterator[tuple[int, str]]:
    """(process id, its thread's path below /proc), the lowest process id first."""
    for pid in pids():
        try:
            yield from ((pid, f"{pid}/task/{thread}") for thread in os.listdir(f"/proc/{pid}/task"))
        except _GONE:
            continue


def mounts_elsewhere(dev: int) -> list[tuple[int, str]]:
    """(pid, mount point as that process sees it) in other mount namespaces, one pid per namespace.

    Threads count: one can have a namespace of its own. Raises PermissionError for a table that cannot be read: that is
    not "no mount". A namespace that only a descriptor or a bind mount keeps alive has no process and is not seen here;
    `loop.is_claimed` sees its effect.
    """
    found: list[tuple[int, str]] = []
    namespaces = {_namespace("self")}
    known_mounts = {entry.mount_id for entry in mountinfo()}
    for pid, thread in _threads():
        try:
            namespace = _namespace(thread)
            if namespace is not None and namespace in namespaces:
                continue
            table = mountinfo(thread)
        except OSError as error:
            if isinstance(error, _GONE) or error.errno == errno.EINVAL:  # EINVAL: a zombie has no namespace any more
                continue
            raise
        namespaces.add(namespace)
        # A mount belongs to one namespace, and ids are the kernel's own: a table that shares one is a table we have.
        if any(entry.mount_id in known_mounts for entry in table):
            continue
        known_mounts.update(entry.mount_id for entry in table)
        found.extend((pid, entry.mount_point) for entry in table if entry.device == dev)
    return found


def is_mount_point(path_fd: int) -> bool:
    """Whether the open file is the root of a mount (statx, Linux 5.8); bind mounts of one file system included."""
    return bool(libc.attributes(path_fd) & c.STATX_ATTR_MOUNT_ROOT)
