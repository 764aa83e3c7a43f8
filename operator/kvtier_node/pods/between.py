"""Between two containers of one pod: what the old one left in the volume is gone before the new one can read it.

kubelet starts a container anew in its pod without any call to the driver. So the guardian looks by itself: once every container
that was seen with the volume has ended, the slot files become empty and what else lies in the slot directory is removed.
Meanwhile the kernel keeps every slot file from being opened (a write lease on each): a container that starts just then waits.
One that was faster, or has a file open, keeps everything: then only its engine's new key epoch stands between it and the old
blocks. Blocks that are given back stay ciphertext of the volume's key, which goes with the volume.

Not for volumes without a key of kvtier's own: to overwrite them takes longer than a lease holds.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from typing import Final

from kvtier_api.errors import Busy
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.kernel import files, lease
from kvtier_node.kernel.refusal import refused
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.pods.containers import Between, ContainerWatch, Snapshot
from kvtier_node.slots import SlotWatch, open_consumer_file, slot_names, walk_files

__all__ = ["look_between"]

FACT: Final = "between_containers"


def look_between(node: Node, live: LiveVolume, pod: PodConsumer) -> bool:
    """Look once; whether something was erased. Raises KvtierError: it is tried again at the next look."""
    place = node.places.open(live.row.place)
    if place is None:
        return False
    try:
        with ExitStack() as stack:
            stack.enter_context(place)
            if MOUNT_NAME not in place.names():
                return False
            root = stack.enter_context(place.child(MOUNT_NAME, same_device=False, any_owner=True))
            if not root.is_mount_point():
                return False  # nothing of the volume is here
            slots = stack.enter_context(root.child(SLOTS_DIRECTORY, any_owner=True))
            between = live.between
            if between is None:
                between = live.between = Between(ContainerWatch(pod.pod.uid, os.fstat(root.fd).st_dev))
                between.clean = _snapshot(slots) if _is_blank(slots) else None
            written = _snapshot(slots) != between.clean
            used = between.containers.in_use(written=written)
            for line in between.regions.look(between.containers.users, between.containers.members):
                node.ledger.add_event("Normal", "SharedMemoryErased", live.volume_id, f"{pod.title}: {line}")
            if used is not False or not written:
                return False
            if not _erase(live, between, place, slots):
                return False
            between.containers.forget()
            between.clean = _snapshot(slots)
    except OSError as error:
        raise refused(error, live.row.place) from error
    live.row = node.ledger.note(live.volume_id, facts={FACT: int(live.row.facts.get(FACT, 0)) + 1})
    node.ledger.add_event(
        "Normal", "SlotsErased", live.volume_id, f"no container of {pod.title} had the volume: its slots were emptied"
    )
    return True


def _snapshot(slots: Directory) -> Snapshot:
    seen = (directory.stat_if_there(name) for directory, name in walk_files(slots))
    return frozenset((info.st_ino, info.st_size, info.st_mtime_ns) for info in seen if info is not None)


def _is_blank(slots: Directory) -> bool:
    """Nothing was ever written to any file: preallocated blocks are a hole to SEEK_DATA (lseek(2))."""
    for directory, name in walk_files(slots):
        fd = open_consumer_file(directory, name, os.O_RDONLY)
        if fd is None:
            continue
        try:
            os.lseek(fd, 0, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            continue
        finally:
            os.close(fd)
        return False
    return True


def _erase(live: LiveVolume, between: Between, place: Directory, slots: Directory) -> bool:
    """Whether it was done. The guardian's own descriptors go first: a lease is for who is alone."""
    if live.watch is not None:
        live.watch.refresh()
    live.close_watch()
    try:
        with ExitStack() as stack:
            try:
                held = _hold(live, slots, stack)
            except Busy:
                return False
            others = _inodes(slots) - {os.fstat(fd).st_ino for fd in held}
            if between.containers.look():  # it came before the leases: what it wrote is its own
                return False
            for fd in held:
                os.ftruncate(fd, 0)
                files.preallocate(fd, live.row.bytes_per_rank, path=slots.path)
                os.fsync(fd)
            for directory, name in walk_files(slots):
                info = directory.stat_if_there(name)
                if info is not None and info.st_ino in others:
                    os.unlink(name, dir_fd=directory.fd)
        return True
    finally:
        live.watch = SlotWatch.open(place, overwrite=False)


def _hold(live: LiveVolume, slots: Directory, stack: ExitStack) -> list[int]:
    """A descriptor with a write lease of each slot file that is there: nobody opens it while the stack lives. Raises Busy."""
    held = []
    for name in slot_names(str(live.row.spec.get("slotPrefix", "slot")), live.row.ranks):
        fd = open_consumer_file(slots, name, os.O_RDWR)
        if fd is None:
            continue
        stack.callback(os.close, fd)
        stack.enter_context(lease.hold(fd))
        held.append(fd)
    return held


def _inodes(slots: Directory) -> set[int]:
    seen = (directory.stat_if_there(name) for directory, name in walk_files(slots))
    return {info.st_ino for info in seen if info is not None}
