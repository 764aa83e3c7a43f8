"""The directory where kubelet wants a pod's volume: `<kubelet>/pods/<uid>/volumes/kubernetes.io~csi/<name>/mount`.

Everything above `mount` is kubelet's and root's, and is walked by `paths`. What is mounted on it is kvtier's to take off; what
lies in it while nothing is mounted is somebody else's and is never removed. After a reboot kubelet may start a pod on such a
plain directory (kubernetes#119921): then an engine may have written there.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Self

from kvtier_api.errors import ForeignData, InvalidResource, KernelError, NotFound
from kvtier_node.kernel import bounded
from kvtier_node.kernel.refusal import shown
from kvtier_node.paths import AllowedRoots, Directory

__all__ = ["TargetDirectory", "TargetPath", "TargetState", "open_target", "open_target_if_there"]

MOUNT: Final = "mount"
_PLUGIN: Final = "kubernetes.io~csi"
_LIMIT_S: Final = 30.0
_PATTERN: Final = re.compile(
    rf"(?P<pods>/.+/pods)/(?P<uid>[-._A-Za-z0-9]{{1,128}})/volumes/{re.escape(_PLUGIN)}/(?P<volume>[^/]{{1,253}})/{MOUNT}"
)


@dataclass(frozen=True)
class TargetPath:
    """A target path, taken apart. `pods` is kubelet's directory of pods, as kubelet writes it."""

    pods: str
    pod_uid: str
    volume: str
    """The volume's name in the pod's spec."""

    @classmethod
    def parse(cls, path: str, *, kubelet: str | None = None) -> Self:
        """Raises InvalidResource for a path that kubelet would not ask for (of `kubelet`'s root directory, if given)."""
        found = _PATTERN.fullmatch(path)
        clean = found is not None and not {".", "..", ""} & set(path.split("/")[1:])
        if found is None or not clean or (kubelet is not None and found["pods"] != f"{kubelet.rstrip('/')}/pods"):
            where = f"{kubelet.rstrip('/')}/" if kubelet is not None else "<kubelet>/"
            raise InvalidResource(
                f"not a path of a pod's CSI volume: {where}pods/<uid>/volumes/{_PLUGIN}/<name>/{MOUNT}",
                obj=f"target_path {shown(path[:300])!r}",
                remedy="give the agent kubelet's --root-dir with --kubelet-root",
            )
        return cls(found["pods"], found["uid"], found["volume"])

    @property
    def real_pods(self) -> str:
        """kubelet's own path made real: an administrator may have made it a link."""
        return os.path.realpath(self.pods)

    @property
    def parent(self) -> str:
        """The directory that `mount` is in."""
        return f"{self.real_pods}/{self.pod_uid}/volumes/{_PLUGIN}/{self.volume}"

    def __str__(self) -> str:
        return f"{self.pods}/{self.pod_uid}/volumes/{_PLUGIN}/{self.volume}/{MOUNT}"


class TargetState(StrEnum):
    ABSENT = "absent"
    EMPTY = "an empty directory"
    DATA = "a directory that holds data"
    MOUNTED = "a mount"


class TargetDirectory:
    """The parent of one `mount`, open. A context manager. Every method can be run twice."""

    def __init__(self, parent: Directory) -> None:
        self._parent = parent
        self.path = f"{parent.path}/{MOUNT}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._parent.close()

    def state(self) -> TargetState:
        """What is there. A mount that does not answer (EIO, ESTALE, ENOTCONN) is a mount. Raises UnsafePath for a file."""
        try:
            with self._open() as found:
                if found.is_mount_point():
                    return TargetState.MOUNTED
                return TargetState.DATA if found.names() else TargetState.EMPTY
        except NotFound:
            return TargetState.ABSENT
        except (KernelError, OSError):
            return TargetState.MOUNTED

    def _open(self) -> Directory:
        return self._parent.child(MOUNT, same_device=False, any_owner=True)

    def shows(self, volume_root: Directory) -> bool:
        """Whether what is there is the very directory `volume_root`."""
        try:
            with self._open() as found:
                return os.path.sameopenfile(found.fd, volume_root.fd) and found.is_mount_point()
        except (NotFound, KernelError, OSError):
            return False

    def attach(self, volume_root: Directory) -> None:
        """Show `volume_root` at the target, with nodev, nosuid, noexec, noatime from its first moment.

        Raises ForeignData for a plain directory that is not empty, KernelError.
        """
        state = self.state()
        if state is TargetState.MOUNTED:
            if self.shows(volume_root):
                return
            self.detach()
            state = self.state()
        if state is TargetState.DATA:
            raise self.foreign()
        if state is TargetState.ABSENT:
            self._parent.mkdir(MOUNT, 0o750).close()
        with self._open() as target:
            bounded.call(
                "kvtier_node.children.pod_mounts:attach",
                timeout_s=_LIMIT_S,
                fds={"source": volume_root.fd, "target": target.fd},
            )

    def foreign(self) -> ForeignData:
        return ForeignData(
            "holds data, with nothing mounted on it: it may have been written in plaintext, after a reboot and before the"
            " volume was there; kvtier did not put it there and does not touch it",
            obj=shown(self.path),
            remedy="look at it, then remove it and delete the pod",
        )

    def detach(self) -> int:
        """Take everything off the target at once, users or not, broken mounts too; how many mounts went."""
        answer = bounded.call(
            "kvtier_node.children.pod_mounts:detach", timeout_s=_LIMIT_S, fds={"parent": self._parent.fd}, name=MOUNT
        )
        return int(answer["count"])

    def shut(self) -> None:
        """Nothing can be written here any more: an empty file system, read-only, lies over the target.

        For a pod that goes on without its volume: its next container must not find a plain directory of the node's disk.
        """
        if self.state() is TargetState.ABSENT:
            return
        bounded.call(
            "kvtier_node.children.pod_mounts:shut", timeout_s=_LIMIT_S, fds={"parent": self._parent.fd}, name=MOUNT
        )

    def remove(self) -> None:
        """Remove the empty directory `mount`. Raises ForeignData where it is not empty, Busy where it is mounted on."""
        try:
            self._parent.rmdir(MOUNT)
        except NotFound:
            return
        except ForeignData as error:
            raise self.foreign() from error


def open_target(path: TargetPath) -> TargetDirectory:
    """Raises NotFound where kubelet has no such directory (any more), UnsafePath, NotPermitted."""
    return TargetDirectory(AllowedRoots([path.real_pods]).open_directory(path.parent))


def open_target_if_there(path: TargetPath) -> TargetDirectory | None:
    """The same, or None. Raises UnsafePath, NotPermitted."""
    try:
        return open_target(path)
    except NotFound:
        return None
