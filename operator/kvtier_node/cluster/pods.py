"""A pod, as far as a volume needs it: from the API server's object to `PodFacts`. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from lightkube.models.core_v1 import Container, ContainerStatus, PodSecurityContext, SecurityContext
from lightkube.resources.core_v1 import Pod

from kvtier_node.csi.surroundings import ContainerUser, PodFacts

__all__ = ["pod_facts"]

_CLEAN: Final = frozenset({0, 143})
"""Exit codes of a container that ended by itself, or by the SIGTERM that it was asked to end with (128 + 15)."""


def pod_facts(pod: Pod, volume: str) -> PodFacts:
    """What is asked of `pod` for its volume called `volume`."""
    spec, metadata = pod.spec, pod.metadata
    if spec is None or metadata is None:
        return PodFacts("", None, {}, (), None, None)
    users = [container for container in _long_lived(pod) if _mounts(container, volume)]
    of_pod = spec.securityContext
    return PodFacts(
        uid=metadata.uid or "",
        node_name=spec.nodeName,
        labels=dict(metadata.labels or {}),
        users=tuple(_user(pod, container) for container in users),
        fs_group=of_pod.fsGroup if of_pod is not None else None,
        ended_cleanly=_ended_cleanly(pod, {container.name for container in users}),
    )


def _long_lived(pod: Pod) -> Iterator[Container]:
    """Containers, and those init containers that run beside them. An init container that has ended owns nothing."""
    if pod.spec is None:
        return
    yield from pod.spec.containers
    for container in pod.spec.initContainers or ():
        if container.restartPolicy == "Always":
            yield container


def _mounts(container: Container, volume: str) -> bool:
    return any(mount.name == volume for mount in container.volumeMounts or ())


def _user(pod: Pod, container: Container) -> ContainerUser:
    """The container's own security context stands above the pod's, field by field."""
    own = container.securityContext or SecurityContext()
    of_pod = (pod.spec.securityContext if pod.spec is not None else None) or PodSecurityContext()
    non_root = own.runAsNonRoot if own.runAsNonRoot is not None else of_pod.runAsNonRoot
    return ContainerUser(
        container.name,
        uid=own.runAsUser if own.runAsUser is not None else of_pod.runAsUser,
        gid=own.runAsGroup if own.runAsGroup is not None else of_pod.runAsGroup,
        non_root=bool(non_root),
    )


def _ended_cleanly(pod: Pod, names: set[str]) -> bool | None:
    status = pod.status
    if status is None or not names:
        return None
    found: list[ContainerStatus] = [
        state for state in [*(status.containerStatuses or ()), *(status.initContainerStatuses or ())]
        if state.name in names
    ]  # fmt: skip
    ends = [state.state.terminated if state.state is not None else None for state in found]
    if len(found) < len(names) or any(end is None for end in ends):
        return None
    return all(end is not None and end.exitCode in _CLEAN for end in ends)
