"""This node, or this `kvtier run`: the ledger, the identity, the places and the name that everything else works with."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Self

from kvtier_api.tier import KVCacheTier
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger, Observer
from kvtier_node.places import Places

__all__ = ["Node", "namespace_of", "uid_of"]

DEFAULT_NAMESPACE = "default"


def namespace_of(tier: KVCacheTier) -> str:
    """The tier's namespace; a manifest without one is in `default`, as for kubectl."""
    return tier.metadata.namespace or DEFAULT_NAMESPACE


def uid_of(tier: KVCacheTier) -> str:
    """The API server's uid; on a host without one, the name, which is then unique by itself."""
    return tier.metadata.uid or f"{namespace_of(tier)}/{tier.metadata.name}"


@dataclass
class Node:
    state_dir: str
    name: str
    ledger: Ledger
    identity: NodeIdentity
    places: Places
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "kvtier": version("kvtier"),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
    )

    @staticmethod
    def default_name() -> str:
        """The host's name."""
        return platform.node()

    @classmethod
    def open(
        cls, state_dir: str, roots: Sequence[str], *, name: str | None = None, observers: Sequence[Observer] = ()
    ) -> Self:
        """Open the node's state. Raises LedgerError for a damaged ledger (`recovery.open_node` rebuilds it), UnsafePath."""
        identity = NodeIdentity.load_or_create(state_dir)
        ledger = Ledger.open(state_dir, observers=observers)
        return cls(state_dir, name or cls.default_name(), ledger, identity, Places(roots, identity))
