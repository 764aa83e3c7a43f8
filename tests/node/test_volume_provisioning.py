"""What a consumer is given: encrypted, of a hard size, preallocated, its own, and reading as zeros; or nothing at all."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kvtier_api.errors import InsufficientSpace, NotPermitted
from kvtier_api.marker import check_marker
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.backends import BACKENDS
from kvtier_node.kernel import fscrypt, mounts
from kvtier_node.kernel.fscrypt import KeyStatus
from kvtier_node.live import LiveVolume, request_of
from node_host import MIB, Host

pytestmark = pytest.mark.root
BACKENDS_HERE = ["Fscrypt", "SealOnly", "HostAttested"]


@pytest.fixture(params=BACKENDS_HERE)
def tier(request: pytest.FixtureRequest, host: Host) -> KVCacheTier:
    if request.param == "HostAttested":
        secret: Path = request.getfixturevalue("encrypted_root")
        return host.tier("HostAttested", path=secret / "demo")
    return host.tier(request.param)


def test_the_consumer_gets_preallocated_files_of_its_own_that_read_as_zeros(host: Host, tier: KVCacheTier) -> None:
    live = host.provision(tier, uid=1234, gid=4321)
    assert live.row.state is VolumeState.READY
    slots = Path(live.slots_path)
    assert (stat.S_IMODE(slots.stat().st_mode), slots.stat().st_uid, slots.stat().st_gid) == (0o700, 1234, 4321)
    assert sorted(os.listdir(slots)) == ["slot.rank_0", "slot.rank_1"]
    for path in slots.iterdir():
        info = path.stat()
        assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_nlink) == (0o600, 1234, 4321, 1)
        assert info.st_size == 4 * MIB
        assert info.st_blocks * 512 >= 4 * MIB, "sparse: a write could meet ENOSPC"
        assert not any(path.read_bytes())
    place = Path(live.row.place)
    assert (stat.S_IMODE(place.stat().st_mode), place.stat().st_uid) == (0o711, 0)
    assert stat.S_IMODE((place / "mnt").stat().st_mode) == 0o711
    assert stat.S_IMODE((place / "place.json").stat().st_mode) == 0o600
    marker = check_marker(live.marker_path, nonce=live.row.facts["nonce"])
    assert (marker.volume_id, marker.bytes_per_rank, marker.ranks) == (live.volume_id, 4 * MIB, 2)
    assert stat.S_IMODE(Path(live.marker_path).stat().st_mode) == 0o444
    host.erase(live)
    if tier.spec.encryption.backend == "HostAttested":
        assert not os.path.lexists(live.row.place)
    else:
        host.assert_nothing_left(live)


def test_a_volume_of_its_own_is_mounted_nodev_nosuid_noexec_and_root_keeps_its_root(host: Host) -> None:
    live = host.provision(host.tier("Fscrypt"), uid=1234, gid=1234)
    [entry] = [entry for entry in mounts.mountinfo() if entry.mount_point == f"{live.row.place}/mnt"]
    assert {"nodev", "nosuid", "noexec"} <= set(entry.options)
    assert entry.fs_type == "ext4"
    image = host.image(live)
    assert stat.S_IMODE(image.stat().st_mode) == 0o600
    assert image.stat().st_blocks * 512 >= image.stat().st_size, "the image has holes"
    denied = host.python(
        """
        import os, sys
        os.setresuid(1234, 1234, 1234)
        for path in sys.argv[1:]:
            try:
                os.close(os.open(path, os.O_RDWR | os.O_CREAT))
                print("made", path)
            except PermissionError:
                pass
        """,
        f"{live.row.place}/mnt/outside-the-slots",
        f"{live.row.place}/beside",
        str(image),
        live.marker_path,
        f"{live.row.place}/place.json",
    )
    assert denied.stdout == ""


def test_the_encryption_that_is_claimed_was_measured(host: Host) -> None:
    live = host.provision(host.tier("Fscrypt"))
    key_id = live.row.key_id
    assert key_id is not None
    slots = os.open(live.slots_path, os.O_RDONLY)
    try:
        assert fscrypt.get_policy(slots) == key_id
        assert fscrypt.key_status(slots, key_id) is KeyStatus.PRESENT
    finally:
        os.close(slots)
    assert live.row.facts["measured"]["fscrypt_policy"] == key_id
    assert key_id in live.row.reason


def test_a_mount_laid_over_the_volume_is_not_measured_as_encrypted(host: Host) -> None:
    live = host.provision(host.tier("Fscrypt"))
    host.python(
        """
        import sys
        from kvtier_node.kernel import libc
        libc.mount("tmpfs", sys.argv[1], "tmpfs", 0, None)
        """,
        f"{live.row.place}/mnt",
    )
    with host.node.places.open(live.row.place) or pytest.fail("no place") as place:
        found = BACKENDS[live.row.backend].measure(place, request_of(live.row), live.row.key_id)
    assert found.encrypted is False
    assert "not this volume" in found.reason


def test_the_size_is_a_hard_limit(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    told = consumer.do(f"""
        import errno
        fd, answer = os.open(f"{{slots}}/more", os.O_WRONLY | os.O_CREAT), "no limit"
        try:
            for _ in range(1000):
                os.write(fd, bytes({MIB}))
        except OSError as error:
            answer = errno.errorcode[error.errno], os.fstat(fd).st_size
        os.close(fd); os.unlink(f"{{slots}}/more")
    """)
    assert "ENOSPC" in told
    image = host.image(live).stat()
    assert image.st_size == live.row.size_bytes
    assert image.st_blocks * 512 <= image.st_size + MIB
    # The slots themselves were preallocated: a full volume keeps no write of theirs back.
    consumer.do("fd = os.open(f'{slots}/slot.rank_1', os.O_WRONLY); os.pwrite(fd, bytes(4 << 20), 0); os.fsync(fd)")


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly"])
def test_what_does_not_fit_is_refused_with_both_numbers_before_anything_is_made(host: Host, backend: str) -> None:
    tier = host.tier(backend, size="1Pi", ranks=1)
    there = os.statvfs(host.root)
    with pytest.raises(InsufficientSpace) as caught:
        host.provision(tier)
    needed = BACKENDS[BackendName(backend)].bytes_needed(tier.spec.total_bytes)
    assert str(needed) in caught.value.cause
    free = int(caught.value.cause.split("), ")[-1].split(" ")[0])
    assert abs(free - there.f_bavail * there.f_frsize) < 8 << 30
    assert os.listdir(tier.spec.path) == []
    assert host.node.ledger.volumes() == []
    assert os.listdir(f"{host.state}/volumes") == [] if os.path.isdir(f"{host.state}/volumes") else True


def test_a_full_disk_in_the_middle_leaves_nothing_and_an_erasure_on_record(host: Host) -> None:
    """The bytes fit, the inodes do not: it fails between two slot files."""
    small = host.base / "small.img"
    host.python(
        """
        import os, subprocess, sys
        from kvtier_node.kernel import libc, loop
        image, target = sys.argv[1:]
        fd = os.open(image, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 48 << 20)
        device = loop.attach(fd)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-I", "128", "-N", "16", device.path], check=True)
        libc.mount(device.path, target, "ext4", 0, None)
        """,
        str(small),
        str(host.root),
    )
    free = os.statvfs(host.root).f_favail
    assert free < 40
    tier = host.tier("SealOnly", size="64Ki", ranks=40, slotSize="64Ki")
    with pytest.raises(InsufficientSpace):
        host.provision(tier)
    [row] = host.node.ledger.volumes()
    assert row.state is VolumeState.ERASED
    assert [receipt.volume_id for receipt in host.node.ledger.receipts()] == [row.volume_id]
    assert os.listdir(tier.spec.path) == []


def test_outside_the_allowed_roots_nothing_is_made(host: Host) -> None:
    with pytest.raises(NotPermitted):
        host.provision(host.tier("SealOnly", path=host.base / "elsewhere"))
    assert not (host.base / "elsewhere").exists()
    assert host.node.ledger.volumes() == []


def test_the_record_in_the_place_says_what_the_ledger_says(host: Host, tier: KVCacheTier) -> None:
    live: LiveVolume = host.provision(tier, uid=7, gid=8)
    record = json.loads(Path(live.row.place, "place.json").read_text())
    assert record["volume_id"] == live.volume_id
    assert record["place"] == live.row.place
    assert (record["uid"], record["gid"], record["ranks"], record["bytes_per_rank"]) == (7, 8, 2, 4 * MIB)
    assert record["node_id"] == host.node.identity.node_id
    host.erase(live)
