"""Whether a pod may use a tier, and who owns the slot files. Pure functions of what the API server says."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier_api.errors import InvalidResource, NotPermitted
from kvtier_api.tier import KVCacheTier
from kvtier_node.csi.surroundings import PodFacts
from kvtier_node.pods.consumer import PodIdentity

__all__ = ["authorise", "owner_of"]


def authorise(tier: KVCacheTier, identity: PodIdentity, pod: PodFacts, node_name: str) -> None:
    """Raise NotPermitted or InvalidResource unless this pod may have a volume of `tier` here."""
    key = f"KVCacheTier {tier.key}"
    if tier.metadata.namespace != identity.namespace:
        raise NotPermitted(f"is not of the pod's namespace {identity.namespace}", obj=key)
    if tier.metadata.deletion_timestamp is not None:
        raise InvalidResource("is being deleted", obj=key, remedy="wait until it is gone and declare it again")
    if pod.node_name not in (None, node_name):
        raise NotPermitted(f"is on node {pod.node_name}, and this is {node_name}", obj=f"pod {identity.name}")
    if not tier.spec.selects_workload(pod.labels):
        raise NotPermitted(
            "spec.workloadSelector does not select this pod",
            obj=key,
            remedy="give the pod the labels that it wants, or widen the selector",
        )


def check_node(tier: KVCacheTier, labels: Mapping[str, str], node_name: str) -> None:
    """Raise InvalidResource unless the tier may have volumes on this node."""
    if not tier.spec.selects_node(labels):
        wanted = ", ".join(f"{key}={value}" for key, value in sorted((tier.spec.node_selector or {}).items()))
        raise InvalidResource(
            f"spec.nodeSelector ({wanted}) does not select node {node_name}",
            obj=f"KVCacheTier {tier.key}",
            remedy="give the pod the same nodeSelector",
        )


def owner_of(pod: PodFacts) -> tuple[int, int]:
    """uid and gid of the slot files: the user that the containers which mount the volume run as, and the pod's fsGroup.

    Where the spec leaves the user to the image it is taken to be root. Raises InvalidResource where that cannot be, and where
    the containers differ: a slot file has one owner.
    """
    unknown = [user for user in pod.users if user.uid is None and user.non_root]
    if unknown:
        raise InvalidResource(
            "runs as a user that only its image names, and the slot files need an owner",
            obj=f"container {unknown[0].container}",
            remedy="set securityContext.runAsUser",
        )
    uids = {user.uid or 0: user.container for user in pod.users}
    if len(uids) > 1:
        who = ", ".join(f"{container} as uid {uid}" for uid, container in sorted(uids.items()))
        raise InvalidResource(
            f"containers of several users mount the volume: {who}",
            obj="pod",
            remedy="let one container mount it, or give all of them the same runAsUser",
        )
    groups = [user.gid for user in pod.users if user.gid is not None]
    gid = pod.fs_group if pod.fs_group is not None else (groups[0] if groups else 0)
    return next(iter(uids), 0), gid
