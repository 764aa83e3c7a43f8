"""The marker: a small file at the root of a provisioned volume, the contract between node agent and engine.

An engine reads it before its first write and refuses to start without it: after a reboot the same path can be a
plain directory on the node's root disk (kubernetes#119921). The agent writes it; the engine and `kvtier run` check it.
It holds no secret. The format is written down in docs/formats.md, "Marker".
"""

from __future__ import annotations

import json
import os
import stat
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier_api.errors import VerificationFailed

__all__ = ["MARKER_NAME", "SLOTS_DIRECTORY", "Marker", "check_marker"]

MARKER_NAME: Final = ".kvtier-marker.json"
SLOTS_DIRECTORY: Final = "slots"
_LIMIT_BYTES: Final = 64 * 1024
_REMEDY: Final = "start the process with 'kvtier run', or through the CSI volume; never point an engine at a bare path"


class Marker(BaseModel):
    """What an engine must know of the volume under it. Sizes in bytes, ages in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["kvtier.dev/marker/v1"] = "kvtier.dev/marker/v1"
    volume_id: str = Field(pattern=r"^kvv-[0-9a-f]{20}$")
    tier_uid: str
    tier_namespace: str
    tier_name: str
    nonce: str = Field(
        pattern=r"^[0-9a-f]{32}$", description="random per volume; also given to the consumer in KVTIER_NONCE"
    )
    pod_uid: str | None = Field(
        None, min_length=1, description="the pod that the volume is for; the pod itself knows it in KVTIER_POD_UID"
    )
    ranks: int = Field(ge=1)
    slot_files: list[str] = Field(description="names in the directory `slots`, by rank")
    slot_size_bytes: int = Field(ge=4096)
    bytes_per_rank: int = Field(ge=4096)
    seal_slots: bool
    salt_policy: Literal["Required", "PerTenant", "Shared"]
    salt_hash: str
    max_age_s: float = Field(gt=0)
    backend: Literal["DmCrypt", "Fscrypt", "HostAttested", "SealOnly"]
    own_device: bool = Field(description="the volume is a file system of its own: its device differs from its parent's")

    def to_bytes(self) -> bytes:
        return (json.dumps(self.model_dump(), sort_keys=True, indent=1) + "\n").encode()


def _read_regular(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_size > _LIMIT_BYTES:
            raise VerificationFailed("the marker is not a small regular file", obj=path, remedy=_REMEDY)
        return os.read(fd, _LIMIT_BYTES)
    finally:
        os.close(fd)


def check_marker(path: str, *, nonce: str | None = None, pod_uid: str | None = None) -> Marker:
    """Read and check the marker at `path`; return it.

    Checks: a small regular file; its format; the nonce that the consumer was started with, or the uid of the pod that it
    runs in (what is given is checked, and one of them must be); the directory `slots` beside it on the same device; and,
    where the volume has its own device, that the device differs from the parent's.
    Raises VerificationFailed with what differs.
    """
    if not nonce and not pod_uid:
        raise VerificationFailed(
            "neither a nonce nor a pod's uid is given: any volume would do", obj=path, remedy=_REMEDY
        )
    try:
        marker = Marker.model_validate_json(_read_regular(path))
    except OSError as error:
        raise VerificationFailed(f"no marker ({error.strerror})", obj=path, remedy=_REMEDY) from error
    except ValidationError as error:
        raise VerificationFailed(
            f"not a marker of this version: {error.errors()[0]['msg']}", obj=path, remedy=_REMEDY
        ) from error
    if nonce and marker.nonce != nonce:
        raise VerificationFailed("the nonce is another volume's", obj=path, remedy=_REMEDY)
    if pod_uid and marker.pod_uid != pod_uid:
        raise VerificationFailed(
            f"the volume is for {f'pod {marker.pod_uid}' if marker.pod_uid else 'no pod'}, this is pod {pod_uid}",
            obj=path,
            remedy=_REMEDY,
        )
    root = os.path.dirname(os.path.abspath(path))
    device = os.stat(root, follow_symlinks=False).st_dev
    slots = os.path.join(root, SLOTS_DIRECTORY)
    info = os.stat(slots, follow_symlinks=False)
    if not stat.S_ISDIR(info.st_mode) or info.st_dev != device:
        raise VerificationFailed("the slot directory is not on the marker's device", obj=slots, remedy=_REMEDY)
    if marker.own_device and os.stat(os.path.dirname(root), follow_symlinks=False).st_dev == device:
        raise VerificationFailed("nothing is mounted here: the device equals its parent's", obj=root, remedy=_REMEDY)
    return marker
