"""A volume's life on disks that fill: what has begun is erased and on record, what has not is refused with nothing made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.errors import InsufficientSpace, KvtierError, LedgerError
from kvtier_api.volume import VolumeState
from kvtier_node.erasing import erase
from kvtier_node.event_log import configure
from kvtier_node.guarding import look
from kvtier_node.kernel import fscrypt
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.places import Places
from kvtier_node.provisioning import provision
from kvtier_node.receipts import Technique, export_chain, verify_chain
from kvtier_node.recovery import open_node
from kvtier_node.threads import Threads
from kvtier_node.volume_watch import VolumeWatch
from node_host import Consumer, Host, make_host
from requirements import need_root, need_tool

pytestmark = pytest.mark.root
MIB = 1 << 20


@pytest.fixture
def disk() -> Iterator[Path]:
    """An ext4 of its own, with a policy on its directory `secret`: all of it is there for who fills it."""
    need_root()
    base = Path(tempfile.mkdtemp(prefix="kvtier-disk-"))
    base.chmod(0o755)
    picture, mount = base / "image", base / "mnt"
    picture.write_bytes(b"")
    os.truncate(picture, 128 * MIB)
    subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", "encrypt", "-m", "0", picture], check=True)
    mount.mkdir()
    subprocess.run([need_tool("mount"), "-o", "loop", picture, mount], check=True)
    try:
        mount.chmod(0o755)
        yield mount
    finally:
        subprocess.run([need_tool("umount"), "-l", mount], check=True)
        shutil.rmtree(base)


@pytest.fixture
def host(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A node with everything of its own on that disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    made = make_host()
    monkeypatch.undo()
    top = os.open(disk, os.O_RDONLY | os.O_DIRECTORY)
    key_id = fscrypt.add_key(top, bytearray(os.urandom(64)))
    (made.root / "secret").mkdir()
    secret = os.open(made.root / "secret", os.O_RDONLY | os.O_DIRECTORY)
    fscrypt.set_policy(secret, key_id)
    os.close(secret)
    os.close(top)
    try:
        yield made
    finally:
        ballast(made).unlink(missing_ok=True)
        made.clean_up()


def ballast(host: Host) -> Path:
    return host.base.parent / "ballast"


def top_up(host: Host) -> None:
    with ballast(host).open("ab", buffering=0) as file:
        size = MIB
        while size >= 512:
            try:
                file.write(b"\xff" * size)
            except OSError:
                size //= 2
        os.fsync(file.fileno())


def fill(host: Host) -> None:
    """To the last block; and the ledger's own pages and log, until nothing that is not essential fits."""
    top_up(host)
    with pytest.raises(LedgerError, match="the disk under the state directory is full"):
        for _ in range(20_000):
            host.node.ledger.add_event("Normal", "Fill", "x", "y" * 4000)
    assert os.statvfs(host.base).f_bavail < 4


def in_use(host: Host, backend: str) -> tuple[LiveVolume, Consumer]:
    path = host.root / "secret" / "demo" if backend == "HostAttested" else None
    live, consumer = host.in_use(host.tier(backend, ranks=1, path=path))
    host.write_canary(consumer)
    return live, consumer


def assert_erased(host: Host, live: LiveVolume) -> None:
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED
    host.assert_nothing_left(live)
    host.node.ledger.check()
    assert verify_chain(export_chain(host.node.ledger, host.node.identity)).count == 1


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly", "HostAttested"])
def test_a_consumer_that_ends_on_a_full_disk_is_erased_and_on_record(host: Host, backend: str) -> None:
    live, consumer = in_use(host, backend)
    fill(host)
    consumer.kill()
    seen = look(host.node, live)
    assert seen.error is None and seen.receipt is not None
    assert (seen.receipt.technique is Technique.OVERWRITE) == (backend != "Fscrypt"), "the canary was not sealed"
    assert_erased(host, live)


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly"])
def test_a_start_on_a_full_disk_erases_what_a_crash_left(host: Host, backend: str) -> None:
    live, consumer = in_use(host, backend)
    host.drop_guardians()
    consumer.kill()
    fill(host)
    host.reopen()
    assert [receipt.volume_id for receipt in host.recover().erased] == [live.volume_id]
    assert_erased(host, live)


