"""`DmCrypt`: the whole volume is one dm-crypt device (plain mode, aes-xts-plain64, 512-bit key), on an image or a block device.

Plain mode has no header, so no key material of any kind is ever on the disk. The key is made in a child process and goes to
cryptsetup through a pipe. It can be destroyed in the kernel while the volume is mounted and held open, so an erasure
never waits for an unmount: suspend, wipe the key, put an error target in its place.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from typing import Any, Final

from kvtier_api.errors import EraseIncomplete, ForeignData, InsufficientSpace, KernelError, KvtierError, NotFound
from kvtier_api.marker import SLOTS_DIRECTORY
from kvtier_api.volume import BackendName
from kvtier_node.backends import image, raw_device
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.kernel import block_device, bounded, device_mapper, loop
from kvtier_node.kernel.files import FileIdentity
from kvtier_node.kernel.processes import start_time
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import BLOCK_BYTES, Range

__all__ = ["DmCrypt"]

_LIMIT_S: Final = 60.0
_FEATURES: Final = "^has_journal"
_PROBE: Final = "kvtier-probe-"


def _mapped(name: str) -> str:
    return f"/dev/mapper/{name}"


def _open(device: str, name: str, cipher: str) -> dict[str, Any]:
    """A new key, and the crypt device `name` with it on `device`."""
    return bounded.call(
        "kvtier_node.children.keys:open_dm_crypt", timeout_s=_LIMIT_S, device=device, name=name, cipher=cipher
    )


def _describe(name: str) -> device_mapper.Table:
    """The live table, without its key: that never enters this process. Raises KernelError."""
    answer = bounded.call("kvtier_node.children.crypt_device:describe", timeout_s=_LIMIT_S, name=name)["table"]
    if answer is None:
        raise KernelError("device mapper has no such device", obj=name)
    return device_mapper.Table(**answer)


def _remove(name: str) -> None:
    """Remove the device, or let the kernel do so when its last user goes: udevd, say, looks into each new one."""
    try:
        bounded.run_tool(["dmsetup", "remove", "--deferred", name], timeout_s=_LIMIT_S)
    except KernelError:
        if device_mapper.exists(name):  # else another was faster
            raise


def _remove_lost_probes() -> None:
    """A probe's device outlives an agent that is killed within it. The name says whose it was."""
    for name in device_mapper.names():
        if not name.startswith(_PROBE):
            continue
        pid, started, *_ = name.removeprefix(_PROBE).split("-")
        try:
            alive = str(start_time(int(pid))) == started
        except NotFound:
            alive = False
        if not alive:
            _remove(name)


def _refuse_wrong_table(table: dict[str, Any] | None, request: VolumeRequest, backing: str) -> None:
    """What the kernel has must be what was asked for: a path can come to name another device between a look and its use."""
    fd = block_device.open_device(backing, os.O_RDONLY)
    try:
        number = os.fstat(fd).st_rdev
    finally:
        os.close(fd)
    wanted = ("crypt", request.cipher, 512, f"{os.major(number)}:{os.minor(number)}")
    found = table and (table["target"], table["cipher"], table["key_bits"], table["device"])
    if found != wanted:
        raise KernelError(
            f"the kernel has {found}, not {wanted}",
            obj=request.volume_id,
            remedy="see dmsetup table, and what was renamed",
        )


