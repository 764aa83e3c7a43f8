"""A block device in the place of an image (`spec.device`): somebody's until it is found blank, then kvtier's until it is again.

Nothing is written to a device that was not found blank by kvtier, that is not surely the one that was, or that somebody
has put to another use since.
"""

from __future__ import annotations

import os
from typing import Final

from kvtier_api.errors import EraseIncomplete, ForeignData
from kvtier_node.backends import image
from kvtier_node.backends.base import VolumeRequest
from kvtier_node.kernel import block_device, bounded
from kvtier_node.receipts import Step
from kvtier_node.sampling import BLOCK_BYTES, Range, SampleResult

__all__ = ["blank", "look_blank", "open_blank", "open_taken", "read_back", "size_of_taken"]

_LIMIT_S: Final = 600.0
_ZERO_LIMIT_S: Final = 4 * 3600.0
_EDGE_BYTES: Final = 4 << 20
"""Read whole at both ends: every file system, RAID, volume manager and partition table has its mark there."""


def look_blank(device: str) -> None:
    """Raise ForeignData where `open_blank` would. Who takes the device, or erases it, meanwhile is not kept out."""
    os.close(block_device.open_alone(device, os.O_RDONLY))
    fd = block_device.open_device(device, os.O_RDONLY)
    try:
        _refuse_data(fd, device)
    finally:
        os.close(fd)


def open_blank(device: str) -> int:
    """A descriptor of a device that nobody uses and that holds nothing. Raises ForeignData: anything else is somebody's."""
    fd = block_device.open_alone(device, os.O_RDONLY)
    try:
        _refuse_data(fd, device)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refuse_data(fd: int, device: str) -> None:
    for result in _look(fd):
        if result.empty != result.blocks:
            raise ForeignData(
                f"the device holds data ({result.sentence()})",
                obj=device,
                remedy="kvtier never overwrites what it did not write: blank it yourself (blkdiscard --zeroout) if it may go",
            )


def _look(fd: int) -> list[SampleResult]:
    """Both ends whole, and a sample of all of it."""
    size = block_device.size_bytes(fd) // BLOCK_BYTES * BLOCK_BYTES
    edge = min(_EDGE_BYTES, size)
    return [image.read_back_file(fd, [part]) for part in (Range(0, edge), Range(size - edge, edge), Range(0, size))]


def open_taken(request: VolumeRequest, flags: int) -> int | None:
    """The volume's device, when nothing else uses it; None where it was never taken, is not there, or may be another one.

    Raises EraseIncomplete where it is the same, and since a restart of the node somebody has put it to another use.
    """
    if request.device is None or not request.device_taken:
        return None
    try:
        fd = block_device.open_alone(request.device, flags)
    except ForeignData:
        return None  # not there, or in use: not by kvtier, whose crypt target is gone when this is asked
    try:
        same = request.device_marks & set(block_device.marks(fd))
        if same and not any(mark.startswith(block_device.THIS_BOOT) for mark in same):
            _refuse_other_use(fd, request.device)
    except BaseException:
        os.close(fd)
        raise
    if same:
        return fd
    os.close(fd)
    return None


def _refuse_other_use(fd: int, device: str) -> None:
    if any(result.plaintext for result in _look(fd)):
        raise EraseIncomplete(
            "since the restart something was written to the device that is not the volume's: it is somebody's now",
            obj=device,
            remedy="'kvtier erase --abandon --reason ...' ends the volume and leaves the device alone",
        )


def size_of_taken(request: VolumeRequest) -> int:
    """Bytes of the device that was taken, whoever uses it now; 0 where `open_taken` would give None. Raises OSError."""
    if request.device is None or not request.device_taken:
        return 0
    try:
        fd = block_device.open_device(request.device, os.O_RDONLY)
    except ForeignData:
        return 0
    try:
        return block_device.size_bytes(fd) if request.device_marks & set(block_device.marks(fd)) else 0
    finally:
        os.close(fd)


def read_back(request: VolumeRequest) -> list[Step]:
    """Sample the device raw. Plaintext on it would mean that encryption failed: then all of it is zeroed as well."""
    fd = open_taken(request, os.O_RDWR)
    if fd is None:
        return [Step("read-back", None, f"{request.device} can't be told to be the device that was used, or is in use")]
    try:
        whole = [Range(0, block_device.size_bytes(fd) // BLOCK_BYTES * BLOCK_BYTES)]
        result = image.read_back_file(fd, whole)
        steps = [Step("read-back", result.clean, result.sentence())]
        if result.plaintext:
            bounded.call("kvtier_node.children.blanking:zero", timeout_s=_ZERO_LIMIT_S, fds={"device": fd})
            again = image.read_back_file(fd, whole)
            steps.append(Step("overwrite", True, "the whole device overwritten with zeros, fsync done"))
            steps.append(Step("read-back-after-overwrite", again.clean, again.sentence()))
        return steps
    finally:
        os.close(fd)


def blank(request: VolumeRequest) -> Step:
    """Discard the device's blocks, and zero them where a discard does not: the next use must find it blank.

    Raises EraseIncomplete while it is not.
    """
    fd = open_taken(request, os.O_RDWR)
    if fd is None:
        return Step(
            "discard",
            None,
            f"{request.device} can't be told to be the device that was used, or is in use: not a byte of it was written."
            " What is left on the volume's device is ciphertext without a key; blank it before its next use",
        )
    try:
        how = "discarded"
        if not bounded.call("kvtier_node.children.blanking:discard", timeout_s=_LIMIT_S, fds={"device": fd})["done"]:
            how = "takes no discard"
        results = _look(fd)
        if any(result.empty != result.blocks for result in results):
            how += ", zeroed"
            bounded.call("kvtier_node.children.blanking:zero", timeout_s=_ZERO_LIMIT_S, fds={"device": fd})
            results = _look(fd)
    finally:
        os.close(fd)
    for result in results:
        if result.empty != result.blocks:
            raise EraseIncomplete(
                f"the device is not all zeros: {result.sentence()}",
                obj=request.device or "",
                remedy="kvtier tries again by itself; see the kernel log",
            )
    return Step("discard", True, f"{request.device} {how}; {results[-1].sentence()}")
