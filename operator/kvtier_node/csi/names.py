"""The driver's names: part of the interface with kubelet, pods and the chart."""

from __future__ import annotations

from typing import Final

__all__ = ["DRIVER", "REGISTRATION_SOCKET", "SUPPORTED_VERSIONS", "TIER_ATTRIBUTE"]

DRIVER: Final = "node.kvtier.dev"
REGISTRATION_SOCKET: Final = f"{DRIVER}-reg.sock"
SUPPORTED_VERSIONS: Final = ("1.0.0",)
"""kubelet wants a CSI version of its own major number here (pkg/volume/csi, `validateVersions`)."""
TIER_ATTRIBUTE: Final = "tier"
"""The one volume attribute: everything else comes from the tier."""
