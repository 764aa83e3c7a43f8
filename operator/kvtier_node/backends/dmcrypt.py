"""`DmCrypt`: the whole volume is one dm-crypt device (plain mode, aes-xts-plain64, 512-bit key), on an image or a block device.

Plain mode has no header, so no key material of any kind is ever on the disk. The key is made in a child process and goes to
cryptsetup through a pipe. It can be destroyed in the kernel while the volume is mounted and held open, so an erasure
never waits for an unmount: suspend, wipe the key, put an error target in its place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Final

from kvtier_api.errors import EraseIncomplete, ForeignData, KernelError, KvtierError
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.volume import BackendName
from kvtier_node.backends import image
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.kernel import bounded, loop
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import Range

__all__ = ["DmCrypt"]

_LIMIT_S: Final = 60.0
_ZERO_LIMIT_S: Final = 3600.0
_FEATURES: Final = "^has_journal"


def _dmsetup(*arguments: str) -> str:
    return bounded.run_tool(["dmsetup", *arguments], timeout_s=_LIMIT_S)


def _devices() -> dict[str, str]:
    """Device mapper's devices now: name → (major:minor)."""
    listing = _dmsetup("ls")
    if listing.strip() in ("", "No devices found"):
        return {}
    return {line.split("\t")[0]: line.split("\t")[1].strip(" ()").replace(", ", ":") for line in listing.splitlines()}


def _table(name: str) -> list[str]:
    """The live table of a device, with the key as the kernel has it. Zeros are compared, the text is never kept."""
    return _dmsetup("table", "--showkeys", name).split()


def _is_wiped(name: str) -> bool:
    table = _table(name)
    if table[2:3] == ["error"]:
        return True
    return table[2:3] == ["crypt"] and set(table[4]) <= {"0", "-"}