class DmCrypt:
    name = BackendName.DM_CRYPT
    technique = Technique.KEY_DESTROYED
    own_device = True

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        if os.geteuid() != 0:
            return Probe(False, "needs root for device mapper, loop devices and mounts")
        if device is not None:
            raw_device.look_blank(device)  # ForeignData is no question of backends: it reaches the caller
        return self._probe_cipher()

    @staticmethod
    def _probe_cipher() -> Probe:
        """Open a small device with the real cipher and close it again: a target that is listed can still lack its cipher."""
        fd = os.memfd_create("kvtier-probe", os.MFD_CLOEXEC)
        # Tiers are checked in threads of one process, so the process alone is no name.
        name = f"{_PROBE}{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(4)}"
        try:
            _remove_lost_probes()
            os.ftruncate(fd, image.MIB)
            with loop.transient(fd) as device:
                _open(device.path, name, "aes-xts-plain64")
                _remove(name)
        except (KvtierError, OSError) as error:
            if device_mapper.exists(name):  # cryptsetup or dmsetup was ended halfway
                _remove(name)
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
                serial = block_device.serial_of(os.fstat(fd).st_dev)
                note(facts={"image": FileIdentity.of(fd).as_record(), "device_serial": serial})
                backing = loop.attach(fd, direct_io=True).path
            finally:
                os.close(fd)
        else:
            backing = self._take_device(request.device, request, note)
        note(device=backing)
        answer = _open(backing, request.volume_id, request.cipher)
        note(key_id=str(answer["key_id"]), facts={"cipher": f"dm-crypt plain, {request.cipher}, 512-bit key"})
        _refuse_wrong_table(answer["table"], request, backing)
        mapped = _mapped(request.volume_id)
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

    def _take_device(self, device: str, request: VolumeRequest, note: Note) -> str:
        """Look at the device once more, and put on record which one it is; its path without links."""
        fd = raw_device.open_blank(device)
        try:
            needed, there = self.bytes_needed(request.slots_bytes), block_device.size_bytes(fd)
            if needed > there:
                raise InsufficientSpace(
                    f"needs {needed} bytes, the device has {there}",
                    obj=device,
                    remedy="lower sizePerRank or ranks, or name a larger device",
                )
            # Before this is on record a failure must not erase what is on the device.
            serial = block_device.serial_of(os.fstat(fd).st_rdev)
            note(facts={"device_taken": True, "device_marks": block_device.marks(fd), "device_serial": serial})
        finally:
            os.close(fd)
        return os.path.realpath(device)

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
        table = _describe(name)
        facts = {
            "mounted": True,
            "dm_uuid": uuid,
            "dm_target": table.target,
            "dm_cipher": table.cipher or None,
        }
        if table.target != "crypt":
            return Measurement(False, f"the device's target is {table.target or 'none'}, not crypt", facts)
        if table.wiped:
            return Measurement(False, "the kernel's key of the device is all zeros", facts)
        return Measurement(True, f"dm-crypt {table.cipher}, {table.key_bits}-bit key", facts)

    def is_in_kernel(self, place: Directory, request: VolumeRequest) -> bool:
        if not device_mapper.exists(request.volume_id):
            return False
        try:
            os.close(os.open(_mapped(request.volume_id), os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
        except OSError as error:
            if error.errno == errno.EBUSY:
                return True
            raise
        return False

    def own_devices(self, place: Directory, request: VolumeRequest) -> list[str]:
        return [_mapped(request.volume_id)]

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        name = request.volume_id
        answer = bounded.call("kvtier_node.children.crypt_device:destroy_key", timeout_s=_LIMIT_S, name=name)
        if answer["left"] not in (None, "", "error") or answer["inactive"]:
            raise EraseIncomplete(
                f"the device's target is still {answer['left'] or 'about to be replaced'}",
                obj=name,
                remedy="kvtier tries again; see dmsetup table and dmsetup table --inactive",
            )
        steps = []
        if answer["found"] == "crypt":
            seen = "all zeros" if answer["wiped"] else "not zeros after the wipe; it went with its table"
            steps.append(Step("key-wiped", True if answer["wiped"] else None, f"dm-crypt: the table's key was {seen}"))
        gone = {
            None: "device mapper has no such device: the kernel holds no key of it",
            "": "dm-crypt: the device has no table, and no key with it",
            "error": "dm-crypt: the crypt target, and the key with it, is replaced by an error target",
        }
        steps.append(Step("key-removed", True, gone[answer["left"]]))
        steps.append(image.unmount_volume(place))
        if answer["left"] == "error":
            steps += self._drop_pages(_mapped(name))
        return steps

    @staticmethod
    def _drop_pages(mapped: str) -> list[Step]:
        """What a mount elsewhere keeps in memory, in the clear. Nothing where the volume has no other mount."""
        try:
            os.close(block_device.open_alone(mapped, os.O_RDONLY))
        except ForeignData:
            answer = bounded.call(
                "kvtier_node.children.cached_pages:drop", timeout_s=_LIMIT_S, source=mapped, directory=SLOTS_DIRECTORY
            )
            left, unknown = answer["pages"], answer["unknown"]
            said = f"{answer['files']} files, {left} pages left" + (f", {unknown} files unknown" if unknown else "")
            dropped = True if answer["files"] and not left and not unknown else None  # of no file it says nothing
            return [Step("cached-pages", dropped, f"held by a mount elsewhere: {said}")]
        return []

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        if request.device is not None:
            size = raw_device.size_of_taken(request) // BLOCK_BYTES * BLOCK_BYTES
        else:
            fd = image.open_image(place, request, os.O_RDONLY)
            if fd is None:
                return []
            try:
                size = os.fstat(fd).st_size
            finally:
                os.close(fd)
        return [Range(0, size)] if size else []

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        if request.device is not None:
            return raw_device.read_back(request)
        fd = image.open_image(place, request)
        if fd is None:
            return [Step("read-back", None, "no image of the volume is left to read")]
        try:
            return image.read_back(fd, ranges or [Range(0, os.fstat(fd).st_size)])
        finally:
            os.close(fd)

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        steps = []
        name = request.volume_id
        if device_mapper.exists(name):
            _remove(name)
            left = device_mapper.exists(name)
            steps.append(
                Step(
                    "dm-remove",
                    None if left else True,
                    "held by a mount elsewhere; the kernel removes it with that mount" if left else "device removed",
                )
            )
        if request.device is not None and request.device_taken:
            steps.append(raw_device.blank(request))
        return steps + image.release_image(place, request, discard=discard)

    def not_covered(self) -> list[str]:
        return [
            "blocks that the disk itself relocated before the discard hold ciphertext of a destroyed key",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
