"""What a volume backend is: one narrow interface, so that a crash test can stop between any two of its effects.

A backend owns what lies under `<place>/mnt` and the key that makes it readable. It does not know tiers, ledgers,
receipts or consumers. Every method can be run twice, and on whatever a crash left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtier_api.volume import BackendName
from kvtier_node.kernel.files import FileIdentity
from kvtier_node.paths import Directory
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import Range

__all__ = ["Backend", "Measurement", "Note", "Probe", "VolumeRequest"]

Note = Callable[..., None]
"""`note(key_id=..., device=..., facts={...})`: put a fact on durable record now, in the middle of a step."""


@dataclass(frozen=True)
class Probe:
    """Whether a backend can work in a place, and why or why not, from what the kernel answered."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class Measurement:
    """What the kernel says of a volume now. `encrypted` is None where it could not be measured."""

    encrypted: bool | None
    reason: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class VolumeRequest:
    """What to make. `slots_bytes` is the sum over the ranks; `device` a block device to use in place of an image."""

    volume_id: str
    slots_bytes: int
    cipher: str
    uid: int
    gid: int
    device: str | None = None
    own_inodes: frozenset[int] = frozenset()
    """Inode numbers of the slot files that kvtier made: erased whatever other names they have by now."""
    image: FileIdentity | None = None
    """The backing image as it was made: its loop devices are known by it when its name is gone."""
    device_taken: bool = False
    """`device` was found blank and is kvtier's from then on. Until then it is somebody's: not a byte of it is written."""
    device_marks: frozenset[str] = frozenset()
    """What named the device that was taken (`kernel.block_device`): the path may name another one by now."""


class Backend(Protocol):
    """See the module. Errors: KernelError, InsufficientSpace, ForeignData, EraseIncomplete, UnsafePath."""

    name: BackendName
    technique: Technique
    """What makes the bytes unrecoverable when all goes well."""
    own_device: bool
    """The volume is a file system of its own, with a device number of its own."""

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        """Try it in the tier's directory, leaving nothing behind."""

    def bytes_needed(self, slots_bytes: int) -> int:
        """Bytes on the tier's file system for a volume whose slot files add up to `slots_bytes`."""

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        """Make `<place>/mnt` an empty, encrypted place with an empty directory `slots` owned by the consumer."""

    def measure(self, place: Directory, request: VolumeRequest, key_id: str | None) -> Measurement:
        """Encryption as the kernel has it now."""

    def is_in_kernel(self, place: Directory, request: VolumeRequest) -> bool:
        """Whether the kernel still has the volume's own file system, mounted anywhere or held by an open file.

        Asked of a volume that has lost its mount. Raises KvtierError, OSError where it cannot be told.
        """

    def own_devices(self, place: Directory, request: VolumeRequest) -> list[str]:
        """Paths of the block devices that the volume's own file system is on, mounted or not; empty where it has none.

        Raises EraseIncomplete where that can't be told.
        """

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        """Fence the place off from every path, then make its bytes unreadable for ever, and verify in the kernel.

        Raises EraseIncomplete with the holder while the kernel still has the key.
        """

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        """Where, in the image or device, consumers' bytes can lie now; empty when that can't be told any more."""

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        """Sample `ranges` raw with the second reader (`sampling`), after the key is gone and before the discard."""

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        """Give back blocks, devices and names: after it, `place` holds nothing but `place.json`."""

    def not_covered(self) -> list[str]:
        """What an erasure by this backend does not reach; goes into every receipt."""
