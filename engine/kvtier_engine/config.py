"""What a slot store is opened with, and how that is read from a volume's marker.

`from_marker` is the way for engines. Explicit files are for tests, benchmarks and a store without a node agent.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from kvtier_api.errors import EngineError
from kvtier_api.marker import SLOTS_DIRECTORY, Marker, check_marker
from kvtier_engine.clock import Clock, boot_clock

__all__ = ["SaltPolicy", "StoreConfig", "config_from_environment", "config_from_marker"]

SaltPolicy = Literal["Required", "PerTenant", "Shared"]
_GCM_LIMIT_BYTES: Final = (1 << 36) - 32  # of one message; NIST SP 800-38D, 5.2.1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Sizes in bytes, times in seconds.

    `files`: the slot files that this store owns, in the order of `ranks`; relative to `directory_fd` where that is
    given. `slots`: None takes what the smallest file holds. `run_bytes`: how much adjacent data one pwritev moves at
    most (at least one slot), and the size of each of the `io_depth` + 1 buffers; a preadv moves at most 1 MiB of it.
    `confirm`: "local" makes a block findable when this store's ranks are written; "external" when `confirm(job_id)`
    says that the other ranks' processes wrote theirs too.
    """

    files: tuple[str, ...]
    ranks: tuple[int, ...]
    slot_size_bytes: int
    tier_uid: str
    volume_id: str
    salt_policy: SaltPolicy
    max_age_s: float
    slots: int | None = None
    seal_slots: bool = True
    eviction: Literal["lru", "arc"] = "lru"
    io_depth: int = 4
    run_bytes: int = 4 << 20
    direct: bool = True
    harden_process: bool = True
    confirm: Literal["local", "external"] = "local"
    quarantine_s: float = 60.0
    on_finished: Callable[[], None] | None = None
    clock: Clock = boot_clock
    directory_fd: int | None = None

    def __post_init__(self) -> None:
        def require(holds: bool, field: str, value: object, remedy: str) -> None:
            if not holds:
                raise EngineError("does not hold", obj=f"{field}={value!r}", remedy=remedy)

        require(bool(self.files) and len(self.files) == len(self.ranks), "files", self.files, "one file per rank")
        require(len(set(self.ranks)) == len(self.ranks) and min(self.ranks) >= 0, "ranks", self.ranks, "distinct ranks")
        require(
            4096 <= self.slot_size_bytes <= _GCM_LIMIT_BYTES,
            "slot_size_bytes",
            self.slot_size_bytes,
            "4096 to 2**36-32",
        )
        require(self.max_age_s > 0, "max_age_s", self.max_age_s, "more than 0 s")
        require(self.slots is None or self.slots > 0, "slots", self.slots, "at least 1")
        require(self.io_depth > 0, "io_depth", self.io_depth, "at least 1")
        require(
            self.seal_slots or self.salt_policy != "PerTenant", "salt_policy", self.salt_policy, "PerTenant needs seals"
        )


def _config(marker: Marker, directory_fd: int, rank: int | None, options: dict[str, Any]) -> StoreConfig:
    ranks = tuple(range(marker.ranks)) if rank is None else (rank,)
    if len(marker.slot_files) != marker.ranks or ranks[-1] >= marker.ranks or ranks[0] < 0:
        raise EngineError(
            f"the volume has {marker.ranks} ranks and {len(marker.slot_files)} slot files",
            obj=f"rank {ranks[-1]}",
            remedy="start as many ranks as the tier declares",
        )
    for name in marker.slot_files:
        if not name or "/" in name or name in {".", ".."}:
            raise EngineError("not a plain file name", obj=f"slot_files: {name!r}", remedy="provision the volume again")
    return StoreConfig(
        files=tuple(marker.slot_files[number] for number in ranks),
        ranks=ranks,
        slot_size_bytes=marker.slot_size_bytes,
        slots=marker.bytes_per_rank // marker.slot_size_bytes,
        tier_uid=marker.tier_uid,
        volume_id=marker.volume_id,
        salt_policy=marker.salt_policy,
        max_age_s=marker.max_age_s,
        seal_slots=marker.seal_slots,
        directory_fd=directory_fd,
        **options,
    )


def _refuse_change(same: bool, root: str, root_fd: int, slots_fd: int) -> None:
    now, held, slots = os.stat(root, follow_symlinks=False), os.fstat(root_fd), os.fstat(slots_fd)
    if not same or (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino) or slots.st_dev != held.st_dev:
        raise EngineError("the volume changed while it was opened", obj=root, remedy="start again")


def config_from_marker(
    marker_path: str, *, nonce: str | None = None, pod_uid: str | None = None, rank: int | None = None, **options: Any
) -> StoreConfig:
    """Check the marker and open its slot directory; the caller closes `directory_fd` of the result.

    `nonce` or `pod_uid`: by what this process knows that the volume is its own (check_marker).
    `rank`: the one rank of this process; None for all. `options`: fields of StoreConfig that a marker does not set.
    Raises VerificationFailed (check_marker), EngineError (a rank that the volume lacks, fields out of range).
    """
    marker = check_marker(marker_path, nonce=nonce, pod_uid=pod_uid)
    root = os.path.dirname(os.path.abspath(marker_path))
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        root_fd = os.open(root, flags | os.O_PATH)  # the root's own list of names is not the consumer's to read
    except OSError as error:
        raise EngineError(f"cannot open the volume: {error.strerror}", obj=root, remedy="check its owner") from error
    try:
        slots_fd = os.open(SLOTS_DIRECTORY, flags | os.O_RDONLY, dir_fd=root_fd)
        try:
            # The path may have been mounted over between the check and the open: what is open must be what the
            # marker, read again, belongs to.
            again = check_marker(marker_path, nonce=nonce, pod_uid=pod_uid)
            _refuse_change(again == marker, root, root_fd, slots_fd)
            return _config(marker, slots_fd, rank, options)
        except BaseException:
            os.close(slots_fd)
            raise
    except OSError as error:
        raise EngineError(
            f"cannot open the slot directory: {error.strerror}", obj=root, remedy="run as the consumer's user"
        ) from error
    finally:
        os.close(root_fd)


def config_from_environment(**options: Any) -> StoreConfig:
    """As `config_from_marker`, from KVTIER_MARKER, and KVTIER_NONCE (`kvtier run`) or KVTIER_POD_UID (an injected pod).

    KVTIER_SLOT_FILE, when set, names the one slot file of this process, and so its rank.
    """
    path, nonce, pod_uid = (os.environ.get(f"KVTIER_{name}") for name in ("MARKER", "NONCE", "POD_UID"))
    missing = "KVTIER_MARKER" if not path else None if nonce or pod_uid else "KVTIER_NONCE, or KVTIER_POD_UID in a pod,"
    if not path or missing:
        raise EngineError(
            f"{missing} is not set",
            obj="environment",
            remedy="start the process with 'kvtier run', or in a pod of the tier, with its uid by the downward API",
        )
    own = os.environ.get("KVTIER_SLOT_FILE")
    if own is None:
        return config_from_marker(path, nonce=nonce, pod_uid=pod_uid, **options)
    name = os.path.basename(own)
    files = check_marker(path, nonce=nonce, pod_uid=pod_uid).slot_files
    if name not in files:
        raise EngineError("not a slot file of this volume", obj=f"KVTIER_SLOT_FILE={own!r}", remedy=f"one of {files}")
    return config_from_marker(path, nonce=nonce, pod_uid=pod_uid, rank=files.index(name), **options)
