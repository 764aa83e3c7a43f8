"""For tests of volumes that somebody unmounts: in every mount namespace, as other tests' namespaces hold copies of our mounts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from kvtier_node.kernel import mounts
from requirements import need_tool

LIMIT_S = 60.0


def unmount_everywhere(path: str | Path, *, spare: frozenset[int] = frozenset()) -> None:
    """Take the file system that is mounted on `path` off all its places, but for the namespaces of the processes `spare`."""
    device = os.stat(path).st_dev
    umount, nsenter = need_tool("umount"), need_tool("nsenter")
    until = time.monotonic() + LIMIT_S
    # Again until none is found: a namespace may have been copied while the others were looked at. A mount may also go by itself
    # meanwhile, with its namespace or by the agent's hand; and once it is gone, its number may be another's.
    while here := [entry.mount_point for entry in mounts.mounts_of_device(device)]:
        for point in reversed(here):
            subprocess.run([umount, "-l", point], check=False, capture_output=True)
        assert time.monotonic() < until, here
    points: set[str] = set()
    while elsewhere := [
        (pid, point)
        for pid, point in mounts.mounts_elsewhere(device)
        if pid not in spare and (not points or point in points)
    ]:
        points |= {point for _, point in elsewhere}
        for pid, point in elsewhere:
            subprocess.run([nsenter, "-t", str(pid), "-m", umount, "-l", point], check=False, capture_output=True)
        assert time.monotonic() < until, elsewhere
