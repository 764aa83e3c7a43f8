"""The one way to a file: directories by descriptor, every step below an allowed root, nothing followed anywhere.

`AllowedRoots.open_directory` walks from `/` one component at a time (openat2, no symbolic links, no magic links), and
looks at who could change what it walked through. `Directory` then works by descriptor, so that a path that is swapped
afterwards leads nowhere. What is there and is not ours is ForeignData; what could lead elsewhere is UnsafePath. Neither
is touched.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Final, Self

from kvtier_api.errors import Busy, ForeignData, NotFound, NotPermitted, UnsafePath
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc, mounts
from kvtier_node.kernel.refusal import refused, shown

__all__ = ["AllowedRoots", "Directory"]

_NOWHERE: Final = c.RESOLVE_BENEATH | c.RESOLVE_NO_SYMLINKS | c.RESOLVE_NO_MAGICLINKS
_SAME_MOUNT: Final = _NOWHERE | c.RESOLVE_NO_XDEV
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_NAME_LIMIT_BYTES: Final = 255
_PATH_LIMIT_BYTES: Final = 4095
_STEM_BYTES: Final = 200  # of a name in the name of its temporary file
_DEEPEST_TREE: Final = 32
_REPLACED_LIMIT: Final = 100


def _check_name(name: str, where: str) -> None:
    """Raise UnsafePath unless `name` is one plain component of a path."""
    fault = ""
    if name in ("", ".", ".."):
        fault = "no name of a file"
    elif "/" in name:
        fault = "a name cannot hold a slash"
    elif not name.isprintable():
        fault = "a name of kvtier's holds no control, line break or undecodable character"
    elif len(os.fsencode(name)) > _NAME_LIMIT_BYTES:
        fault = f"a name has at most {_NAME_LIMIT_BYTES} bytes"
    if fault:
        raise UnsafePath(fault, obj=f"{shown(where)}: name {name[:300]!a}", remedy="choose another name")


def _components(path: str) -> list[str]:
    """The components of an absolute, clean path. Raises UnsafePath."""
    fault = ""
    if not path.startswith("/"):
        fault = "a path must be absolute"
    elif len(os.fsencode(path)) > _PATH_LIMIT_BYTES:
        fault = f"a path has at most {_PATH_LIMIT_BYTES} bytes"
    elif path != "/" and path.endswith("/"):
        fault = "a path must not end in a slash"
    elif "//" in path:
        fault = "a path must not hold an empty component"
    if fault:
        raise UnsafePath(
            fault, obj=shown(path[:300]) or "''", remedy="write it absolute and clean, as realpath shows it"
        )
    names = path.split("/")[1:] if path != "/" else []
    for name in names:
        _check_name(name, path[:300])
    return names


def _check_owner(found: os.stat_result, where: str, also: int | None = None) -> None:
    """Raise UnsafePath unless it belongs to root, to us, or to uid `also`."""
    if found.st_uid not in {0, os.geteuid(), also}:
        raise UnsafePath(
            f"it belongs to uid {found.st_uid}, who could swap what is there",
            obj=shown(where),
            remedy=f"choose a place of root's, or chown it to uid {os.geteuid()}",
        )


def _check_directory(fd: int, where: str, *, sticky_is_enough: bool, also: int | None = None) -> None:
    """Raise UnsafePath if anybody but root, us (and uid `also`) could rename or replace what is in the directory.

    A POSIX ACL that lets others write shows in the group bits too: they are its mask.
    """
    found = os.fstat(fd)
    _check_owner(found, where, also)
    if found.st_mode & _OTHERS_WRITE and not (sticky_is_enough and found.st_mode & stat.S_ISVTX):
        raise UnsafePath(
            f"group or others may write to it (mode {stat.S_IMODE(found.st_mode):04o})",
            obj=shown(where),
            remedy="chmod go-w",
        )


class AllowedRoots:
    """The directories under which an administrator lets kvtier work. Raises UnsafePath for a root that is not clean."""

    def __init__(self, roots: Sequence[str]) -> None:
        for root in roots:
            if not _components(root):
                raise UnsafePath("the whole machine is no allowed root", obj="/", remedy="name a directory")
        self.roots: Final = tuple(roots)

    def _root_of(self, path: str) -> str:
        inside = [root for root in self.roots if path == root or path.startswith(root + "/")]
        if not inside:
            allowed = ", ".join(shown(root) for root in self.roots) or "none"
            raise NotPermitted(
                f"the path is under no allowed root (allowed: {allowed})",
                obj=shown(path),
                remedy="choose a path below one of them, or add a root (--root)",
            )
        return max(inside, key=len)

    def open_directory(self, path: str, *, create: bool = False, mode: int = 0o755) -> Directory:
        """Open `path`, which is a root or below one; `create` makes what is missing from the root down.

        From the root down each directory must belong to root or us, and nobody else may write to it; above, a sticky
        directory (/tmp) will do. Below the root no other mount may begin. Raises UnsafePath, NotPermitted, NotFound,
        ForeignData (the last component is no directory), InsufficientSpace.
        """
        names = _components(path)
        depth_of_root = len(_components(self._root_of(path)))
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_directory(fd, "/", sticky_is_enough=True)
            for depth, name in enumerate(names, start=1):
                where = "/" + "/".join(names[:depth])
                next_fd = self._step(fd, name, where, same_mount=depth > depth_of_root, last=depth == len(names),
                                     create=mode if create and depth >= depth_of_root else None)  # fmt: skip
                os.close(fd)
                fd = next_fd
                _check_directory(fd, where, sticky_is_enough=depth < depth_of_root)
            return Directory(_reopen(fd, os.O_RDONLY | os.O_DIRECTORY, path), path)
        finally:
            os.close(fd)

    @staticmethod
    def _step(fd: int, name: str, where: str, *, same_mount: bool, last: bool, create: int | None) -> int:
        resolve = _SAME_MOUNT if same_mount else _NOWHERE
        for may_create in (create is not None, False):
            try:
                return libc.openat2(fd, name, os.O_PATH | os.O_DIRECTORY, 0, resolve)
            except OSError as error:
                if error.errno == errno.ENOTDIR and last:
                    raise ForeignData(
                        "something is there that is no directory", obj=shown(where), remedy="move it away"
                    ) from error
                if error.errno != errno.ENOENT or not may_create:
                    raise refused(error, where) from error
            try:
                _make_directory(fd, name, where, create or 0)
            except ForeignData:
                continue  # another was faster: what it made is looked at like all that exists
            with Directory(_reopen(fd, os.O_RDONLY | os.O_DIRECTORY, where), where) as parent:
                parent.fsync()
        raise AssertionError(where)


def _make_directory(parent_fd: int, name: str, where: str, mode: int) -> None:
    """mkdir with exactly `mode`, whatever the umask. Raises ForeignData if the name exists."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent_fd)
        fd = libc.openat2(parent_fd, name, os.O_PATH | os.O_DIRECTORY, 0, _SAME_MOUNT)
    except OSError as error:
        raise refused(error, where, at_fd=parent_fd) from error
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            raise ForeignData("another put a directory in its place", obj=shown(where), remedy="look who did")
        os.chmod(f"/proc/self/fd/{fd}", mode)
    except OSError as error:
        raise refused(error, where) from error
    finally:
        os.close(fd)


