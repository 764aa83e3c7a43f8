"""For tests of volumes that somebody unmounts: in every mount namespace, as other tests' namespaces hold copies of our mounts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvtier_node.kernel import mounts
from requirements import need_tool


def unmount_everywhere(path: str | Path, *, spare: frozenset[int] = frozenset()) -> None:
    """Take the file system that is mounted on `path` off all its places, but for the namespaces of the processes `spare`."""
    device = os.stat(path).st_dev
    umount, nsenter = need_tool("umount"), need_tool("nsenter")
    for entry in reversed(mounts.mounts_of_device(device)):
        subprocess.run([umount, "-l", entry.mount_point], check=True)
    for pid, point in mounts.mounts_elsewhere(device):
        if pid not in spare:  # it may end, or let go of it, by itself meanwhile
            subprocess.run([nsenter, "-t", str(pid), "-m", umount, "-l", point], check=False, capture_output=True)
