"""The status of a tier on this host, and the files that hold it: `<state_dir>/status/<namespace>_<name>.json`.

A status file is a KVCacheTier with `spec` and `status`. It is also the durable memory that a manifest declared the tier: a tier
without one was never declared here (`kvtier run --tier-file`), and is never taken for a removed one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from kvtier_api.documents import parse_object
from kvtier_api.errors import KvtierError, NotFound
from kvtier_api.meta import Condition
from kvtier_api.tier import EncryptionBackend, KVCacheTier, KVCacheTierStatus, LastErasure, VolumeCounts
from kvtier_api.volume import VolumeState
from kvtier_node.conditions import TierFacts, findings, to_conditions
from kvtier_node.ledger import VolumeRow
from kvtier_node.manifests import key_of
from kvtier_node.paths import AllowedRoots, Directory
from kvtier_node.receipts import Receipt

__all__ = ["StatusFiles", "residual_bytes", "status_of"]

_LIMIT_BYTES: Final = 1 << 20
_SUFFIX: Final = ".json"
_LEFT: Final = frozenset({VolumeState.DYING, VolumeState.ERASING, VolumeState.FAILED})


def residual_bytes(rows: Sequence[VolumeRow]) -> int:
    """Slot bytes of volumes whose consumer ended and whose erasure is not proven yet."""
    return sum(row.ranks * row.bytes_per_rank for row in rows if row.state in _LEFT)


def status_of(facts: TierFacts, before: Sequence[Condition], last: Receipt | None, nodes: int = 1) -> KVCacheTierStatus:
    """The tier's status from measured facts; `before` are its conditions so far, `last` its newest receipt."""
    rows = [volume.row for volume in facts.volumes]
    used = [row for row in rows if row.state is VolumeState.IN_USE]
    backends = {row.backend for row in rows} or {
        backend for backend in (facts.check.backend if facts.check else None,) if backend is not None
    }
    return KVCacheTierStatus(
        observed_generation=facts.tier.metadata.generation,
        nodes=nodes if rows else 0,
        volumes=_counts(rows, facts.abandoned),
        bytes_per_rank=int(facts.tier.spec.size_per_rank),
        bytes_total=sum(row.ranks * row.bytes_per_rank for row in rows),
        residual_bytes=residual_bytes(rows),
        oldest_block_time=min((datetime.fromisoformat(row.state_since) for row in used), default=None),
        last_erasure=_last_erasure(last),
        backend=EncryptionBackend(backends.pop().value) if len(backends) == 1 else None,
        conditions=to_conditions(findings(facts), before, facts),
    )


def _counts(rows: Sequence[VolumeRow], abandoned: int) -> VolumeCounts:
    states = [row.state for row in rows]
    return VolumeCounts(
        total=len(states),
        ready=states.count(VolumeState.READY),
        in_use=states.count(VolumeState.IN_USE),
        erasing=states.count(VolumeState.ERASING) + states.count(VolumeState.DYING),
        failed=states.count(VolumeState.FAILED),
        abandoned=abandoned,
    )


def _last_erasure(receipt: Receipt | None) -> LastErasure | None:
    if receipt is None:
        return None
    return LastErasure.model_validate(
        {
            "time": receipt.end,
            "trigger": receipt.trigger,
            "node_name": receipt.node_name,
            "volume_id": receipt.volume_id,
            "receipt_id": receipt.id,
        }
    )


class StatusFiles:
    """The directory of status files. Written as one step each, and only when the content changes."""

    def __init__(self, state_dir: str) -> None:
        self._path = f"{state_dir}/status"
        self._allowed = AllowedRoots([state_dir])
        self._written: dict[str, bytes] = {}

    def _open(self, *, create: bool) -> Directory:
        return self._allowed.open_directory(self._path, create=create, mode=0o700)

    @staticmethod
    def _name(key: str) -> str:
        return key.replace("/", "_", 1) + _SUFFIX  # neither part can hold an underscore

    def load(self) -> tuple[dict[str, KVCacheTier], list[tuple[str, KvtierError]]]:
        """Every tier that was declared here, and the files that cannot be read. Raises UnsafePath, NotPermitted."""
        tiers: dict[str, KVCacheTier] = {}
        bad: list[tuple[str, KvtierError]] = []
        try:
            directory = self._open(create=False)
        except NotFound:
            return tiers, bad
        with directory:
            for name in directory.names():
                if name.startswith(".") or not name.endswith(_SUFFIX):
                    continue
                try:
                    data = json.loads(directory.read_file(name, _LIMIT_BYTES))
                    tier = parse_object(data, source=f"{self._path}/{name}", kind=KVCacheTier)
                    tiers[key_of(tier)] = tier
                except KvtierError as error:
                    bad.append((f"{self._path}/{name}", error))
                except ValueError as error:
                    bad.append((f"{self._path}/{name}", KvtierError(f"not JSON: {error}", obj=name)))
        return tiers, bad

    def write(self, tier: KVCacheTier) -> bool:
        """Put the tier with its status on disk; whether there was anything to write. Raises KvtierError."""
        key = key_of(tier)
        content = (json.dumps(tier.to_manifest(), indent=1, sort_keys=True) + "\n").encode()
        if self._written.get(key) == content:
            return False
        with self._open(create=True) as directory:
            directory.write_file_atomic(self._name(key), content, 0o600)
        self._written[key] = content
        return True

    def remove(self, key: str) -> None:
        """The tier is no longer declared, and nothing of it is left. Raises KvtierError."""
        self._written.pop(key, None)
        with self._open(create=True) as directory:
            try:
                directory.unlink(self._name(key))
            except NotFound:
                return
            directory.fsync()
