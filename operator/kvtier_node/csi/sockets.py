"""UNIX sockets in kubelet's directories: made closed to all but root, and shown under their name only when they answer.

A socket that a dead agent left is removed (node-driver-registrar#206); one that answers is another agent's, and anything that
is no socket is somebody's. The address goes by descriptor, so a long path fits into `sun_path`.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

from kvtier_api.errors import Busy, ForeignData
from kvtier_node.kernel.refusal import refused, shown
from kvtier_node.paths import AllowedRoots, Directory

__all__ = ["SocketPlace"]

_ASK_S: Final = 2.0


class SocketPlace:
    """One name in one directory. `address` is where gRPC listens; `show` gives it its name; `remove` takes it away."""

    def __init__(self, path: str, *, root: str, create: bool) -> None:
        """`root` is kubelet's directory. Raises UnsafePath, NotPermitted, NotFound, ForeignData, Busy."""
        parent, self._name = os.path.split(os.path.realpath(os.path.dirname(path)) + "/" + os.path.basename(path))
        self.path = path
        self._directory: Directory = AllowedRoots([os.path.realpath(root)]).open_directory(
            parent, create=create, mode=0o700
        )
        self._hidden = f".{self._name}.new"
        self._inode: int | None = None
        try:
            self._refuse_other()
            self._clear(self._hidden)
        except BaseException:
            self._directory.close()
            raise

    @property
    def address(self) -> str:
        return f"unix:{self._directory.fd_path()}/{self._hidden}"

    def _refuse_other(self) -> None:
        info = self._directory.stat_if_there(self._name)
        if info is None:
            return
        if not stat.S_ISSOCK(info.st_mode):
            raise ForeignData("no socket", obj=shown(self.path), remedy="look what it is, and move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_ASK_S)
            try:
                probe.connect(f"{self._directory.fd_path()}/{self._name}")
            except OSError as error:
                if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                    return
                raise refused(error, self.path) from error
        raise Busy("another agent answers there", obj=shown(self.path), remedy="stop it first")

    def _clear(self, name: str) -> None:
        info = self._directory.stat_if_there(name)
        if info is not None and stat.S_ISSOCK(info.st_mode):
            self._directory.unlink(name)

    def show(self) -> None:
        """Give the bound socket its name, in the place of a dead one. Raises OSError."""
        fd = self._directory.fd
        os.chmod(self._hidden, 0o600, dir_fd=fd)
        self._inode = self._directory.stat(self._hidden).st_ino
        os.rename(self._hidden, self._name, src_dir_fd=fd, dst_dir_fd=fd)

    def is_shown(self) -> bool:
        """Whether the name still leads to this socket, in the directory that has kubelet's path now."""
        try:
            return os.stat(self.path, follow_symlinks=False).st_ino == self._inode
        except OSError:
            return False

    def remove(self) -> None:
        """Take the name away, if it is still this socket's; never another's."""
        info = self._directory.stat_if_there(self._name)
        if info is not None and info.st_ino == self._inode:
            self._directory.unlink(self._name)
        self._clear(self._hidden)

    def close(self) -> None:
        self._directory.close()