def _reopen(fd: int, flags: int, where: str) -> int:
    """The same inode, opened anew: no name is looked up again."""
    try:
        return os.open(f"/proc/self/fd/{fd}", (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise refused(error, where) from error


class Directory:
    """An open directory. A context manager; `close` is idempotent. Names are single components, checked.

    `path` is where it was found, for messages; every operation goes by `fd`.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def fd_path(self) -> str:
        """For calls that take only a path (mount(2)): leads to this very directory, in this process."""
        return f"/proc/self/fd/{self.fd}"

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}"

    # Directories

    def child(
        self, name: str, *, same_device: bool = True, owner_uid: int | None = None, any_owner: bool = False
    ) -> Directory:
        """Open a directory in this one. `same_device=False` allows that a mount begins there (the volume's `mnt`).

        It must belong to root, to us, or to `owner_uid`, and group and others may not write to it. `any_owner` drops
        that rule: to erase what a consumer owns, whatever it did to the mode. Raises NotFound, UnsafePath.
        """
        _check_name(name, self.path)
        where = self._at(name)
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            fd = libc.openat2(self.fd, name, flags, 0, _SAME_MOUNT if same_device else _NOWHERE)
        except OSError as error:
            raise refused(error, where) from error
        try:
            if not any_owner:
                _check_directory(fd, where, sticky_is_enough=False, also=owner_uid)
        except BaseException:
            os.close(fd)
            raise
        return Directory(fd, where)

    def mkdir(self, name: str, mode: int = 0o755) -> Directory:
        """Make and open a directory with exactly `mode`; durable after `fsync`. Raises ForeignData if it exists."""
        _check_name(name, self.path)
        _make_directory(self.fd, name, self._at(name), mode)
        made = self.child(name, any_owner=True)
        try:
            made._expect_empty()
        except BaseException:
            made.close()
            raise
        return made

    def _expect_empty(self) -> None:
        if self.names():
            raise ForeignData("what was just made is not empty", obj=shown(self.path), remedy="look who wrote it")

    def names(self) -> list[str]:
        """Every entry's name, sorted; bytes that are no UTF-8 as surrogates."""
        try:
            return sorted(os.listdir(self.fd))
        except OSError as error:
            raise refused(error, self.path) from error

    def stat(self, name: str) -> os.stat_result:
        """lstat of an entry: follows nothing, opens nothing. Raises NotFound. The name may be one of others' making."""
        try:
            return os.stat(self._one_component(name), dir_fd=self.fd, follow_symlinks=False)
        except OSError as error:
            raise refused(error, self._at(name)) from error

    def stat_if_there(self, name: str) -> os.stat_result | None:
        """The same, or None for an entry that went since the directory was listed: consumers remove files at any time."""
        try:
            return self.stat(name)
        except NotFound:
            return None

    def _one_component(self, name: str) -> str:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            _check_name(name, self.path)
        return name

    def is_mount_point(self) -> bool:
        return mounts.is_mount_point(self.fd)

    def chown(self, uid: int, gid: int) -> None:
        try:
            os.fchown(self.fd, uid, gid)
        except OSError as error:
            raise refused(error, self.path) from error

    def chmod(self, mode: int) -> None:
        try:
            os.fchmod(self.fd, mode)
        except OSError as error:
            raise refused(error, self.path) from error

    def fsync(self) -> None:
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise refused(error, self.path, at_fd=self.fd) from error

    # Files

    def create_file(self, name: str, mode: int = 0o600, flags: int = os.O_RDWR) -> int:
        """A new file's descriptor, with exactly `mode` (whatever the umask). Raises ForeignData if the name exists."""
        _check_name(name, self.path)
        try:
            fd = libc.openat2(self.fd, name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode & 0o600, _SAME_MOUNT)
        except OSError as error:
            raise refused(error, self._at(name), at_fd=self.fd) from error
        try:
            os.fchmod(fd, mode)
        except OSError as error:
            os.close(fd)
            raise refused(error, self._at(name)) from error
        return fd

    def open_file(
        self, name: str, flags: int = os.O_RDONLY, *, owner_uid: int | None = None, any_owner: bool = False
    ) -> int:
        """An existing file's descriptor.

        It must be regular, on this mount, have this one name, and belong to root, to us or to `owner_uid` (`any_owner`:
        to anybody). It is looked at before it is opened, so that a FIFO blocks nothing and a device notices nothing.

        Raises NotFound, ForeignData (no regular file), UnsafePath (link, mount, second name, another's), Busy (somebody
        goes on replacing it).
        """
        _check_name(name, self.path)
        where = self._at(name)
        found_fd, found = self._find(name, where)
        try:
            if stat.S_ISLNK(found.st_mode):
                raise refused(OSError(errno.ELOOP, os.strerror(errno.ELOOP)), where)
            if not stat.S_ISREG(found.st_mode):
                kind = stat.filemode(found.st_mode)[0]
                raise ForeignData(f"no regular file (type {kind!r})", obj=shown(where), remedy="look what it is")
            if not any_owner:
                _check_owner(found, where, owner_uid)
            if found.st_nlink != 1:
                raise UnsafePath(
                    f"the file has {found.st_nlink} names, so it is elsewhere too",
                    obj=shown(where),
                    remedy=f"look for the others: find -inum {found.st_ino}",
                )
            if found.st_dev != os.fstat(self.fd).st_dev:
                raise refused(OSError(errno.EXDEV, os.strerror(errno.EXDEV)), where)
            return _reopen(found_fd, flags & ~os.O_CREAT, where)
        finally:
            os.close(found_fd)

    def _find(self, name: str, where: str) -> tuple[int, os.stat_result]:
        """What has the name now, by a descriptor that only looks. Raises NotFound, UnsafePath, Busy."""
        for _ in range(_REPLACED_LIMIT):
            try:
                fd = libc.openat2(self.fd, name, os.O_PATH | os.O_NOFOLLOW, 0, _SAME_MOUNT)
            except OSError as error:
                raise refused(error, where) from error
            found = os.fstat(fd)
            if found.st_nlink:
                return fd, found
            os.close(fd)  # removed or replaced (`write_file_atomic`) since it was opened
        raise Busy(f"replaced {_REPLACED_LIMIT} times while it was opened", obj=shown(where), remedy="look who does")

    def read_file(self, name: str, limit_bytes: int, *, owner_uid: int | None = None) -> bytes:
        """The whole file, by the rules of `open_file`. Raises ForeignData if it is longer than `limit_bytes`."""
        with open(self.open_file(name, owner_uid=owner_uid), "rb") as file:
            try:
                data = file.read(limit_bytes + 1)
            except OSError as error:
                raise refused(error, self._at(name)) from error
        if len(data) > limit_bytes:
            raise ForeignData(f"longer than the {limit_bytes} bytes that kvtier writes", obj=shown(self._at(name)))
        return data

    def write_file_atomic(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Replace the file's content as one step that survives a power cut: the old one or the new one, never a part.

        What has the name already must be such a file as `open_file` takes. Raises what it and `create_file` raise.
        """
        _check_name(name, self.path)
        try:
            os.close(self.open_file(name))
        except NotFound:
            pass
        stem = os.fsdecode(os.fsencode(name)[:_STEM_BYTES])
        temporary = f".{stem}.{secrets.token_hex(8)}.tmp"
        fd = self.create_file(temporary, mode, os.O_WRONLY)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException as error:
            os.unlink(temporary, dir_fd=self.fd)
            if isinstance(error, OSError):
                raise refused(error, self._at(name), at_fd=self.fd) from error
            raise
        self.fsync()

    # Removal

    def unlink(self, name: str) -> None:
        """Remove a name that is no directory; a link itself, not what it points to. Raises NotFound, ForeignData."""
        _check_name(name, self.path)
        self._remove(name, directory=False)

    def rmdir(self, name: str) -> None:
        """Remove an empty directory on which nothing is mounted here. Raises NotFound, ForeignData, Busy."""
        _check_name(name, self.path)
        self._remove(name, directory=True)

    def _remove(self, name: str, *, directory: bool) -> None:
        try:
            (os.rmdir if directory else os.unlink)(name, dir_fd=self.fd)
        except OSError as error:
            raise refused(error, self._at(name)) from error

    def remove_tree_contents(self, *, keep: Collection[str] = ()) -> int:
        """Remove everything below, `keep` (names in this directory) excepted; returns how many names went.

        Looks through all of it first: a mount anywhere inside, or a tree deeper than any of ours, is refused before the
        first removal. Links are removed, not followed. Raises UnsafePath, NotPermitted (immutable), Busy.
        """
        self._walk(keep, remove=False, depth=0)
        return self._walk(keep, remove=True, depth=0)

    def _walk(self, keep: Collection[str], *, remove: bool, depth: int) -> int:
        if depth > _DEEPEST_TREE:
            raise UnsafePath(
                f"deeper than {_DEEPEST_TREE} directories", obj=shown(self.path), remedy="look who made it"
            )
        count = 0
        for name in self.names():
            if name in keep:
                continue
            where = self._at(name)
            # Names of others' making are taken as they are: each came from this directory's own list.
            try:
                fd = libc.openat2(self.fd, name, os.O_PATH | os.O_NOFOLLOW, 0, _SAME_MOUNT)
            except FileNotFoundError:
                continue  # gone since the list was read
            except OSError as error:
                raise refused(error, where) from error
            try:
                is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
                if is_directory:
                    with Directory(_reopen(fd, os.O_RDONLY | os.O_DIRECTORY, where), where) as inner:
                        count += inner._walk((), remove=remove, depth=depth + 1)
            finally:
                os.close(fd)
            if remove:
                self._remove(name, directory=is_directory)
            count += 1
        return count
