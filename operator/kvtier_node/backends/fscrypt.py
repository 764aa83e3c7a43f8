"""`Fscrypt`: slot files encrypted by ext4 itself (v2 policy, AES-256-XTS), on an image of the volume's own.

For kernels without device mapper. The key is made in a child process, handed to the kernel by ioctl, and known to nobody
after that child has ended; its identifier is the kernel's own hash of it. Removing it makes names and contents
unreadable at once, mounted or not, unless a file is open: then the kernel says `incompletely removed`, and so does kvtier.

File contents and names are ciphertext. Sizes, counts and times of files are not: they are ext4 metadata in the clear.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from kvtier_api.errors import EraseIncomplete, KernelError, KvtierError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.volume import BackendName
from kvtier_node.backends import image
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.kernel import bounded, fscrypt, loop
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import Range
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = ["Fscrypt"]

_LIMIT_S: Final = 30.0
_FEATURES: Final = "encrypt,^has_journal"


class Fscrypt:
    name = BackendName.FSCRYPT
    technique = Technique.KEY_DESTROYED
    own_device = True

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        """Make a small image, put a key and a policy on it, and take it all away again."""
        if device is not None:
            return Probe(False, "Fscrypt works on an image; spec.device is for DmCrypt")
        if os.geteuid() != 0:
            return Probe(False, "needs root for loop devices and mounts")
        fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 8 * image.MIB)
            return self._probe_image(fd)
        except (KvtierError, OSError) as error:
            return Probe(False, str(error))
        finally:
            for device_ in image.attached(fd):
                loop.detach(device_)
            os.close(fd)

    @staticmethod
    def _probe_image(fd: int) -> Probe:
        device = loop.attach(fd, direct_io=False)
        image.make_file_system(device.path, features=_FEATURES)
        answer = bounded.call("kvtier_node.children.mounting:probe_fscrypt", timeout_s=_LIMIT_S, source=device.path)
        return Probe(bool(answer["ok"]), str(answer["reason"]))

    def bytes_needed(self, slots_bytes: int) -> int:
        return image.bytes_needed(slots_bytes)

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        fd = image.create_image(place, self.bytes_needed(request.slots_bytes))
        try:
            device = loop.attach(fd, direct_io=True)
        finally:
            os.close(fd)
        note(device=device.path)
        image.make_file_system(device.path, features=_FEATURES)
        place.mkdir(MOUNT_NAME, 0o700).close()
        image.mount_volume(place, device.path)
        with image.mounted_root(place) as root:
            if root is None:
                raise KernelError(
                    "the mount is not there", obj=f"{place.path}/{MOUNT_NAME}", remedy="see the kernel log"
                )
            key_id = str(
                bounded.call("kvtier_node.children.keys:fscrypt_add", timeout_s=_LIMIT_S, fds={"root": root.fd})[
                    "key_id"
                ]
            )
            note(key_id=key_id, facts={"cipher": "fscrypt v2: AES-256-XTS contents, AES-256-CBC-CTS names"})
            with root.mkdir(SLOTS_DIRECTORY, 0o700) as slots:
                fscrypt.set_policy(slots.fd, key_id)
            root.chmod(0o711)

    def measure(self, place: Directory, request: VolumeRequest, key_id: str | None) -> Measurement:
        with image.mounted_root(place) as root:
            if root is None:
                return Measurement(None, "nothing is mounted", {"mounted": False})
            if SLOTS_DIRECTORY not in root.names():
                return Measurement(False, "the volume has no slot directory", {"mounted": True})
            with root.child(SLOTS_DIRECTORY, owner_uid=request.uid) as slots:
                policy = fscrypt.get_policy(slots.fd)
            facts = {"mounted": True, "fscrypt_policy": policy}
            if policy is None:
                return Measurement(False, "the slot directory has no fscrypt policy", facts)
            status = fscrypt.key_status(root.fd, policy)
            facts["key_status"] = status.name
            if key_id is not None and policy != key_id:
                return Measurement(False, f"the policy is of key {policy}, not of {key_id}", facts)
            return Measurement(True, f"fscrypt v2 policy, key {policy} {status.name.lower()}", facts)

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        with image.mounted_root(place) as root:
            if root is None:
                return [
                    Step("fence", True, "nothing was mounted"),
                    Step("key-removed", True, "the file system is not mounted: the kernel holds no key of it"),
                ]
            known = {key_id} if key_id else set()
            if SLOTS_DIRECTORY in root.names():
                with root.child(SLOTS_DIRECTORY, owner_uid=request.uid) as slots:
                    policy = fscrypt.get_policy(slots.fd)
                    if policy:
                        known.add(policy)
                    if self._readable(root, request):
                        self._drop_dirty_pages(slots, request)
            fence = image.unmount_volume(place)
            steps = [fence]
            for known_id in sorted(known):
                answer = bounded.call(
                    "kvtier_node.children.keys:fscrypt_remove",
                    timeout_s=_LIMIT_S,
                    fds={"root": root.fd},
                    key_id=known_id,
                )
                if answer["status"] != fscrypt.KeyStatus.ABSENT.name:
                    leaks = image.leaked_mounts(os.fstat(root.fd).st_dev)
                    raise EraseIncomplete(
                        f"the kernel reports {answer['status']} for key {known_id}: a file of the volume is still open"
                        + (f"; mounted elsewhere: {', '.join(leaks)}" if leaks else ""),
                        obj=place.path,
                        remedy="end the processes that hold it (lsof +D, or fuser -m); kvtier tries again by itself",
                    )
                steps.append(Step("key-removed", True, f"fscrypt key {known_id}: the kernel reports ABSENT"))
            leaks = image.leaked_mounts(os.fstat(root.fd).st_dev)
            if leaks:
                steps.append(Step("mounts-elsewhere", None, f"still mounted, without its key: {', '.join(leaks)}"))
            return steps

    @staticmethod
    def _drop_dirty_pages(slots: Directory, request: VolumeRequest) -> None:
        """Truncate the slot files: their dirty pages go at once, so that removing the key does not write them all back."""
        for directory, name in walk_files(slots, request.uid):
            fd = open_consumer_file(directory, name, os.O_RDWR)
            if fd is not None:
                os.ftruncate(fd, 0)
                os.close(fd)

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        with image.mounted_root(place) as root:
            return image.slot_ranges(root, request) if root is not None and self._readable(root, request) else []

    @staticmethod
    def _readable(root: Directory, request: VolumeRequest) -> bool:
        """The slot directory is there and its key is present: without it the kernel opens no file of it."""
        if SLOTS_DIRECTORY not in root.names():
            return False
        with root.child(SLOTS_DIRECTORY, owner_uid=request.uid) as slots:
            policy = fscrypt.get_policy(slots.fd)
        return policy is not None and fscrypt.key_status(root.fd, policy) is fscrypt.KeyStatus.PRESENT

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        fd = image.open_image(place)
        if fd is None:
            return [Step("read-back", None, "no image is left to read")]
        try:
            return image.read_back(fd, ranges)
        finally:
            os.close(fd)

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        steps = []
        fd = image.open_image(place)
        if fd is not None:
            try:
                if discard:
                    steps.append(image.discard_image(fd))
                steps += image.detach_all(fd)
            finally:
                os.close(fd)
        steps.append(image.remove_image(place))
        return steps

    def not_covered(self) -> list[str]:
        return [
            "sizes, counts and times of the slot files were ext4 metadata in the clear until the discard",
            "blocks that the disk itself relocated before the discard hold ciphertext of a destroyed key",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
