"""Volume backends, one module each behind one interface (`base.Backend`), and the choice between them by measurement."""

from __future__ import annotations

from typing import Final

from kvtier_api.errors import BackendUnavailable
from kvtier_api.volume import BackendName
from kvtier_node.backends.base import Backend
from kvtier_node.backends.dmcrypt import DmCrypt
from kvtier_node.backends.fscrypt import Fscrypt
from kvtier_node.backends.host_attested import HostAttested
from kvtier_node.backends.seal_only import SealOnly
from kvtier_node.paths import Directory

__all__ = ["AUTO_ORDER", "BACKENDS", "choose"]

BACKENDS: Final[dict[BackendName, Backend]] = {
    backend.name: backend for backend in (DmCrypt(), Fscrypt(), HostAttested(), SealOnly())
}
AUTO_ORDER: Final = (BackendName.DM_CRYPT, BackendName.FSCRYPT, BackendName.HOST_ATTESTED)
"""`Auto` tries these in turn. Never SealOnly: that is a promise about the engine, which only the tier's author can make."""


def choose(wanted: BackendName | None, tier: Directory, *, device: str | None) -> tuple[Backend, dict[str, str]]:
    """The backend to use in the tier's directory, and every probed backend's reason. `wanted` None means `Auto`.

    Raises BackendUnavailable with all the reasons.
    """
    reasons: dict[str, str] = {}
    for name in AUTO_ORDER if wanted is None else (wanted,):
        probe = BACKENDS[name].probe(tier, device=device)
        reasons[name] = probe.reason
        if probe.ok:
            return BACKENDS[name], reasons
    raise BackendUnavailable(
        "no volume backend works here: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        obj=tier.path,
        remedy="load dm-crypt, use a kernel with fscrypt, encrypt the host's volume, or set encryption.backend: SealOnly"
        " for an engine that seals its slots",
    )
