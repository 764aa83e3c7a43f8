"""The fence of part (b): `kvtier run` with a tier, a state directory and a root of its own, all in one work folder.

The volume backend is the best that works here: `Auto` as root, and `SealOnly` where there is none or no root; what that
protects less is said in words. The erasure is read from the ledger, and its receipt verified offline.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import yaml

from kvtier_api.errors import BackendUnavailable, EraseIncomplete
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import BackendName, VolumeState
from kvtier_demo.protected import Erasure
from kvtier_node.ledger import VolumeRow
from kvtier_node.places import IMAGE_NAME, MOUNT_NAME
from kvtier_node.provisioning import choose_backend
from kvtier_node.receipts import export_chain, verify_chain
from kvtier_node.recovery import open_node, recover

__all__ = ["HostFence", "HostProtection"]

_WEAKER: Final = {
    BackendName.SEAL_ONLY: [
        "no volume encryption: the slots are sealed by the engine, and nothing else is",
        "names, sizes and times of the slot files are in the clear",
        "a writer that does not seal is found by sampling only, after it wrote",
    ],
    BackendName.HOST_ATTESTED: ["the key is the host's: an erasure overwrites, and destroys no key"],
}
_POLL_S: Final = 0.01


def _manifest(folder: str, backend: str, block_bytes: int, bytes_per_rank: int) -> dict[str, object]:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {
            "path": f"{folder}/tiers/demo",
            "sizePerRank": str(bytes_per_rank),
            "ranks": 1,
            "slotSize": f"{-(-block_bytes // 1024)}Ki",
            "encryption": {"backend": backend, "sealSlots": True},
            "governance": {"owner": "kvtier demo", "purpose": "demonstration"},
        },
    }


class HostFence:
    """One run of `kvtier run` in `folder`; see `kvtier_demo.protected.Fence`."""

    def __init__(self, folder: str, tier_file: Path) -> None:
        self._folder = folder
        self._tier_file = tier_file
        self._node = open_node(f"{folder}/state", [f"{folder}/tiers"])

    @property
    def command_prefix(self) -> Sequence[str]:
        return [
            sys.executable, "-m", "kvtier_cli.main", "run", "--tier-file", str(self._tier_file),
            "--state-dir", f"{self._folder}/state", "--root", f"{self._folder}/tiers", "--",
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def backend(self) -> str:
        return self._row().backend.value

    @property
    def weaker(self) -> Sequence[str]:
        return _WEAKER.get(self._row().backend, [])

    def _row(self) -> VolumeRow:
        return self._node.ledger.volumes()[-1]

    def raw_files(self) -> Sequence[Path]:
        place = Path(self._row().place)
        if self._row().backend in (BackendName.DM_CRYPT, BackendName.FSCRYPT):
            return [place / IMAGE_NAME]
        return sorted((place / MOUNT_NAME / "slots").glob("*"))

    def wait_erased(self, *, deadline_s: float) -> Erasure:
        until = time.monotonic() + deadline_s
        while (row := self._row()).state is not VolumeState.ERASED:
            if time.monotonic() > until:
                raise EraseIncomplete(
                    f"still {row.state} after {deadline_s:g} s", obj=row.place, remedy="see kvtier status"
                )
            time.sleep(_POLL_S)
        at = time.monotonic()
        receipt = self._node.ledger.receipts()[-1]
        key = self._node.identity.public_key
        chain = verify_chain(list(export_chain(self._node.ledger, self._node.identity)), public_key=key)
        return Erasure(receipt.id, chain.ok and receipt.volume_id == row.volume_id, at)

    def close(self) -> None:
        """Erase whatever a failed run left, so that the demonstration leaves nothing."""
        left = recover(self._node)
        self._node.ledger.close()
        if left.failed:
            raise left.failed[0][1]


class HostProtection:
    """Makes fences on this host, below `parent`: a directory on a disk (default: /var/tmp)."""

    def __init__(self, parent: str = "/var/tmp") -> None:  # noqa: S108  mkdtemp makes a private folder in it
        self._parent = parent

    @contextmanager
    def fence(self, *, block_bytes: int, bytes_per_rank: int) -> Iterator[HostFence]:
        with tempfile.TemporaryDirectory(prefix="kvtier-demo-", dir=self._parent) as folder:
            os.chmod(folder, 0o711)  # noqa: S103  the consumer may be another user; it must pass through
            os.mkdir(f"{folder}/tiers", 0o755)
            tier_file = Path(folder, "tier.yaml")
            backend = "Auto" if self._auto_works(folder, block_bytes, bytes_per_rank) else BackendName.SEAL_ONLY.value
            tier_file.write_text(
                yaml.safe_dump(_manifest(folder, backend, block_bytes, bytes_per_rank)), encoding="utf-8"
            )
            fence = HostFence(folder, tier_file)
            try:
                yield fence
            finally:
                fence.close()

    @staticmethod
    def _auto_works(folder: str, block_bytes: int, bytes_per_rank: int) -> bool:
        tier = KVCacheTier.model_validate(_manifest(folder, "Auto", block_bytes, bytes_per_rank))
        node = open_node(f"{folder}/state", [f"{folder}/tiers"])
        try:
            with node.places.tier_directory(tier.spec.path, create=True) as directory:
                choose_backend(tier, directory, device=tier.spec.device)
        except BackendUnavailable:
            return False
        finally:
            node.ledger.close()
        return True
