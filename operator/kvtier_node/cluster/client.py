"""The connection to the API server, the kinds that are used there, and what its answers mean.

The only modules that name lightkube are those of this package. A service account's token is read anew when it was rotated.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError
from lightkube.generic_resource import GenericNamespacedResource, create_namespaced_resource

from kvtier_api.erasure import KVCacheErasure
from kvtier_api.errors import Busy, InvalidResource, KvtierError, NotFound, NotPermitted, UsageError
from kvtier_api.meta import GROUP, VERSION, Resource
from kvtier_api.missing_right import missing_right
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import KVCacheVolume
from kvtier_node.cluster.errors import ApiUnavailable, NamespaceEnding, RightMissing

__all__ = ["ERASURES", "FIELD_MANAGER", "TIERS", "VOLUMES", "ClusterOptions", "Gone", "Kind", "connect", "translated"]

FIELD_MANAGER: Final = "kvtier-node"
_TIMEOUT_S: Final = 10.0
_TEXT_LIMIT: Final = 500
_KEPT_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A watch only listens: it would never learn that the other end is gone without a word, as behind a partition. Seconds."""

Kind = type[GenericNamespacedResource]


def _kind(model: type[Resource]) -> Kind:
    return create_namespaced_resource(GROUP, VERSION, model.__name__, model.plural)


TIERS: Final = _kind(KVCacheTier)
VOLUMES: Final = _kind(KVCacheVolume)
ERASURES: Final = _kind(KVCacheErasure)


class Gone(ApiUnavailable):
    """410: the version that was asked for is too old. List again."""


@dataclass(frozen=True)
class ClusterOptions:
    """`kubeconfig` None: the pod's own service account."""

    kubeconfig: str | None = None


def connect(options: ClusterOptions) -> AsyncClient:
    """Nothing is sent yet. Raises UsageError for a kubeconfig that cannot be used."""
    try:
        chosen = _configuration(options)
        verified = verify_cluster(chosen.cluster, chosen.user or User(), chosen.abs_file, trust_env=False)
        return AsyncClient(
            config=chosen,
            timeout=httpx2.Timeout(_TIMEOUT_S),
            field_manager=FIELD_MANAGER,
            trust_env=False,
            transport=httpx2.AsyncHTTPTransport(verify=verified, trust_env=False, socket_options=_KEPT_ALIVE),
        )
    except (ConfigError, OSError, ssl.SSLError, msgspec.MsgspecError, KeyError, AssertionError) as error:
        raise UsageError(
            f"cannot be used: {error}",
            obj=f"kubeconfig {options.kubeconfig}" if options.kubeconfig else "the service account of this pod",
            remedy="give --kubeconfig FILE, or run in a pod with a service account",
        ) from error


def _configuration(options: ClusterOptions) -> SingleConfig:
    """Raises ConfigError, OSError."""
    if options.kubeconfig is None:
        config = KubeConfig.from_service_account().get()
    else:
        config = KubeConfig.from_file(options.kubeconfig).get()
    if config is None:
        raise ConfigError("it has no current context")
    return config


_BY_CODE: Final[dict[int, type[KvtierError]]] = {
    400: InvalidResource,
    401: ApiUnavailable,  # a token that was just rotated, or revoked: it is tried again
    403: NotPermitted,
    404: NotFound,
    409: Busy,
    410: Gone,
    422: InvalidResource,
}


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise kvtier's errors for what the API server, or the way to it, says. `what` names the object."""
    try:
        yield
    except ApiError as error:
        kind = _meaning(error)
        raise kind(f"the API server says: {(error.status.message or '')[:_TEXT_LIMIT]}", obj=what) from error
    except httpx2.HTTPStatusError as error:
        kind = _BY_CODE.get(error.response.status_code, ApiUnavailable)
        raise kind(f"the API server answers {error.response.status_code}", obj=what) from error
    except (httpx2.HTTPError, httpx2.StreamError, OSError, msgspec.MsgspecError, ConfigError) as error:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ApiUnavailable(
            f"the API server cannot be reached ({text[:_TEXT_LIMIT]})", obj=what, remedy="it is tried again"
        ) from error


def _meaning(error: ApiError) -> type[KvtierError]:
    if _namespace_ends(error):
        return NamespaceEnding
    if error.status.code == 403 and missing_right(error.status.message or ""):
        return RightMissing
    return _BY_CODE.get(error.status.code or 0, ApiUnavailable)


def _namespace_ends(error: ApiError) -> bool:
    """The API server's own cause (k8s.io/api/core/v1, `NamespaceTerminatingCause`)."""
    details = error.status.details
    causes = details.causes if details is not None else None
    return any(cause.reason == "NamespaceTerminating" for cause in causes or ())


def plain(body: Any) -> dict[str, Any]:
    """An object of a kind of kvtier's as plain data."""
    return dict(body)
