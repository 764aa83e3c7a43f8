"""Volumes beside what is known of their nodes now: can the node speak for the volume, and are the keys provably gone.

A node is heard when its Node object is Ready and, where the agents' pods are looked at, the agent's pod on it is Ready.
kubelet reports both without any write of kvtier's own, so a cluster at rest stays at rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvtier_api.meta import ConditionType
from kvtier_api.reasons import Reason
from kvtier_api.volume import BackendName
from kvtier_operator.facts import NodeFacts, VolumeFacts

__all__ = ["Place", "Surroundings", "keys_lost", "places", "unheard"]

_MEMORY_ONLY_KEYS: Final = frozenset({BackendName.DM_CRYPT, BackendName.FSCRYPT})


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`agents` maps nodes to whether their agent is ready; None where agents' pods are not looked at."""

    nodes: Mapping[str, NodeFacts]
    agents: Mapping[str, bool] | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A volume; why its node says nothing of it (empty: it does); what proves that its keys are gone (empty: nothing)."""

    volume: VolumeFacts
    unheard: str = ""
    keys_lost: str = ""
    silence: Reason = Reason.NODE_UNREACHABLE
    """Where it is unheard: what kind of silence that is."""

    @property
    def counts(self) -> bool:
        """Whether bytes of it may still be readable, as far as the controller can tell."""
        return not self.volume.is_final and not self.keys_lost


def unheard(node_name: str, around: Surroundings) -> str:
    """Why nothing can be measured on the node now; empty if it can."""
    node = around.nodes.get(node_name)
    if node is None:
        return f"node {node_name} is gone"
    if node.ready is not True:
        return f"node {node_name} is not Ready"
    if around.agents is not None and not around.agents.get(node_name, False):
        return f"no node agent is Ready on {node_name}"
    return ""


def keys_lost(volume: VolumeFacts, around: Surroundings) -> str:
    """The proof that the kernel which held the volume's keys no longer runs; empty where there is none.

    Keys of DmCrypt and Fscrypt are in that kernel's memory only. The same machine under another boot id has lost them. Another
    machine under the same name proves nothing: the system uuid must be the recorded one, or, where the agent recorded
    none, the Node object must be older than the volume.
    """
    node = around.nodes.get(volume.node_name)
    if node is None or volume.backend not in _MEMORY_ONLY_KEYS or volume.is_final:
        return ""
    if not volume.boot_id or not node.boot_id or node.boot_id == volume.boot_id:
        return ""
    if volume.system_uuid is not None:
        if volume.system_uuid.lower() != node.system_uuid.lower():
            return ""
    elif node.created_at > volume.created_at:
        return ""
    return f"node {node.name} runs under boot id {node.boot_id}; the keys were in the memory of boot {volume.boot_id}"


def places(volumes: Iterable[VolumeFacts], around: Surroundings) -> list[Place]:
    """In the order of their names. A node that is heard answers for itself: its agent proves and signs, not the controller.

    But for a volume that its ledger does not have nobody answers, for as long as that is so.
    """
    found = []
    for volume in sorted(volumes, key=lambda it: it.name):
        why, silence = "" if volume.is_final else unheard(volume.node_name, around), Reason.NODE_UNREACHABLE
        if not why and not volume.is_final and (stranger := _not_in_ledger(volume)):
            why, silence = stranger, Reason.NOT_IN_LEDGER
        found.append(Place(volume, why, keys_lost(volume, around) if why else "", silence))
    return found


def _not_in_ledger(volume: VolumeFacts) -> str:
    """What its node's agent wrote, if it wrote that."""
    seen = volume.conditions.get(ConditionType.SCRUBBED.value)
    return seen.message if seen is not None and seen.reason == Reason.NOT_IN_LEDGER else ""