class DmCrypt:
    name = BackendName.DM_CRYPT
    technique = Technique.KEY_DESTROYED
    own_device = True

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        if os.geteuid() != 0:
            return Probe(False, "needs root for device mapper, loop devices and mounts")
        if device is not None:
            try:
                self._refuse_used_device(device)
            except KvtierError as error:
                return Probe(False, str(error))
        try:
            targets = _dmsetup("targets")
        except KernelError as error:
            return Probe(False, f"device mapper does not answer: {error.cause}")
        if not any(line.startswith("crypt") for line in targets.splitlines()):
            try:
                bounded.run_tool(["modprobe", "dm-crypt"], timeout_s=_LIMIT_S)
            except KernelError as error:
                return Probe(False, f"the kernel has no dm-crypt target: {error.cause}")
        return self._probe_cipher()

    @staticmethod
    def _probe_cipher() -> Probe:
        """Open a small device with the real cipher and close it again: a target that is listed can still lack its cipher."""
        fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
        name = f"kvtier-probe-{os.getpid()}"
        try:
            os.ftruncate(fd, image.MIB)
            with loop.transient(fd) as device:
                bounded.call(
                    "kvtier_node.children.keys:open_dm_crypt",
                    timeout_s=_LIMIT_S,
                    device=device.path,
                    name=name,
                    cipher="aes-xts-plain64",
                )
                _dmsetup("remove", name)
        except (KvtierError, OSError) as error:
            return Probe(False, str(error))
        finally:
            os.close(fd)
        return Probe(True, "device mapper opened a plain dm-crypt device")

    def bytes_needed(self, slots_bytes: int) -> int:
        return image.bytes_needed(slots_bytes)

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        if request.device is None:
            fd = image.create_image(place, self.bytes_needed(request.slots_bytes))
            try:
                note(facts={"image": image.identity(fd)})
                backing = loop.attach(fd, direct_io=True).path
            finally:
                os.close(fd)
        else:
            self._refuse_used_device(request.device)
            note(facts={"device_taken": True})  # before this, a failure must not erase what is on it
            backing = request.device
        note(device=backing)
        answer = bounded.call(
            "kvtier_node.children.keys:open_dm_crypt",
            timeout_s=_LIMIT_S,
            device=backing,
            name=request.volume_id,
            cipher=request.cipher,
        )
        note(key_id=str(answer["key_id"]), facts={"cipher": f"dm-crypt plain, {request.cipher}, 512-bit key"})
        mapped = f"/dev/mapper/{request.volume_id}"
        image.make_file_system(mapped, features=_FEATURES)
        place.mkdir(MOUNT_NAME, 0o700).close()
        image.mount_volume(place, mapped)
        with image.mounted_root(place) as root:
            if root is None:
                raise KernelError(
                    "the mount is not there", obj=f"{place.path}/{MOUNT_NAME}", remedy="see the kernel log"
                )
            root.mkdir(SLOTS_DIRECTORY, 0o700).close()
            root.chmod(0o711)

    @staticmethod
    def _refuse_used_device(device: str) -> None:
        """A block device must be unused and blank: a sample of it all zero. Anything else is somebody's data."""
        try:
            fd = os.open(device, os.O_RDONLY | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ForeignData(
                f"the device cannot be had alone: {error.strerror}", obj=device, remedy="see lsblk who uses it"
            ) from error
        try:
            if not stat.S_ISBLK(os.fstat(fd).st_mode):
                raise ForeignData(
                    "not a block device", obj=device, remedy="name a block device or an LV in spec.device"
                )
            size = os.lseek(fd, 0, os.SEEK_END)
            result = image.read_back_file(fd, [Range(0, size)])
        finally:
            os.close(fd)
        if result.empty != result.blocks:
            raise ForeignData(
                f"the device holds data ({result.sentence()})",
                obj=device,
                remedy="kvtier never overwrites what it did not write: blank it yourself (blkdiscard --zeroout) if it may go",
            )

    def measure(self, place: Directory, request: VolumeRequest, key_id: str | None) -> Measurement:
        with image.mounted_root(place) as root:
            if root is None:
                return Measurement(None, "nothing is mounted", {"mounted": False})
            number = os.fstat(root.fd).st_dev
        where = f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/dm"
        try:
            with open(f"{where}/uuid", encoding="ascii") as file:
                uuid = file.read().strip()
            with open(f"{where}/name", encoding="ascii") as file:
                name = file.read().strip()
        except FileNotFoundError:
            return Measurement(False, "the mounted device is not a device mapper device", {"mounted": True})
        table = _table(name)
        facts = {
            "mounted": True,
            "dm_uuid": uuid,
            "dm_target": table[2],
            "dm_cipher": table[3] if table[2] == "crypt" else None,
        }
        if table[2] != "crypt":
            return Measurement(False, f"the device's target is {table[2]}, not crypt", facts)
        return Measurement(True, f"dm-crypt {table[3]}, {len(table[4]) * 4}-bit key", facts)

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        steps: list[Step] = []
        name = request.volume_id
        if name in _devices():
            if not _is_wiped(name):
                _dmsetup("suspend", "--nolockfs", "--noflush", name)
                _dmsetup("message", name, "0", "key", "wipe")
                if not _is_wiped(name):
                    raise EraseIncomplete(
                        "the kernel still has the key after `key wipe`",
                        obj=name,
                        remedy="kvtier tries again; see dmsetup table",
                    )
                steps.append(Step("key-wiped", True, "dm-crypt: the table's key is all zeros"))
            sectors = _table(name)[1]
            if _table(name)[2] != "error":
                _dmsetup("load", name, "--table", f"0 {sectors} error")
            _dmsetup("resume", "--nolockfs", "--noflush", name)
            if _table(name)[2] != "error":
                raise EraseIncomplete(
                    "the crypt target is still live", obj=name, remedy="kvtier tries again; see dmsetup table"
                )
            steps.append(
                Step(
                    "key-removed",
                    True,
                    "dm-crypt: the crypt target, and the key with it, is replaced by an error target",
                )
            )
        else:
            steps.append(Step("key-removed", True, "device mapper has no such device: the kernel holds no key of it"))
        steps.append(image.unmount_volume(place))
        return steps

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        fd = self._open_backing(place, request, os.O_RDONLY)
        if fd is None:
            return []
        try:
            return [Range(0, os.lseek(fd, 0, os.SEEK_END))]
        finally:
            os.close(fd)

    @staticmethod
    def _open_backing(place: Directory, request: VolumeRequest, flags: int) -> int | None:
        """The raw bytes under the crypt device: the block device, or the image (None where it is gone)."""
        if request.device is None:
            return image.open_image(place, flags)
        if not request.device_taken:
            return None  # it was refused, or not looked at yet: what is on it is somebody's
        return os.open(request.device, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        fd = self._open_backing(place, request, os.O_RDWR)
        if fd is None:
            return [Step("read-back", None, "no image or device of the volume is left to read")]
        try:
            return image.read_back(fd, ranges or self.data_ranges(place, request))
        finally:
            os.close(fd)

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        steps = []
        name = request.volume_id
        if name in _devices():
            _dmsetup("remove", "--deferred", name)
            left = name in _devices()
            steps.append(
                Step(
                    "dm-remove",
                    None if left else True,
                    "held by a mount elsewhere; goes with it" if left else "device removed",
                )
            )
        if request.device is not None and request.device_taken:
            steps.append(self._blank_device(request.device))
        return steps + image.release_image(place, request, discard=discard)

    @staticmethod
    def _blank_device(device: str) -> Step:
        """Discard the device's blocks, and zero them where a discard does not: the next use must find it blank."""
        try:
            bounded.run_tool(["blkdiscard", device], timeout_s=_LIMIT_S)
            how = "discarded"
        except KernelError:
            how = "zeroed, it takes no discard"
            bounded.run_tool(["blkdiscard", "--zeroout", device], timeout_s=_ZERO_LIMIT_S)
        fd = os.open(device, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            result = image.read_back_file(fd, [Range(0, os.lseek(fd, 0, os.SEEK_END))])
            if result.empty != result.blocks:
                how = "zeroed, a discard left bytes readable"
                bounded.run_tool(["blkdiscard", "--zeroout", device], timeout_s=_ZERO_LIMIT_S)
                result = image.read_back_file(fd, [Range(0, os.lseek(fd, 0, os.SEEK_END))])
        finally:
            os.close(fd)
        if result.empty != result.blocks:
            raise EraseIncomplete(
                f"the device is not all zeros after the discard: {result.sentence()}",
                obj=device,
                remedy="kvtier tries again by itself; see the kernel log",
            )
        return Step("discard", True, f"{device} {how}; {result.sentence()}")

    def not_covered(self) -> list[str]:
        return [
            "blocks that the disk itself relocated before the discard hold ciphertext of a destroyed key",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
