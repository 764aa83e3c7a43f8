"""What an error is on the wire: gRPC codes and texts, by kubelet's own rule of which codes are final.

After a final code kubelet forgets that it ever asked, and `NodeUnpublishVolume` never comes (kubernetes#136591). So while
anything of a volume exists on this node, only the codes that kubelet takes as "perhaps mounted" leave here (pkg/volume/csi,
`isFinalError`). The texts are what `kubectl describe pod` shows.
"""

from __future__ import annotations

from typing import Final

import grpc

from kvtier_api.errors import (
    BackendUnavailable,
    Busy,
    ForeignData,
    InsufficientSpace,
    InvalidResource,
    KvtierError,
    NotFound,
    NotPermitted,
    UnsafePath,
    UsageError,
)
from kvtier_node.cluster.errors import ApiUnavailable

__all__ = ["NON_FINAL", "BadCall", "Pending", "code_of", "text_of"]

NON_FINAL: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
    }
)
_TEXT_LIMIT: Final = 1500


class BadCall(UsageError):
    """A call that cannot be right whatever the node's state is: INVALID_ARGUMENT."""


class Pending(Busy):
    """Something about this volume is under way, and goes on whether the caller waits or not: ABORTED."""


_CODES: Final[tuple[tuple[type[KvtierError], grpc.StatusCode], ...]] = (
    (BadCall, grpc.StatusCode.INVALID_ARGUMENT),
    (ApiUnavailable, grpc.StatusCode.UNAVAILABLE),
    (Busy, grpc.StatusCode.ABORTED),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (UnsafePath, grpc.StatusCode.FAILED_PRECONDITION),  # before NotPermitted, which it is a kind of
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (ForeignData, grpc.StatusCode.FAILED_PRECONDITION),
    (InsufficientSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (BackendUnavailable, grpc.StatusCode.FAILED_PRECONDITION),
    (InvalidResource, grpc.StatusCode.FAILED_PRECONDITION),
)


def code_of(error: KvtierError, *, state_left: bool) -> grpc.StatusCode:
    """The code for `error`. `state_left`: something of the volume may exist on this node."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    return grpc.StatusCode.ABORTED if state_left and code not in NON_FINAL else code


def text_of(error: KvtierError) -> str:
    return str(error)[:_TEXT_LIMIT]
