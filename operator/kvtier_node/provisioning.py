"""Making a volume: Planned → Provisioning → Ready → InUse, each arrow on durable record before its effect.

Leaves the effects to the backend, the slot files to `slots`, and the end to `erasing`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from kvtier_api.erasure import Trigger
from kvtier_api.errors import InsufficientSpace, KernelError, KvtierError
from kvtier_api.marker import Marker
from kvtier_api.tier import EncryptionBackend, KVCacheTier
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node import backends, slots
from kvtier_node.backends.base import Backend
from kvtier_node.consumers import Consumer
from kvtier_node.erasing import erase
from kvtier_node.guardian import Guardian
from kvtier_node.kernel import files
from kvtier_node.kernel.processes import boot_id
from kvtier_node.ledger import VolumeRow
from kvtier_node.live import LiveVolume, request_of
from kvtier_node.node import Node, namespace_of, uid_of
from kvtier_node.paths import Directory
from kvtier_node.receipts import PlaceRecord, Technique, utc_now
from kvtier_node.tier_paths import refuse_nested

__all__ = ["choose_backend", "provision", "refuse_too_large", "start"]


def provision(
    node: Node, tier: KVCacheTier, *, uid: int, gid: int, facts: Mapping[str, Any] | None = None
) -> LiveVolume:
    """A new, empty, encrypted, preallocated volume for one consumer of `tier`, with state Ready.

    `facts` are on record with the volume from its first record on.

    Nothing half-made stays behind when it raises: InvalidResource (its path and another tier's), NotPermitted, UnsafePath,
    ForeignData, BackendUnavailable, InsufficientSpace, KernelError.
    """
    refuse_nested(node, tier)  # before its directory is made
    with node.places.tier_directory(tier.spec.path, create=True) as directory:
        node.places.refuse_foreign(
            directory,
            lambda: {row.volume_id for row in node.ledger.volumes() if os.path.dirname(row.place) == directory.path},
        )
        backend, reasons = choose_backend(tier, directory, device=tier.spec.device)
        refuse_too_large(directory, tier, backend)
        volume_id = f"kvv-{secrets.token_hex(10)}"
        guardian = Guardian.try_acquire(node.state_dir, volume_id)
        if guardian is None:
            raise KernelError(
                "a new volume's lock is taken", obj=volume_id, remedy="this is a defect; please report it"
            )
        try:
            row = _planned(node, tier, backend, f"{directory.path}/{volume_id}", uid=uid, gid=gid)
            row.facts.update(facts or {})
            row.facts["file_system"] = os.fstatvfs(directory.fd).f_fsid
            row = node.ledger.plan(row)
        except BaseException:
            guardian.close(ended=True)
            raise
        live = LiveVolume(row, guardian)
        try:
            refuse_nested(node, tier)  # again: another process may have recorded a volume between the two
            _make(node, live, tier, backend=backend, directory=directory, reasons=reasons)
        except BaseException as error:
            _undo(node, live, error)
            raise
        return live


def choose_backend(tier: KVCacheTier, directory: Directory, *, device: str | None) -> tuple[Backend, dict[str, str]]:
    """The tier's backend in its directory, by measurement, and each probed backend's reason.

    `device`: the tier's, to be looked at as well. Raises BackendUnavailable, ForeignData.
    """
    wanted = tier.spec.encryption.backend
    name = None if wanted is EncryptionBackend.AUTO else BackendName(wanted)
    return backends.choose(name, directory, device=device)


def refuse_too_large(directory: Directory, tier: KVCacheTier, backend: Backend) -> None:
    """Raise InsufficientSpace, with both numbers, for a volume that does not fit. Nothing was made yet."""
    if tier.spec.device is not None:
        return  # the device's own size is the limit; the preallocation of the slot files meets it
    needed, free = backend.bytes_needed(tier.spec.total_bytes), files.free_bytes(directory.fd)
    if needed > free:
        raise InsufficientSpace(
            f"needs {needed} bytes ({tier.spec.ranks} ranks of {int(tier.spec.size_per_rank)}, and"
            f" {needed - tier.spec.total_bytes} for the file system), {free} are free",
            obj=f"spec.sizePerRank of {tier.metadata.name}, at {directory.path}",
            remedy="lower sizePerRank or ranks, or give the tier a larger file system",
        )


def _planned(node: Node, tier: KVCacheTier, backend: Backend, place: str, *, uid: int, gid: int) -> VolumeRow:
    now = utc_now()
    return VolumeRow(
        volume_id=os.path.basename(place),
        tier_uid=uid_of(tier),
        tier_namespace=namespace_of(tier),
        tier_name=tier.metadata.name,
        node=node.name,
        boot_id=boot_id(),
        backend=backend.name,
        cipher=tier.spec.encryption.cipher,
        place=place,
        device=tier.spec.device,
        size_bytes=backend.bytes_needed(tier.spec.total_bytes),
        ranks=tier.spec.ranks,
        bytes_per_rank=tier.spec.size_per_rank,
        key_id=None,
        consumer=None,
        state=VolumeState.PLANNED,
        reason="",
        spec=tier.spec.model_dump(mode="json", by_alias=True),
        facts={"uid": uid, "gid": gid, "nonce": secrets.token_hex(16)},
        created_at=now,
        updated_at=now,
        state_since=now,
    )


def _marker(tier: KVCacheTier, row: VolumeRow, backend: Backend) -> Marker:
    spec = tier.spec
    return Marker(
        volume_id=row.volume_id,
        tier_uid=row.tier_uid,
        tier_namespace=row.tier_namespace,
        tier_name=row.tier_name,
        nonce=row.facts["nonce"],
        pod_uid=row.facts["pod"]["uid"] if "pod" in row.facts else None,
        ranks=spec.ranks,
        slot_files=slots.slot_names(spec.slot_prefix, spec.ranks),
        slot_size_bytes=spec.slot_size,
        bytes_per_rank=spec.size_per_rank,
        seal_slots=spec.encryption.seal_slots,
        salt_policy=spec.salt.policy.value,
        salt_hash=spec.salt.hash.value,
        max_age_s=spec.retention.max_age,
        backend=backend.name.value,
        own_device=backend.own_device,
    )


def _record(node: Node, marker: Marker, row: VolumeRow, tier: KVCacheTier) -> PlaceRecord:
    return PlaceRecord(
        volume_id=row.volume_id,
        place=row.place,
        tier_uid=row.tier_uid,
        tier_namespace=row.tier_namespace,
        tier_name=row.tier_name,
        node_id=node.identity.node_id,
        boot_id=row.boot_id,
        backend=BackendName(row.backend),
        size_bytes=row.size_bytes,
        ranks=row.ranks,
        bytes_per_rank=row.bytes_per_rank,
        slot_prefix=tier.spec.slot_prefix,
        slot_size_bytes=marker.slot_size_bytes,
        uid=row.facts["uid"],
        gid=row.facts["gid"],
        created_at=row.created_at,
        nonce=marker.nonce,
        spec=row.spec,
    )


def _make(
    node: Node,
    live: LiveVolume,
    tier: KVCacheTier,
    *,
    backend: Backend,
    directory: Directory,
    reasons: dict[str, str],
) -> None:
    volume_id = live.volume_id
    live.row = node.ledger.advance(
        volume_id, VolumeState.PROVISIONING, reason=reasons[backend.name], facts={"probes": reasons}
    )
    marker, request = _marker(tier, live.row, backend), request_of(live.row)

    def note(**known: Any) -> None:
        live.row = node.ledger.note(volume_id, **known)

    with node.places.declare(directory, _record(node, marker, live.row, tier)) as place:
        note(facts={"declared": True})
        backend.create(place, request, note)
        inodes = slots.create(place, marker, uid=request.uid, gid=request.gid)
        found = backend.measure(place, request, live.row.key_id)
        if found.encrypted is False:
            raise KernelError(
                f"the new volume is not encrypted: {found.reason}", obj=place.path, remedy="see the kernel log"
            )
        live.watch = slots.SlotWatch.open(place, overwrite=backend.technique is Technique.OVERWRITE)
        ranges = [[part.offset, part.length] for part in backend.data_ranges(place, request)]
    live.row = node.ledger.advance(
        volume_id,
        VolumeState.READY,
        reason=found.reason,
        facts={"measured": found.facts, "data_ranges": ranges, "inodes": inodes},
    )


def _undo(node: Node, live: LiveVolume, error: BaseException) -> None:
    """Erase what a failed provisioning made. If that fails too, the volume stays on record for the next try."""
    try:
        node.ledger.advance(live.volume_id, VolumeState.FAILED, reason=str(error)[:500])
        erase(node, live, Trigger.EXIT)
    except KvtierError as second:
        error.add_note(f"{live.volume_id} stays on record until it is erased: {second}")
    finally:
        live.close_watch()
        live.guardian.close()  # after an erasure there is nothing left to close


def start(node: Node, live: LiveVolume, consumer: Consumer) -> None:
    """Put the consumer on record, in the ledger and in the place. Call it before the consumer can write its first byte."""
    node.places.note_consumer(live.row.place, consumer.record())
    live.row = node.ledger.advance(
        live.volume_id, VolumeState.IN_USE, consumer=consumer.record(), reason=consumer.title
    )
