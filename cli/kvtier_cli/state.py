"""The state directory as a command reads it: the ledger if there is one, without making or rebuilding anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_api.tier import KVCacheTier
    from kvtier_node.ledger import Ledger

__all__ = ["declared_tiers", "existing_ledger", "known_tiers", "was_used"]


def was_used(state_dir: str) -> bool:
    """Whether kvtier ever ran with this state directory: it, or what it left when it was lost, is there.

    Raises NotPermitted where this user cannot tell: then nothing is known, and nothing may be claimed.
    """
    from kvtier_api.errors import NotPermitted

    for name in ("ledger.db", "ledger.mark", "receipts.jsonl"):
        try:
            os.lstat(f"{state_dir}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError as error:
            raise NotPermitted(
                "the state directory is another user's",
                obj=state_dir,
                remedy="run the command as that user (sudo kvtier …)",
            ) from error
        return True
    return False


@contextmanager
def existing_ledger(state_dir: str) -> Iterator[Ledger]:
    """The ledger of a state directory that was used. Raises NotFound, NotPermitted, LedgerError."""
    from kvtier_api.errors import NotFound
    from kvtier_node.ledger import Ledger

    if not was_used(state_dir):
        raise NotFound(
            "kvtier was never started with this state directory",
            obj=f"--state-dir {state_dir}",
            remedy="name the right one, or start 'kvtier node' or 'kvtier run'",
        )
    ledger = Ledger.open(state_dir, create=False)
    try:
        yield ledger
    finally:
        ledger.close()


def declared_tiers(state_dir: str, manifests: str) -> dict[str, KVCacheTier]:
    """Tiers by NAMESPACE/NAME: of the manifests, and of the status files where the tier is in force there."""
    from kvtier_node.manifests import ManifestDirectory
    from kvtier_node.status_files import StatusFiles

    return ManifestDirectory(manifests).scan().tiers | StatusFiles(state_dir).load()[0]


def known_tiers(ledger: Ledger, state_dir: str, manifests: str) -> set[str]:
    """Every tier that is declared, or that a volume or a receipt was ever of."""
    of_volumes = {row.tier_key for row in ledger.volumes()}
    of_receipts = {f"{item.tier.namespace}/{item.tier.name}" for item in ledger.receipts() if item.tier is not None}
    return of_volumes | of_receipts | set(declared_tiers(state_dir, manifests))
