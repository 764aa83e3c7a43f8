"""NodeGetVolumeStats: bytes and inodes of a pod's volume, as its file system says them now."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvtier_api.errors import NotFound
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.volume import VolumeState
from kvtier_node.backends import BACKENDS
from kvtier_node.csi.calls import StatsCall
from kvtier_node.csi.rows import find_row, volume_root
from kvtier_node.kernel import bounded
from kvtier_node.ledger import VolumeRow
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.pods.target import open_target_if_there
from kvtier_node.slots import walk_files

__all__ = ["Figures", "Usage", "usage_of"]

_LIMIT_S = 20.0


@dataclass(frozen=True)
class Figures:
    total: int
    used: int
    available: int


@dataclass(frozen=True)
class Usage:
    """`inodes` is None where the volume has no file system of its own."""

    bytes: Figures
    inodes: Figures | None


def usage_of(node: Node, call: StatsCall) -> Usage:
    """Raises NotFound unless the volume is there, in use, and shown at the path that is asked about."""
    row = find_row(node, call.volume_id)
    if row is None or row.state is not VolumeState.IN_USE:
        raise NotFound("no such volume is in use here", obj=call.volume_id)
    target = open_target_if_there(call.target)
    if target is None:
        raise NotFound("the path is not there", obj=str(call.target))
    with target, volume_root(node, row) as root:
        if not target.shows(root):
            raise NotFound(f"the volume is not at {call.target}", obj=call.volume_id)
        if BACKENDS[row.backend].own_device:
            return _of_file_system(root)
        return _of_files(row, root)


def _of_file_system(root: Directory) -> Usage:
    found = bounded.call("kvtier_node.children.pod_mounts:usage", timeout_s=_LIMIT_S, fds={"root": root.fd})
    return Usage(
        Figures(found["bytes_total"], found["bytes_total"] - found["bytes_free"], found["bytes_available"]),
        Figures(found["inodes_total"], found["inodes_total"] - found["inodes_free"], found["inodes_free"]),
    )


def _of_files(row: VolumeRow, root: Directory) -> Usage:
    """The file system is shared: what counts is what the volume's own files take of it."""
    total = row.ranks * row.bytes_per_rank
    with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
        entries = [(directory.stat_if_there(name), name) for directory, name in walk_files(slots)]
        free = os.fstatvfs(slots.fd)
    used = sum(info.st_blocks * 512 for info, _ in entries if info is not None)
    return Usage(Figures(max(total, used), used, free.f_bavail * free.f_frsize), None)
