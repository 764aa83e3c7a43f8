"""What kubelet asks for, checked: the one place that reads requests field by field.

The checks are those that csi-sanity makes, and those that keep a pod to what it may say: the name of a tier, nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from kvtier_api.errors import InvalidResource, NotFound
from kvtier_node.csi.codes import BadCall
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.names import DRIVER, TIER_ATTRIBUTE
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.pods.target import TargetPath

__all__ = ["PublishCall", "StatsCall", "UnpublishCall"]

_KUBELETS: Final = "csi.storage.k8s.io/"
_VOLUME_ID: Final = re.compile(r"[-._A-Za-z0-9]{1,128}")
_TIER_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_ONE_NODE_WRITES: Final = frozenset(
    {
        pb.VolumeCapability.AccessMode.SINGLE_NODE_WRITER,
        pb.VolumeCapability.AccessMode.SINGLE_NODE_SINGLE_WRITER,
        pb.VolumeCapability.AccessMode.SINGLE_NODE_MULTI_WRITER,
    }
)


def _volume_id(value: str) -> str:
    if not value:
        raise BadCall("missing", obj="volume_id")
    if not _VOLUME_ID.fullmatch(value):
        raise BadCall("not an id of kubelet's making", obj=f"volume_id {value[:200]!a}")
    return value


def _target(value: str, kubelet: str) -> TargetPath:
    if not value:
        raise BadCall("missing", obj="target_path")
    try:
        return TargetPath.parse(value, kubelet=kubelet)
    except InvalidResource as error:
        raise BadCall(error.cause, obj=error.obj, remedy=error.remedy) from error


@dataclass(frozen=True)
class PublishCall:
    """A volume for one pod, of the tier that the pod names."""

    pod: PodIdentity
    target: TargetPath
    tier: str

    @property
    def volume_id(self) -> str:
        return self.pod.csi_volume_id

    @classmethod
    def of(cls, request: pb.NodePublishVolumeRequest, *, kubelet: str) -> Self:
        """Raises BadCall for a call that is not of a pod's own ephemeral volume."""
        volume_id = _volume_id(request.volume_id)
        if not request.target_path:
            raise BadCall("missing", obj="target_path")
        _check_capability(request)
        target = _target(request.target_path, kubelet)
        context = dict(request.volume_context)
        _check_context(context, target)
        return cls(
            PodIdentity(
                uid=context[f"{_KUBELETS}pod.uid"],
                namespace=context[f"{_KUBELETS}pod.namespace"],
                name=context[f"{_KUBELETS}pod.name"],
                csi_volume_id=volume_id,
                target=str(target),
            ),
            target,
            context[TIER_ATTRIBUTE],
        )


def _check_capability(request: pb.NodePublishVolumeRequest) -> None:
    if not request.HasField("volume_capability"):
        raise BadCall("missing", obj="volume_capability")
    capability = request.volume_capability
    if not capability.HasField("mount"):
        raise BadCall("only mounted volumes", obj="volume_capability", remedy="volumeMode: Block is not possible")
    if capability.access_mode.mode not in _ONE_NODE_WRITES:
        raise BadCall("the volume is for one node", obj="volume_capability.access_mode")
    if capability.mount.fs_type not in ("", "ext4"):
        raise BadCall("the tier decides", obj=f"fsType {capability.mount.fs_type[:40]!a}", remedy="leave it out")
    if capability.mount.mount_flags:
        raise BadCall("the tier decides", obj="mount_flags", remedy="leave them out")
    if request.readonly:
        raise BadCall("a store that nobody can write is none", obj="readOnly", remedy="leave it out")
    if request.secrets:
        raise BadCall("no secret is needed", obj="nodePublishSecretRef", remedy="leave it out")


def _check_context(context: dict[str, str], target: TargetPath) -> None:
    if context.get(f"{_KUBELETS}ephemeral") != "true":
        raise BadCall(
            "only ephemeral inline volumes", obj="volume", remedy=f"write csi: {{driver: {DRIVER}}} in the pod itself"
        )
    missing = [name for name in ("pod.uid", "pod.namespace", "pod.name") if not context.get(f"{_KUBELETS}{name}")]
    if missing:
        raise BadCall(
            f"kubelet does not say which pod it is for ({', '.join(missing)})",
            obj=f"CSIDriver {DRIVER}",
            remedy="set podInfoOnMount: true",
        )
    if context[f"{_KUBELETS}pod.uid"] != target.pod_uid:
        raise BadCall("is another pod's", obj=f"target_path {target}")
    unknown = sorted(key for key in context if key != TIER_ATTRIBUTE and not key.startswith(_KUBELETS))
    if unknown:
        raise BadCall(
            "not an attribute of this driver",
            obj=f"volumeAttributes.{unknown[0][:80]}",
            remedy=f"give {TIER_ATTRIBUTE} alone: size, path and keys come from the tier",
        )
    tier = context.get(TIER_ATTRIBUTE, "")
    if not _TIER_NAME.fullmatch(tier):
        raise BadCall(
            "no name of a KVCacheTier" if tier else "missing",
            obj=f"volumeAttributes.{TIER_ATTRIBUTE}" + (f" {tier[:80]!a}" if tier else ""),
            remedy="write the name of a KVCacheTier in the pod's namespace",
        )


@dataclass(frozen=True)
class UnpublishCall:
    volume_id: str
    target: TargetPath

    @classmethod
    def of(cls, request: pb.NodeUnpublishVolumeRequest, *, kubelet: str) -> Self:
        """Raises BadCall."""
        return cls(_volume_id(request.volume_id), _target(request.target_path, kubelet))


@dataclass(frozen=True)
class StatsCall:
    volume_id: str
    target: TargetPath

    @classmethod
    def of(cls, request: pb.NodeGetVolumeStatsRequest, *, kubelet: str) -> Self:
        """Raises BadCall for what is missing, NotFound for a path that is no volume's of kubelet's."""
        volume_id = _volume_id(request.volume_id)
        if not request.volume_path:
            raise BadCall("missing", obj="volume_path")
        try:
            return cls(volume_id, TargetPath.parse(request.volume_path, kubelet=kubelet))
        except InvalidResource as error:
            raise NotFound(error.cause, obj=error.obj) from error
