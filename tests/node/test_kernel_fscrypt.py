"""fscrypt for real: ext4 with encryption on a loop device; what stays readable, and what the kernel says of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier_api.errors import ForeignData, KernelError
from kvtier_node.kernel import fscrypt, libc, loop
from kvtier_node.kernel.fscrypt import KeyStatus, RemovalFlags
from requirements import need_root, need_tool

pytestmark = pytest.mark.root
CANARY = b"KVTIER-CANARY-" * 300


@dataclass
class Volume:
    image: Path
    mnt: Path
    slots: Path
    fd: int

    def raw(self) -> bytes:
        os.sync()
        return self.image.read_bytes()


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    need_root()
    image, mnt = tmp_path / "volume.img", tmp_path / "mnt"
    mnt.mkdir()
    image_fd = os.open(image, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(image_fd, 0, 32 * 2**20)
    device = loop.attach(image_fd)
    os.close(image_fd)
    try:
        subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", "encrypt,^has_journal", device.path], check=True)
        libc.mount(device.path, str(mnt), "ext4", 0, None)
        (mnt / "slots").mkdir()
        fd = os.open(mnt, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield Volume(image, mnt, mnt / "slots", fd)
        finally:
            os.close(fd)
            libc.umount2(str(mnt), 0)
    finally:
        loop.detach(device)  # what another test's new mount namespace copied meanwhile goes with that


def encrypt(volume: Volume) -> tuple[str, bytes]:
    raw = bytearray(os.urandom(64))
    identifier = fscrypt.add_key(volume.fd, raw)
    fd = os.open(volume.slots, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fscrypt.set_policy(fd, identifier)
    finally:
        os.close(fd)
    return identifier, bytes(raw)


def write(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(CANARY)
        os.fsync(file.fileno())


def test_key_that_is_removed_takes_content_and_names_with_it(volume: Volume) -> None:
    identifier, _ = encrypt(volume)
    assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.PRESENT
    write(volume.slots / "slot.rank_0")
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE
    assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.ABSENT
    (name,) = os.listdir(volume.slots)
    assert name != "slot.rank_0"
    with pytest.raises(OSError, match="Required key not available"):
        (volume.slots / name).read_bytes()
    assert CANARY[:28] not in volume.raw()


def test_search_of_the_image_can_find_the_canary(volume: Volume) -> None:
    write(volume.mnt / "plain")
    assert CANARY[:28] in volume.raw()


def test_no_part_of_the_key_is_on_the_image(volume: Volume) -> None:
    identifier, raw = encrypt(volume)
    write(volume.slots / "slot.rank_0")
    image = volume.raw()
    for part in (raw[:32], raw[32:], raw.hex().encode()[:32], raw[:16]):
        assert part not in image
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE


def test_open_file_keeps_its_key_and_the_kernel_says_so_until_it_closes(volume: Volume) -> None:
    identifier, _ = encrypt(volume)
    write(volume.slots / "slot.rank_0")
    with open(volume.slots / "slot.rank_0", "rb") as held:
        assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.FILES_BUSY
        assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.INCOMPLETELY_REMOVED
        assert held.read() == CANARY, "this is why incompletely removed is not erased"
        assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.FILES_BUSY
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE
    assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.ABSENT


def test_holder_that_is_killed_lets_the_removal_finish(volume: Volume) -> None:
    identifier, _ = encrypt(volume)
    write(volume.slots / "slot.rank_0")
    argv = [sys.executable, "-c", "import sys; f = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"]
    with subprocess.Popen([*argv, str(volume.slots / "slot.rank_0")], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.FILES_BUSY
        process.kill()
    deadline = time.monotonic() + 30
    while fscrypt.remove_key(volume.fd, identifier) and time.monotonic() < deadline:
        pass
    assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.ABSENT


def test_removing_an_absent_key_is_done(volume: Volume) -> None:
    identifier, _ = encrypt(volume)
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE
    assert fscrypt.remove_key(volume.fd, "00" * 16) is RemovalFlags.NONE
    assert fscrypt.key_status(volume.fd, "00" * 16) is KeyStatus.ABSENT


def test_root_removes_a_key_that_another_user_added_too(volume: Volume) -> None:
    identifier, raw = encrypt(volume)
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            os._exit(fscrypt.add_key(volume.fd, bytearray(raw)) != identifier)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert fscrypt.remove_key(volume.fd, identifier) is RemovalFlags.NONE
    assert fscrypt.key_status(volume.fd, identifier) is KeyStatus.ABSENT


def test_same_key_has_the_same_identifier_and_opens_the_files_again(volume: Volume) -> None:
    identifier, raw = encrypt(volume)
    write(volume.slots / "slot.rank_0")
    fscrypt.remove_key(volume.fd, identifier)
    assert fscrypt.add_key(volume.fd, bytearray(raw)) == identifier
    assert (volume.slots / "slot.rank_0").read_bytes() == CANARY
    assert len(identifier) == 32


def test_policy_is_read_back_from_directory_and_files_and_from_nothing_else(volume: Volume) -> None:
    identifier, _ = encrypt(volume)
    write(volume.slots / "slot.rank_0")
    for path, expected in {
        volume.slots: identifier,
        volume.slots / "slot.rank_0": identifier,
        volume.mnt: None,
    }.items():
        fd = os.open(path, os.O_RDONLY)
        assert fscrypt.get_policy(fd) == expected
        os.close(fd)


def test_file_system_without_encryption_has_no_policy_and_takes_no_key(tmp_path: Path) -> None:
    need_root()
    for path in ("/dev/shm", "/proc"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert fscrypt.get_policy(fd) is None
            with pytest.raises(KernelError, match="does not encrypt"):
                fscrypt.add_key(fd, bytearray(64))
        finally:
            os.close(fd)


def test_directory_that_has_content_or_another_policy_is_foreign(volume: Volume) -> None:
    first, _ = encrypt(volume)
    second = fscrypt.add_key(volume.fd, bytearray(os.urandom(64)))
    (volume.mnt / "full" / "inside").mkdir(parents=True)
    for path in (volume.slots, volume.mnt / "full"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(ForeignData):
            fscrypt.set_policy(fd, second)
        os.close(fd)
    fd = os.open(volume.slots, os.O_RDONLY | os.O_DIRECTORY)
    fscrypt.set_policy(fd, first)  # the same again is done
    assert fscrypt.get_policy(fd) == first
    os.close(fd)


def test_policy_needs_a_key_that_is_there(volume: Volume) -> None:
    fd = os.open(volume.slots, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.geteuid() != 0:
            with pytest.raises(KernelError):
                fscrypt.set_policy(fd, "00" * 16)
        for bad in ("", "xyz", "00" * 15, "00" * 17):
            with pytest.raises(KernelError, match="identifier"):
                fscrypt.set_policy(fd, bad)
        assert fscrypt.get_policy(fd) is None
    finally:
        os.close(fd)


@pytest.mark.parametrize("size", [0, 16, 31, 65])
def test_key_of_a_wrong_size_is_refused_before_the_kernel_sees_it(volume: Volume, size: int) -> None:
    with pytest.raises(KernelError, match="bytes"):
        fscrypt.add_key(volume.fd, bytearray(size))


def test_key_can_be_given_as_a_view_of_locked_memory(volume: Volume) -> None:
    raw = bytearray(os.urandom(64))
    assert fscrypt.add_key(volume.fd, memoryview(raw)) == fscrypt.add_key(volume.fd, raw)


HANDS_OVER = """
import os, sys
from kvtier_node.kernel import fscrypt
raw = bytearray(64)
os.readv(0, [raw])
fscrypt.add_key(os.open(sys.argv[1], os.O_RDONLY), raw)
os.write(1, b"handed over\\n")
os.read(0, 1)
raw[:] = bytes(64)
os.write(1, b"zeroed\\n")
os.read(0, 1)
"""


def copies_in_memory(pid: int, needle: bytes) -> int:
    count = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if "r" not in mode or low >= 2**63:
                continue
            memory.seek(low)
            try:
                count += memory.read(high - low).count(needle)
            except OSError:  # vvar
                continue
    return count


def test_no_copy_of_the_key_is_left_in_the_memory_of_the_process_that_handed_it_over(volume: Volume) -> None:
    key = os.urandom(64)
    argv = [sys.executable, "-c", HANDS_OVER, str(volume.mnt)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(key)
        assert process.stdout.readline() == b"handed over\n"
        assert copies_in_memory(process.pid, key[16:]) == 1, "the caller's own, and no other"
        process.stdin.write(b".")
        assert process.stdout.readline() == b"zeroed\n"
        assert copies_in_memory(process.pid, key[16:]) == 0
        process.stdin.write(b".")
