"""Between two containers of one pod: what the old one left in the volume is gone before the new one can read it.

kubelet starts a container anew in its pod without any call to the driver. So the guardian looks by itself: once every container
that had the volume has ended, the slot files become empty and what else lies in the slot directory is removed. Meanwhile nobody
opens a file: the `gate` holds back the pod's opens, those of a new container from its first one on. It is there before the pod
can reach the volume (`hold_back`); after a new start of the agent, from the first look on.

Where the kernel has no such gate, the guardian can only watch (`containers`), with a write lease on each slot file while it
works: a container that was faster, or has a file open, keeps everything. Then only its engine's new key epoch stands between it
and the old blocks. Blocks that are given back stay ciphertext of the volume's key, which goes with the volume.

Not for volumes without a key of kvtier's own: they share their file system with others, and take too long to overwrite.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from kvtier_api.errors import Busy, KernelError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_node.kernel import files, lease
from kvtier_node.kernel.refusal import refused
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.pods.containers import Between, ContainerWatch, Snapshot, users_of
from kvtier_node.pods.ending import VolumeFiles, has_file_open
from kvtier_node.pods.gate import Gate
from kvtier_node.pods.members import PodMembers
from kvtier_node.pods.regions import PodRegions
from kvtier_node.slots import SlotWatch, open_consumer_file, slot_names, walk_files

__all__ = ["hold_back", "look_between"]

FACT: Final = "between_containers"


def hold_back(node: Node, live: LiveVolume, pod: PodConsumer) -> None:
    """Before the pod can reach its volume: the gate is there from its first open on, however late the first look comes.

    Raises KvtierError.
    """
    with _opened(node, live) as found:
        if found is not None and live.between is None:
            live.between = _begin(node, live, pod, *found[1:])


def look_between(node: Node, live: LiveVolume, pod: PodConsumer) -> bool:
    """Look once; whether something was erased. Raises KvtierError: it is tried again at the next look."""
    with _opened(node, live) as found:
        if found is None:
            return False
        place, root, slots = found
        between = live.between
        if between is None:
            between = live.between = _begin(node, live, pod, root, slots)
        done = _look(live, between, place, slots)
        for line in between.regions.look(between.containers.users, between.members.all):
            node.ledger.add_event("Normal", "SharedMemoryErased", live.volume_id, f"{pod.title}: {line}")
    if done:
        live.row = node.ledger.note(live.volume_id, facts={FACT: int(live.row.facts.get(FACT, 0)) + 1})
        node.ledger.add_event(
            "Normal",
            "SlotsErased",
            live.volume_id,
            f"no container of {pod.title} had the volume: its slots were emptied",
        )
    return done


@contextmanager
def _opened(node: Node, live: LiveVolume) -> Iterator[tuple[Directory, Directory, Directory] | None]:
    """The volume's place, its root and its slots; None where nothing of it is mounted there. Raises KvtierError."""
    place = node.places.open(live.row.place)
    if place is None:
        yield None
        return
    try:
        with ExitStack() as stack:
            stack.enter_context(place)
            if MOUNT_NAME not in place.names():
                yield None
                return
            root = stack.enter_context(place.child(MOUNT_NAME, same_device=False, any_owner=True))
            if not root.is_mount_point():
                yield None
                return
            yield place, root, stack.enter_context(root.child(SLOTS_DIRECTORY, any_owner=True))
    except OSError as error:
        raise refused(error, live.row.place) from error


def _begin(node: Node, live: LiveVolume, pod: PodConsumer, root: Directory, slots: Directory) -> Between:
    members = PodMembers(pod.pod.uid)
    device = os.fstat(root.fd).st_dev
    containers: Gate | ContainerWatch
    try:
        containers = Gate.before(root.fd, members)
    except KernelError as error:
        node.ledger.add_event(
            "Warning", "NoGate", live.volume_id, f"containers of {pod.title} are watched, and not held back: {error}"
        )
        containers = ContainerWatch(members, device)
    try:
        clean = _snapshot(slots) if _is_blank(slots) else None
        if isinstance(containers, Gate):
            containers.begin(users_of(members, device), empty=clean is not None)
    except BaseException:
        containers.close()
        raise
    return Between(members, containers, PodRegions(int(live.row.facts["uid"])), clean)


def _look(live: LiveVolume, between: Between, place: Directory, slots: Directory) -> bool:
    containers = between.containers
    if isinstance(containers, ContainerWatch):
        touched = _snapshot(slots) != between.clean
        return containers.in_use(touched=touched) is False and _erase(live, between, place, slots)
    if containers.failure is not None:
        raise KernelError(
            f"containers are not held back any more: {containers.failure}",
            obj=live.row.place,
            remedy="start the agent anew, and report it",
        )
    waiting = containers.waiting()
    if not waiting and containers.in_use() is not False:
        return False
    done = _erase(live, between, place, slots)
    containers.let_in(waiting)
    return done


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
    """Whether it was done: not while somebody has the volume. Own descriptors go first: a lease is for who is alone."""
    if live.watch is not None:
        live.watch.refresh()
    live.close_slots()
    try:
        with ExitStack() as stack:
            held = _open_slots(live, slots, stack)
            if not _is_alone(between, held, slots, stack):
                return False
            found = _snapshot(slots)
            written = found != between.clean or not _is_blank(slots)  # who writes can set the times back
            if written:
                _empty(live, held, slots, {inode for inode, _, _ in found})
            between.containers.emptied()
            between.clean = _snapshot(slots)
        return written
    finally:
        live.watch = SlotWatch.open(place, overwrite=False)


def _empty(live: LiveVolume, held: list[int], slots: Directory, inodes: set[int]) -> None:
    """Empty the slot files, and remove what else of `inodes` is there."""
    others = inodes - {os.fstat(fd).st_ino for fd in held}
    for fd in held:
        os.ftruncate(fd, 0)
        files.preallocate(fd, live.row.bytes_per_rank, path=slots.path)
        os.fsync(fd)
    for directory, name in walk_files(slots):
        info = directory.stat_if_there(name)
        if info is not None and info.st_ino in others:
            os.unlink(name, dir_fd=directory.fd)


def _is_alone(between: Between, held: list[int], slots: Directory, stack: ExitStack) -> bool:
    """Whether no container has the volume. If so, none comes to it while the stack lives."""
    containers = between.containers
    if isinstance(containers, Gate):
        stack.enter_context(containers.shut())
        if containers.in_use():
            return False
        own = VolumeFiles(os.fstat(slots.fd).st_dev)
        return not any(has_file_open(own, pid) for pid in between.members.all())
    try:
        for fd in held:
            stack.enter_context(lease.hold(fd))
    except Busy:
        return False
    return not containers.look()  # one that came before the leases: what it wrote is its own


def _open_slots(live: LiveVolume, slots: Directory, stack: ExitStack) -> list[int]:
    """A descriptor of each slot file that is there, while the stack lives."""
    held = []
    for name in slot_names(str(live.row.spec.get("slotPrefix", "slot")), live.row.ranks):
        fd = open_consumer_file(slots, name, os.O_RDWR)
        if fd is not None:
            stack.callback(os.close, fd)
            held.append(fd)
    return held
