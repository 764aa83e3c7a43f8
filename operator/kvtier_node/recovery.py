"""What a start does before it serves anyone: compare the ledger with the node, and finish every unfinished arrow.

Volumes whose guardian lives are left to it. Of the others, one that a living consumer still uses is adopted, with its key and
mounts as they are; everything else is erased. A lost or damaged ledger is rebuilt from the signed place records on
the node, and says so: what is in use stays in use, what is left over is never served.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_api.erasure import Trigger
from kvtier_api.errors import KvtierError, LedgerError, NotFound
from kvtier_api.volume import VolumeState
from kvtier_node import shared_memory
from kvtier_node.backends import BACKENDS
from kvtier_node.consumers import Evidence, alive, consumer_of
from kvtier_node.erasing import erase
from kvtier_node.guardian import Guardian
from kvtier_node.identity import NodeIdentity
from kvtier_node.kernel.processes import boot_id
from kvtier_node.kernel.refusal import as_refusal
from kvtier_node.ledger import TERMINAL, Ledger, LedgerDamaged, LedgerMissing, Observer, VolumeRow
from kvtier_node.live import LiveVolume
from kvtier_node.lost_mounts import LOST, has_lost_mount, is_out_of_reach
from kvtier_node.node import Node
from kvtier_node.places import MOUNT_NAME, Places
from kvtier_node.pods.consumer import PodConsumer
from kvtier_node.receipts import PlaceRecord, Receipt, Technique, utc_now
from kvtier_node.slots import SlotWatch
from kvtier_node.state_dir import StateDirectory

_TRIGGERS: Final = frozenset(trigger.value for trigger in Trigger)

__all__ = ["Recovered", "evidence", "guard", "open_node", "recover", "tidy", "trigger_of", "usage"]


@dataclass
class Recovered:
    """What a recovery did. `failed` volumes stay `Erasing` and are tried again; `unguarded` ones could not be taken in hand."""

    erased: list[Receipt] = field(default_factory=list)
    adopted: list[LiveVolume] = field(default_factory=list)
    failed: list[tuple[LiveVolume, KvtierError]] = field(default_factory=list)
    guarded_elsewhere: list[str] = field(default_factory=list)
    unguarded: list[tuple[VolumeRow, KvtierError]] = field(default_factory=list)


def open_node(
    state_dir: str, roots: Sequence[str], *, name: str | None = None, observers: Sequence[Observer] = ()
) -> Node:
    """Open the node's state; rebuild the ledger from the node if it is damaged or lost beside its own traces.

    Raises LedgerError where it cannot be rebuilt, UnsafePath, NotPermitted, VerificationFailed (the node's key).
    """
    try:
        with _rebuild_lock(state_dir, exclusive=False):  # a ledger that is being rebuilt is sound, and not whole yet
            return _open_sound(state_dir, roots, name, observers)
    except (LedgerDamaged, LedgerMissing):
        pass
    with _rebuild_lock(state_dir, exclusive=True):  # of two processes that meet a lost ledger, one rebuilds it
        try:
            return _open_sound(state_dir, roots, name, observers)
        except (LedgerDamaged, LedgerMissing) as error:
            identity = NodeIdentity.load_or_create(state_dir)
            ledger = Ledger.create_fresh(state_dir, str(error), observers=observers, public_key=identity.public_key)
            node = Node(state_dir, name or Node.default_name(), ledger, identity, Places(roots, identity))
            rebuild(node)
            ledger.add_event("Warning", "LedgerRebuilt", state_dir, f"rebuilt from the places on this node: {error}")
            return node


def _open_sound(state_dir: str, roots: Sequence[str], name: str | None, observers: Sequence[Observer]) -> Node:
    """Open the node and check every page and row: a flipped bit shows in a row's digest only. Raises LedgerError."""
    node = Node.open(state_dir, roots, name=name, observers=observers)
    try:
        node.ledger.check()
    except BaseException:
        node.ledger.close()
        raise
    return node


@contextmanager
def _rebuild_lock(state_dir: str, *, exclusive: bool) -> Iterator[None]:
    """Of every open, and alone for a rebuild; the kernel lets the next one in when a holder ends, by whatever means."""
    state = StateDirectory.open(state_dir)
    try:
        fd = state.open_file("rebuild.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)
    finally:
        state.close()


def rebuild(node: Node) -> list[str]:
    """Adopt every place on the node that carries this node's signature and is not in the ledger. Returns the volume ids.

    Part of every recovery: a crash can come between a new ledger and the last adoption.
    """
    adopted = []
    for path, record in node.places.discover():
        if record is None:
            if not _is_being_made(node, path):
                node.ledger.add_event(
                    "Warning", "ForeignData", path, "called like a volume, and not signed by this node"
                )
            continue
        if _is_known(node, record.volume_id):  # asked for after the place was read: it was planned before it was made
            continue
        try:
            node.ledger.adopt(_row_of(node, record))
        except LedgerError:
            if not _is_known(node, record.volume_id):
                raise
            continue  # another recovery was faster
        adopted.append(record.volume_id)
    return adopted


def _is_known(node: Node, volume_id: str) -> bool:
    try:
        node.ledger.get(volume_id)
    except NotFound:
        return False
    return True


def _is_being_made(node: Node, path: str) -> bool:
    """On record in this place: another process makes or removes it just now, or a crash cut that short."""
    return _is_known(node, os.path.basename(path)) and node.ledger.get(os.path.basename(path)).place == path


def _row_of(node: Node, record: PlaceRecord) -> VolumeRow:
    now = utc_now()
    return VolumeRow(
        volume_id=record.volume_id,
        tier_uid=record.tier_uid,
        tier_namespace=record.tier_namespace,
        tier_name=record.tier_name,
        node=node.name,
        boot_id=record.boot_id,
        backend=record.backend,
        cipher=str(record.spec.get("encryption", {}).get("cipher", "aes-xts-plain64")),
        place=record.place,
        device=record.spec.get("device"),
        size_bytes=record.size_bytes,
        ranks=record.ranks,
        bytes_per_rank=record.bytes_per_rank,
        key_id=None,
        consumer=_consumer_of(node, record.place),
        state=VolumeState.IN_USE,  # until the evidence is looked at: the state that claims least
        reason="found on the node while the ledger was rebuilt",
        spec=record.spec,
        facts={
            "uid": record.uid,
            "gid": record.gid,
            "nonce": record.nonce,
            "rebuilt": True,
            "declared": True,
            "file_system": node.places.file_system_of(os.path.dirname(record.place)),
            # Made only after the device was found blank and taken.
            "device_taken": node.places.holds(record.place, MOUNT_NAME),
        },
        created_at=record.created_at,
        updated_at=now,
        state_since=now,
    )


def _consumer_of(node: Node, place: str) -> dict[str, Any] | None:
    try:
        found = node.places.consumer_of(place)
        consumer_of(found)  # nobody signed it: anything can be in it
    except (KvtierError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        node.ledger.add_event("Warning", "ConsumerUnknown", place, f"its consumer's record cannot be read: {error}")
        return None
    return found


def guard(node: Node, row: VolumeRow) -> LiveVolume | None:
    """Become the volume's guardian and take descriptors of its slot files, or None while it has a guardian or has ended."""
    guardian = Guardian.try_acquire(node.state_dir, row.volume_id)
    if guardian is None:
        return None
    try:
        current = node.ledger.get(row.volume_id)  # it may have ended between the listing and the lock
        if current.state in TERMINAL:
            guardian.close(ended=True)
            return None
        live = LiveVolume(current, guardian)
        live.watch = _watch(node, current)
    except BaseException:
        guardian.close()
        raise
    return live


def _watch(node: Node, row: VolumeRow) -> SlotWatch | None:
    """Descriptors of the slot files, where the volume is there and its files can be opened."""
    if row.state is not VolumeState.IN_USE:
        return None
    try:
        place = node.places.open(row.place)
        if place is None:
            return None
        with place:
            return SlotWatch.open(place, overwrite=BACKENDS[row.backend].technique is Technique.OVERWRITE)
    except (KvtierError, OSError) as error:
        node.ledger.note(row.volume_id, facts={"watch": json.dumps(str(error))[:300]})
        return None


def evidence(live: LiveVolume) -> Evidence:
    """Whether the volume is in use now. Only a volume `InUse` of this very boot can be."""
    if live.row.state is not VolumeState.IN_USE:
        return Evidence(False, f"no consumer was started ({live.row.state})")
    if live.row.boot_id != boot_id():
        return Evidence(False, "the node was restarted since")
    consumer = consumer_of(live.row.consumer)
    if isinstance(consumer, PodConsumer) and consumer.ended and destroys_keys(live.row):
        return Evidence(False, f"{consumer.title} has ended")  # its key goes, whoever still has a file open
    found = alive(consumer, live.watch)
    if not found.alive and (user := shared_memory.in_use(shared_memory.files_of(live.row.facts))):
        return Evidence(True, user)
    return found


def usage(node: Node, live: LiveVolume) -> Evidence:
    """The same, and whether a volume that somebody unmounted can be used by anybody any more."""
    found = evidence(live)
    if not found.alive or not has_lost_mount(live.row):
        return found
    if is_out_of_reach(node, live):
        return Evidence(False, f"{LOST}, and the kernel has its file system no more: nobody can use it", lost=True)
    return Evidence(True, f"{LOST}; it is still mounted elsewhere, or a file of it is open: {found.reason}", lost=True)


def destroys_keys(row: VolumeRow) -> bool:
    """Whether an erasure makes the volume unreadable even for who still has a file of it open."""
    return BACKENDS[row.backend].technique is Technique.KEY_DESTROYED


def trigger_of(row: VolumeRow) -> Trigger:
    """Why a volume that nobody guards and nobody uses is erased."""
    if row.boot_id != boot_id():
        return Trigger.POWER_LOSS
    if row.state is VolumeState.IN_USE:
        pod = PodConsumer.from_record(row.consumer)
        return pod.ended if pod is not None and pod.ended else Trigger.CRASH
    if row.state in (VolumeState.DYING, VolumeState.ERASING) and row.reason in _TRIGGERS:
        return Trigger(row.reason)
    return Trigger.RESTART


def recover(node: Node) -> Recovered:
    """Take every unguarded volume in hand: adopt it while it is in use, otherwise erase it. Run it before serving."""
    rebuild(node)
    result = Recovered()
    for row in node.ledger.volumes(frozenset(VolumeState) - TERMINAL):
        try:
            live = guard(node, row)
        except (KvtierError, OSError) as error:
            result.unguarded.append((row, as_refusal(error, row.place)))
            continue
        if live is None:
            result.guarded_elsewhere.append(row.volume_id)
            continue
        try:
            found = usage(node, live)
            if found.alive or (found.lost and isinstance(consumer_of(live.row.consumer), PodConsumer)):
                result.adopted.append(live)  # of a pod: its target is shut first, at the first look
            else:  # when the consumer died is not known here: nobody watched
                result.erased.append(erase(node, live, trigger_of(live.row)))
        except (KvtierError, OSError) as error:  # one volume's trouble must not keep the others from being erased
            failure = as_refusal(error, live.row.place)
            result.failed.append((live, failure))
    tidy(node)
    return result


def tidy(node: Node) -> None:
    """Remove what a crash between record and removal left of ended volumes: their directory with only its record.

    Each under its volume's lock: another process may be between its record and its removal right now.
    """
    listed: dict[str, set[str]] = {}
    for row in node.ledger.volumes({VolumeState.ERASED}):
        parent, name = os.path.split(row.place)
        if parent not in listed:
            try:
                listed[parent] = node.places.names_in(parent)
            except KvtierError as error:  # no longer under an allowed root, or somebody else's by now
                listed[parent] = set()
                node.ledger.add_event("Warning", "PlaceRefused", parent, str(error))
        if name not in listed[parent]:
            continue
        guardian = Guardian.try_acquire(node.state_dir, row.volume_id)
        if guardian is None:
            continue
        try:
            node.places.forget(row.place)
        except KvtierError as error:
            node.ledger.add_event("Warning", "ForeignData", row.place, f"the place of an erased volume: {error}")
        finally:
            guardian.close(ended=True)
