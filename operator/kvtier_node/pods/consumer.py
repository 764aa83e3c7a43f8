"""A pod that uses a volume, and whether it still does. Only what this node shows counts, never the API's answer.

kubelet keeps `<kubelet>/pods/<uid>` for as long as the pod has anything on the node, and removes it last. So a pod is gone when
that directory is gone, when kubelet has taken the volume back (`NodeUnpublishVolume`), or when the node was restarted.
A kubelet directory that cannot be seen at all proves nothing.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any, Self

from kvtier_api.erasure import Trigger
from kvtier_node.kernel.processes import boot_id
from kvtier_node.pods.target import TargetPath
from kvtier_node.receipts import utc_now

__all__ = ["PodConsumer", "PodIdentity", "pod_of"]


@dataclass(frozen=True)
class PodIdentity:
    """The pod as kubelet names it, and the volume as kubelet names it: `volume_id` is stable for the pod's life."""

    uid: str
    namespace: str
    name: str
    csi_volume_id: str
    target: str
    """Where kubelet wants the volume: an absolute path."""

    def record(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        return cls(**{field.name: str(record[field.name]) for field in dataclasses.fields(cls)})


@dataclass(frozen=True)
class PodConsumer:
    """`ended`: kubelet took the volume back, or an erasure was asked for; then what trigger its erasure has."""

    pod: PodIdentity
    boot_id: str
    ended: Trigger | None = None
    ended_at: str | None = None

    @classmethod
    def of(cls, pod: PodIdentity) -> Self:
        return cls(pod, boot_id())

    @classmethod
    def from_record(cls, record: dict[str, Any] | None) -> Self | None:
        """The consumer on record in the ledger, or None where there is none of this kind."""
        if not record or record.get("kind") != "pod":
            return None
        ended = record.get("ended")
        return cls(
            PodIdentity.from_record(record),
            str(record["boot_id"]),
            Trigger(ended) if ended else None,
            record.get("ended_at"),
        )

    def record(self) -> dict[str, Any]:
        end = {"ended": self.ended.value, "ended_at": self.ended_at} if self.ended else {}
        return {"kind": "pod", **self.pod.record(), "boot_id": self.boot_id, **end}

    def with_end(self, trigger: Trigger) -> Self:
        """The same, ended now; an end that is on record already stays."""
        return self if self.ended else dataclasses.replace(self, ended=trigger, ended_at=utc_now())

    @property
    def title(self) -> str:
        return f"pod {self.pod.namespace}/{self.pod.name}"

    def alive(self) -> bool:
        """Whether the pod still has the volume, as far as this node shows; what cannot be told counts as alive."""
        if self.ended is not None or self.boot_id != boot_id():
            return False
        path = TargetPath.parse(self.pod.target)
        try:
            os.lstat(f"{path.pods}/{path.pod_uid}")
        except FileNotFoundError:
            return not os.path.isdir(path.pods)  # kubelet's directory itself is not to be seen: no proof
        except OSError:
            return True
        return True


def pod_of(consumer: dict[str, Any] | None, facts: dict[str, Any]) -> PodIdentity | None:
    """The pod that a volume on record is made for, before it has a consumer too; None for a volume of another kind."""
    if consumer is not None:
        found = PodConsumer.from_record(consumer)
        return found.pod if found is not None else None
    record = facts.get("pod")
    return PodIdentity.from_record(record) if record else None
