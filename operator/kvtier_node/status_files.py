"""The status files of a host's tiers: `<state_dir>/status/<namespace>_<name>.json`.

A status file is a KVCacheTier with `spec` and `status`. It is also the durable memory that a manifest declared the tier, and
since when (`metadata.creationTimestamp`): a tier without one was never declared here (`kvtier run --tier-file`), and is never
taken for a removed one. What is in a status is left to `tier_status`.
"""

from __future__ import annotations

import json
from typing import Final

from kvtier_api.documents import parse_object
from kvtier_api.errors import KvtierError, NotFound
from kvtier_api.tier import KVCacheTier
from kvtier_node.manifests import key_of
from kvtier_node.paths import AllowedRoots, Directory

__all__ = ["StatusFiles"]

_LIMIT_BYTES: Final = 1 << 20
_SUFFIX: Final = ".json"


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

    def path_of(self, key: str) -> str:
        """Where the tier's status file is, if there is one."""
        return f"{self._path}/{self._name(key)}"

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
                except NotFound:
                    continue  # removed since it was listed
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
