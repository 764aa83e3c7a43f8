"""A volume by the id that kubelet gave it: which row of the ledger it is, and what of it lies on the node.

The id is on record with the volume from the first record on (`facts["pod"]`), and with its consumer once it has one. An erased
volume's id may come again: the pod restarted after a reboot of the node has the same one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import KvtierError, NotFound
from kvtier_api.marker import MARKER_NAME, check_marker
from kvtier_api.volume import VolumeState
from kvtier_node.kernel.refusal import refused
from kvtier_node.ledger import TERMINAL, VolumeRow
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.consumer import PodIdentity, pod_of
from kvtier_node.pods.target import TargetPath, TargetState, open_target_if_there

__all__ = ["Left", "find_row", "left_of", "of_pods", "volume_root"]

_LIVING: Final = frozenset(VolumeState) - TERMINAL


def of_pods(node: Node) -> list[tuple[VolumeRow, PodIdentity]]:
    """Every volume of a pod that has not ended."""
    found = []
    for row in node.ledger.volumes(_LIVING):
        pod = pod_of(row.consumer, row.facts)
        if pod is not None:
            found.append((row, pod))
    return found


def find_row(node: Node, csi_volume_id: str) -> VolumeRow | None:
    """The volume with this id that has not ended."""
    return next((row for row, pod in of_pods(node) if pod.csi_volume_id == csi_volume_id), None)


@dataclass(frozen=True)
class Left:
    """Whether anything of a volume may be on this node: a row that has not ended, or a mount at the target."""

    anything: bool
    row: VolumeRow | None = None


def left_of(node: Node, csi_volume_id: str, target: TargetPath) -> Left:
    """Never raises: not known is not nothing."""
    try:
        row = find_row(node, csi_volume_id)
        if row is not None:
            return Left(True, row)
        directory = open_target_if_there(target)
        if directory is None:
            return Left(False)
        with directory:
            return Left(directory.state() is TargetState.MOUNTED)
    except (KvtierError, OSError):
        return Left(True)


@contextmanager
def volume_root(node: Node, row: VolumeRow) -> Iterator[Directory]:
    """The root of the volume as it is at its place now, checked by its marker: its own device, its own nonce.

    Raises NotFound, VerificationFailed, UnsafePath.
    """
    place = node.places.open(row.place)
    if place is None:
        raise NotFound("the place is gone", obj=row.place)
    with place, place.child(MOUNT_NAME, same_device=False, any_owner=True) as root:
        _check(row, root)
        yield root


def _check(row: VolumeRow, root: Directory) -> None:
    where = f"{row.place}/{MOUNT_NAME}"
    try:
        check_marker(f"{where}/{MARKER_NAME}", nonce=str(row.facts["nonce"]))
        same = os.path.samestat(os.stat(where, follow_symlinks=False), os.fstat(root.fd))
    except OSError as error:
        raise refused(error, where) from error
    if not same:
        raise NotFound("the volume's mount went while it was looked at", obj=where)