def test_a_volume_that_cannot_be_taken_in_hand_keeps_no_other_from_being_erased(host: Host) -> None:
    """Its lock file is gone, and there is no room for another."""
    first, one = in_use(host, "SealOnly")
    second, other = host.in_use(host.tier("SealOnly", ranks=1, name="second"))
    host.drop_guardians()
    one.kill()
    other.kill()
    volumes = Path(host.state, "volumes")
    kept = Path(volumes, f"{second.volume_id}.lock")
    Path(volumes, f"{first.volume_id}.lock").unlink()
    subprocess.run([need_tool("chattr"), "+i", volumes], check=True)  # as a directory without room for a name
    try:
        assert kept.exists()
        found = host.recover()
        assert [(row.volume_id, "lock" in str(error)) for row, error in found.unguarded] == [(first.volume_id, True)]
        assert host.node.ledger.get(second.volume_id).state is VolumeState.ERASED
    finally:
        subprocess.run([need_tool("chattr"), "-i", volumes], check=True)
    host.drop_guardians()
    assert [receipt.volume_id for receipt in host.recover().erased] == [first.volume_id]


def test_a_consumer_that_fills_the_disk_itself_is_erased_and_the_disk_is_free_again(host: Host) -> None:
    free = os.statvfs(host.base).f_bavail
    live, consumer = in_use(host, "SealOnly")
    consumer.do("""
        n = size = 1 << 20
        file = open(f"{slots}/more", "wb", buffering=0)
        while size >= 512:
            try: file.write(b"P" * size)
            except OSError: size //= 2
        file.close()
    """)
    assert os.statvfs(host.base).f_bavail < 4
    consumer.kill()
    assert look(host.node, live).receipt is not None
    assert_erased(host, live)
    assert os.statvfs(host.base).f_bavail > free - 2 * MIB // 4096


def test_no_volume_is_begun_where_its_erasure_could_not_be_recorded(host: Host, tmp_path: Path) -> None:
    """The tier's own file system has room: it is the ledger that has none."""
    roomy = tmp_path / "tiers"
    roomy.mkdir()
    tier = host.tier("SealOnly", ranks=1, size="1Mi", path=roomy / "demo")
    fill(host)
    identity = host.node.identity
    node = Node(host.state, "node-a", host.node.ledger, identity, Places([str(roomy)], identity))
    for _ in range(2):
        with pytest.raises(InsufficientSpace, match="free space"):
            provision(node, tier, uid=0, gid=0)
    assert node.ledger.volumes() == []
    assert list((roomy / "demo").iterdir()) == []
    assert not os.path.exists(f"{host.state}/volumes") or os.listdir(f"{host.state}/volumes") == []
    ballast(host).unlink()
    live = provision(node, tier, uid=0, gid=0)
    assert erase(node, live, Trigger.EXIT).technique is Technique.PROCESS_DEATH


def test_what_cannot_be_told_on_a_full_disk_does_not_undo_what_was_done(host: Host) -> None:
    """The event about a stranger's file has no room. The volume is erased and on record all the same, once."""
    live, consumer = in_use(host, "SealOnly")
    junk = Path(live.row.place, "junk")
    junk.touch()
    fill(host)
    events = len(host.node.ledger.events(10_000))
    host.node.ledger.add_event = refuse  # type: ignore[method-assign]
    consumer.kill()
    seen = look(host.node, live)
    assert seen.error is None and seen.receipt is not None
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED
    assert len(host.node.ledger.events(10_000)) == events
    assert not os.path.exists(f"{host.state}/volumes/{live.volume_id}.lock")
    junk.unlink()


