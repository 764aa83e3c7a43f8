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

from kvtier_api.errors import Busy, EraseIncomplete, KernelError, KvtierError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.volume import BackendName
from kvtier_node.backends import image
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.kernel import bounded, fscrypt, loop
from kvtier_node.kernel.files import FileIdentity
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
            with loop.transient(fd) as probed:
                image.make_file_system(probed.path, features=_FEATURES)
                answer = bounded.call(
                    "kvtier_node.children.mounting:probe_fscrypt", timeout_s=_LIMIT_S, source=probed.path
                )
        except (KvtierError, OSError) as error:
            return Probe(False, str(error))
        finally:
            os.close(fd)
        return Probe(bool(answer["ok"]), str(answer["reason"]))

    def bytes_needed(self, slots_bytes: int) -> int:
        return image.bytes_needed(slots_bytes)

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        fd = image.create_image(place, self.bytes_needed(request.slots_bytes))
        try:
            note(facts={"image": FileIdentity.of(fd).as_record()})
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
            if not self._is_own(place, request, root):
                return Measurement(False, "what is mounted there is not this volume", {"mounted": False})
            if SLOTS_DIRECTORY not in root.names():
                return Measurement(False, "the volume has no slot directory", {"mounted": True})
            with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
                policy = fscrypt.get_policy(slots.fd)
            facts = {"mounted": True, "fscrypt_policy": policy}
            if policy is None:
                return Measurement(False, "the slot directory has no fscrypt policy", facts)
            status = fscrypt.key_status(root.fd, policy)
            facts["key_status"] = status.name
            if key_id is not None and policy != key_id:
                return Measurement(False, f"the policy is of key {policy}, not of {key_id}", facts)
            return Measurement(True, f"fscrypt v2 policy, key {policy} {status.name.lower()}", facts)

    def is_in_kernel(self, place: Directory, request: VolumeRequest) -> bool:
        for device in image.devices_of(place, request):
            os.stat(device.path)  # a node that is missing here proves nothing
            if loop.is_claimed(device):
                return True
        return False

    def own_devices(self, place: Directory, request: VolumeRequest) -> list[str]:
        return [device.path for device in image.devices_of(place, request)]

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        devices = image.devices_of(place, request)
        # Held meanwhile: the file system outlives the unmount, so that the kernel can be asked about the key.
        with image.mounted_root(place) as root:
            try:
                if root is not None and self._is_own(place, request, root) and self._readable(root):
                    self._drop_dirty_pages(root)
            except (KvtierError, OSError):
                pass  # a mount laid over the slots, an immutable file: it would only save time, and the key must go
            steps = [image.unmount_volume(place)]
            for device in devices:
                steps += self._destroy_on(place, device, [key_id] if key_id else [])
        if not devices:
            steps.append(
                Step("key-removed", True, "no loop device has the image: no file system of it is in the kernel")
            )
        return steps

    @staticmethod
    def _destroy_on(place: Directory, device: loop.LoopDevice, key_ids: list[str]) -> list[Step]:
        """Remove the keys of the file system on `device`, wherever it is mounted: not at our path any more."""
        if not loop.is_claimed(device):
            return [Step("key-removed", True, f"nothing has {device.path} mounted: the kernel has no key of its files")]
        answer = bounded.call(
            "kvtier_node.children.keys:fscrypt_remove",
            timeout_s=_LIMIT_S,
            source=device.path,
            slots=SLOTS_DIRECTORY,
            key_ids=key_ids,
        )
        status: dict[str, str] = answer["status"]
        try:
            leaks = image.leaked_mounts(os.stat(device.path).st_rdev)
        except OSError as error:
            leaks = [f"(not all mount tables could be read: {error.strerror})"]
        present = {key: name for key, name in status.items() if name != fscrypt.KeyStatus.ABSENT.name}
        if present:
            raise EraseIncomplete(
                ", ".join(f"the kernel reports {name} for key {key}" for key, name in present.items())
                + ": a file of the volume is still open"
                + (f"; mounted elsewhere: {', '.join(leaks)}" if leaks else ""),
                obj=place.path,
                remedy="end the processes that hold it (lsof, or fuser -m); kvtier tries again by itself",
            )
        steps = [Step("key-removed", True, f"fscrypt key {key}: the kernel reports ABSENT") for key in status]
        if not status:
            steps = [Step("key-removed", True, "the file system was never given a key: nothing was written")]
        if leaks:
            steps.append(Step("mounts-elsewhere", None, f"still mounted, without its key: {', '.join(leaks)}"))
        return steps

    @staticmethod
    def _is_own(place: Directory, request: VolumeRequest, root: Directory) -> bool:
        """What is mounted at the place is on a loop device of the volume's own image, not something laid over it."""
        number = os.fstat(root.fd).st_dev
        return any(os.stat(device.path).st_rdev == number for device in image.devices_of(place, request))

    @staticmethod
    def _drop_dirty_pages(root: Directory) -> None:
        """Truncate the slot files: their dirty pages go at once, so that removing the key does not write them all back."""
        with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
            for directory, name in walk_files(slots):
                try:
                    fd = open_consumer_file(directory, name, os.O_RDWR)
                    if fd is not None:
                        try:
                            os.ftruncate(fd, 0)
                        finally:
                            os.close(fd)
                except (Busy, OSError):
                    continue

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        with image.mounted_root(place) as root:
            if root is None or not self._is_own(place, request, root) or not self._readable(root):
                return []
            return image.slot_ranges(root)

    @staticmethod
    def _readable(root: Directory) -> bool:
        """The slot directory is there and its key is present: without it the kernel opens no file of it."""
        if SLOTS_DIRECTORY not in root.names():
            return False
        with root.child(SLOTS_DIRECTORY, any_owner=True) as slots:
            policy = fscrypt.get_policy(slots.fd)
        return policy is not None and fscrypt.key_status(root.fd, policy) is fscrypt.KeyStatus.PRESENT

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        fd = image.open_image(place, request)
        if fd is None:
            return [Step("read-back", None, "no image is left to read")]
        try:
            return image.read_back(fd, ranges)
        finally:
            os.close(fd)

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        return image.release_image(place, request, discard=discard)

    def not_covered(self) -> list[str]:
        return [
            "sizes, counts and times of the slot files were ext4 metadata in the clear until the discard",
            "blocks that the disk itself relocated before the discard hold ciphertext of a destroyed key",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
