"""`HostAttested`: a directory on a volume that somebody else encrypted. kvtier measures that encryption; it does not own the key.

So an erasure can only overwrite, make durable, read back and discard, and the receipt says so. Where the file system
keeps old copies (copy-on-write, data journaling) even that is not claimed: such a place is refused when provisioning.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvtier_api.volume import BackendName
from kvtier_node.backends import plain
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.kernel import constants, files, fscrypt, mounts
from kvtier_node.paths import Directory
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import Range

__all__ = ["HostAttested", "crypt_chain", "keeps_old_copies"]

_COPY_ON_WRITE: Final = frozenset({"btrfs", "zfs", "bcachefs", "overlay", "f2fs", "nilfs2"})
_OVERWRITES_IN_PLACE: Final = frozenset({"ext4", "ext2", "ext3", "xfs"})


def crypt_chain(device: int, sys_block: str = "/sys/dev/block") -> tuple[bool, list[str]]:
    """Whether every path from the block device down crosses dm-crypt, and the device mapper uuids met on the way.

    `device` is a st_dev. Source: /sys/dev/block/MAJ:MIN/{dm/uuid,slaves/}; cryptsetup's uuids begin with `CRYPT-`.
    """
    where = f"{sys_block}/{os.major(device)}:{os.minor(device)}"
    uuids: list[str] = []
    try:
        with open(f"{where}/dm/uuid", encoding="ascii") as file:
            uuids.append(file.read().strip())
    except (FileNotFoundError, NotADirectoryError):
        pass  # not a device mapper device: it may still have slaves (md)
    if uuids and uuids[0].startswith("CRYPT-"):
        return True, uuids
    try:
        slaves = sorted(os.listdir(f"{where}/slaves"))
    except (FileNotFoundError, NotADirectoryError):
        return False, uuids
    below = []
    for slave in slaves:
        with open(f"{where}/slaves/{slave}/dev", encoding="ascii") as file:
            major, minor = file.read().strip().split(":")
        encrypted, more = crypt_chain(os.makedev(int(major), int(minor)), sys_block)
        below.append(encrypted)
        uuids += more
    return bool(below) and all(below), uuids


def keeps_old_copies(directory: Directory) -> str:
    """Why bytes that are overwritten in `directory` may still be elsewhere on the disk; "" where they are not."""
    kind = files.filesystem_type(directory.fd)
    if kind in _COPY_ON_WRITE:
        return f"{kind} keeps old copies of overwritten blocks"
    if kind not in _OVERWRITES_IN_PLACE:
        return f"{kind} is not known to overwrite in place"
    if _journals_data(directory):
        return "data=journal: the journal keeps copies of what is overwritten"
    return ""


def _journals_data(directory: Directory) -> bool:
    """ext4's data journal, by mount option, by default of the file system, or by attribute of the directory (chattr +j)."""
    if files.has_attribute(directory.fd, constants.FS_JOURNAL_DATA_FL):
        return True
    device = os.fstat(directory.fd).st_dev
    options = {option for entry in mounts.mounts_of_device(device) for option in entry.super_options}
    try:  # the kernel's own list, with what is default and so not in mountinfo
        name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
        with open(f"/proc/fs/ext4/{name}/options", encoding="ascii") as file:
            options |= set(file.read().split())
    except FileNotFoundError:
        pass  # not ext4
    return "data=journal" in options


class HostAttested:
    name = BackendName.HOST_ATTESTED
    technique = Technique.OVERWRITE
    own_device = False

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        if device is not None:
            return Probe(False, "HostAttested works on files; spec.device is for DmCrypt")
        lacking = plain.probe_files(tier) or keeps_old_copies(tier)
        if lacking:
            return Probe(False, f"{lacking}: an erasure could not be claimed")
        found = self._attest(tier)
        return Probe(found.encrypted is True, found.reason)

    @staticmethod
    def _attest(directory: Directory) -> Measurement:
        device = os.fstat(directory.fd).st_dev
        encrypted, uuids = crypt_chain(device)
        facts: dict[str, object] = {"dm_uuids": uuids}
        if encrypted:
            return Measurement(True, f"every path to the disk crosses dm-crypt: {', '.join(uuids)}", facts)
        policy = fscrypt.get_policy(directory.fd)
        facts["fscrypt_policy"] = policy
        if policy is not None:
            return Measurement(True, f"the directory has the fscrypt v2 policy of key {policy}", facts)
        return Measurement(
            False, "neither dm-crypt under the file system nor an fscrypt policy on the directory", facts
        )

    def bytes_needed(self, slots_bytes: int) -> int:
        return plain.bytes_needed(slots_bytes)

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        plain.create_directories(place)
        found = self._attest(place)
        note(facts={"cipher": found.reason})

    def measure(self, place: Directory, request: VolumeRequest, key_id: str | None) -> Measurement:
        return self._attest(place)

    def is_in_kernel(self, place: Directory, request: VolumeRequest) -> bool:
        return True  # its files are in the tier's own file system

    def own_devices(self, place: Directory, request: VolumeRequest) -> list[str]:
        return []

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        fenced = plain.fence(place, request)
        plain.refuse_open(place, request)
        return [
            fenced,
            Step("key-removed", None, "the key is the host's, not kvtier's: it stays"),
            plain.overwrite_slots(place, request),
        ]

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        return []

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        result, _ = plain.read_back_slots(place, request, overwritten=True)
        return [Step("read-back", result.clean, f"after the overwrite: {result.sentence()}")]

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        return plain.remove_directories(place, request, discard=discard)

    def not_covered(self) -> list[str]:
        return [
            "the key of the host's volume still exists: this erasure is an overwrite, not a destruction of a key",
            "what the consumer itself removed or cut off before its end: freed blocks are not overwritten",
            "copies that the disk itself keeps (wear levelling, relocated blocks), and snapshots of the host's volume",
            "names, sizes and times of the slot files are metadata of the host's file system",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