@pytest.mark.parametrize("backend", ["SealOnly"])
def test_a_guardian_that_cannot_tell_why_it_fails_goes_on_trying(host: Host, backend: str) -> None:
    live, consumer = in_use(host, backend)
    held = os.open(f"{live.slots_path}/slot.rank_0", os.O_RDONLY)
    host.node.ledger.advance(live.volume_id, VolumeState.DYING)  # it is not asked any more whether it is in use
    live.row = host.node.ledger.get(live.volume_id)
    consumer.kill()
    fill(host)
    host.node.ledger.add_event = refuse  # type: ignore[method-assign]
    watch = VolumeWatch(host.node, live, log=configure(), requests=list, threads=Threads())
    for _ in range(2):
        turn = watch._turn()
        assert not turn.ended and "another process has it open" in watch.failure
    os.close(held)
    assert watch._turn().ended
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED


def refuse(*_: object) -> None:
    raise LedgerError("the disk under the state directory is full; nothing was recorded")


def test_kvtier_run_on_a_full_disk_erases_first_then_refuses_and_says_what_to_do(host: Host) -> None:
    live, consumer = in_use(host, "SealOnly")
    host.drop_guardians()
    consumer.kill()
    manifest = host.base / "tier.yaml"
    manifest.write_text(host.tier("SealOnly", ranks=1).model_dump_json(by_alias=True, exclude_none=True))
    mark = host.base / "ran"
    fill(host)
    command = [sys.executable, "-m", "kvtier_cli.main", "run", "--tier-file", str(manifest), "--state-dir", host.state,
               "--root", str(host.root), "--", "touch", str(mark)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert f"erased {live.volume_id}" in done.stderr
    if done.returncode != 0:  # what was erased may have made room enough
        assert done.returncode == InsufficientSpace.exit_code, done.stderr
        assert "free space" in done.stderr or "give the tier a larger file system" in done.stderr
        assert not mark.exists()
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED
    assert host.node.ledger.volumes(frozenset(VolumeState) - {VolumeState.ERASED}) == []


def test_a_lost_ledger_is_not_rebuilt_halfway_on_a_full_disk(host: Host) -> None:
    live, consumer = in_use(host, "SealOnly")
    host.drop_guardians()
    consumer.kill()
    fill(host)
    host.node.ledger.close()
    Path(host.state, "ledger.db").write_bytes(b"no ledger any more")
    Path(host.state, "ledger.reserve").unlink(missing_ok=True)
    top_up(host)
    with pytest.raises(KvtierError) as caught:
        open_node(host.state, [str(host.root)], name="node-a")
    assert caught.value.obj
    assert Path(live.row.place, "place.json").exists(), "the volume's own record is what it will be rebuilt from"
    ballast(host).unlink()
    host.node = open_node(host.state, [str(host.root)], name="node-a")
    assert host.node.ledger.rebuilt is not None
    assert [receipt.volume_id for receipt in host.recover().erased] == [live.volume_id]


SHARED = """
import os, sys
from pathlib import Path
from kvtier_node import shared_memory
from kvtier_node.kernel import libc
from kvtier_node.kernel.namespaces import leave_mount_namespace
leave_mount_namespace()
libc.mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=1m")
region = Path("/dev/shm/vllm_offload_0123456789abcdef.mmap")
region.write_bytes(b"a prompt " * 20_000)
keeper = os.open(region, os.O_PATH)
info = os.fstat(keeper)
record = shared_memory.SharedFile(region.name, info.st_dev, info.st_ino, ())
with open("/dev/shm/ballast", "wb", buffering=0) as file:
    try:
        while True:
            file.write(b"x" * 4096)
    except OSError:
        pass
print([step.ok for step in shared_memory.erase([record])], os.fstat(keeper).st_blocks, region.exists())
"""


def test_shared_memory_that_is_full_is_cleared_in_place(host: Host) -> None:
    done = host.python(SHARED)
    assert done.stdout == "[True] 0 False\n"
