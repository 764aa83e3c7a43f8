"""A volume whose mount was taken off its place while it is on record as in use: somebody unmounted it.

Its consumer may live, and never say that it has done with it. So the kernel is asked whether it still has the volume's file
system at all: a mount in any namespace, an open file and a mapping each keep it. While it has, somebody may use the volume,
and that is said. When it has not, nobody can, whoever lives: with `Fscrypt` the key went with the last mount already.

Only for volumes with a file system of their own. What follows is the guardian's.
"""

from __future__ import annotations

import os
from typing import Final

from kvtier_api.volume import VolumeState
from kvtier_node.backends import BACKENDS, image
from kvtier_node.ledger import VolumeRow
from kvtier_node.live import LiveVolume, request_of
from kvtier_node.node import Node
from kvtier_node.places import MOUNT_NAME

__all__ = ["LOST", "has_lost_mount", "is_out_of_reach"]

LOST: Final = "its mount was taken off its place"


def has_lost_mount(row: VolumeRow) -> bool:
    """Whether a volume in use has nothing mounted at its place. Cheap, and a hint: by path. Raises OSError."""
    if row.state is not VolumeState.IN_USE or not BACKENDS[row.backend].own_device:
        return False
    try:
        return os.lstat(f"{row.place}/{MOUNT_NAME}").st_dev == os.lstat(row.place).st_dev
    except FileNotFoundError:
        return os.path.isdir(row.place)


def is_out_of_reach(node: Node, live: LiveVolume) -> bool:
    """Whether nobody can use a volume with a lost mount any more. Raises KvtierError, OSError where it cannot be told."""
    place = node.places.open(live.row.place)
    if place is None:
        return False
    with place:
        with image.mounted_root(place) as root:
            if root is not None:
                return False  # there after all
        live.close_watch()  # descriptors of our own would keep the file system, and its key
        return not BACKENDS[live.row.backend].is_in_kernel(place, request_of(live.row))
