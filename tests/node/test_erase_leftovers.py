"""Whatever lies in a volume when its consumer ends goes with it, or is named. Nothing that it points to is touched."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_node.guarding import look
from kvtier_node.kernel import files
from kvtier_node.receipts import Receipt, Step
from node_host import CANARY, MIB, Host, raw_count

pytestmark = pytest.mark.root


def steps(receipt: Receipt) -> dict[str, Step]:
    return {step.name: step for step in receipt.steps}


def stock_files(slots: Path, outside: Path) -> None:
    """What vLLM's stock disk backend leaves: it unlinks our file and makes a sparse one of its own."""
    (slots / "slot.rank_0").unlink()
    with (slots / "slot.rank_0").open("wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 30)
        file.write(CANARY)
    (slots / "kv.rank_7").write_bytes(CANARY)
    (slots / ".o_direct_probe_123").write_bytes(bytes(4096))
    (slots / "block.tmp").write_bytes(CANARY * 3)


def subdirectories(slots: Path, outside: Path) -> None:
    for number in range(3):
        deep = slots / f"model{number}" / "ab" / "cd"
        deep.mkdir(parents=True)
        (deep / "block.pt").write_bytes(CANARY)
    (slots / "model0").chmod(0o777)
    (slots / "model1").chmod(0o000)
    os.chown(slots / "model2", 4242, 4242)


def a_tree_deeper_than_any_limit(slots: Path, outside: Path) -> None:
    fd = os.open(slots, os.O_RDONLY)
    try:
        for _ in range(100 if os.path.ismount(slots.parent) else 300):  # a small volume has few inodes
            os.mkdir("d" * 40, dir_fd=fd)
            above, fd = fd, os.open("d" * 40, os.O_RDONLY, dir_fd=fd)
            os.close(above)
        file = os.open("deep", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
        os.write(file, CANARY)
        os.close(file)
    finally:
        os.close(fd)


def odd_names(slots: Path, outside: Path) -> None:
    for name in (b"new\nline", b"\xff\xfe", b"-rf", b" ", "ключ".encode(), b"a" * 255 if outside else b""):
        with open(os.path.join(os.fsencode(slots), name[:100]), "wb") as file:
            file.write(CANARY)
        os.mkdir(os.path.join(os.fsencode(slots), name[:100] + b".d"))


def open_modes(slots: Path, outside: Path) -> None:
    slots.chmod(0o777)
    (slots / "slot.rank_0").chmod(0o000)
    (slots / "world").write_bytes(CANARY)
    (slots / "world").chmod(0o666)


def links_to_elsewhere(slots: Path, outside: Path) -> None:
    (slots / "link").symlink_to(outside / "file")
    (slots / "directory-link").symlink_to(outside)
    (slots / "slot.rank_9").symlink_to(outside / "file")


def special_files(slots: Path, outside: Path) -> None:
    os.mkfifo(slots / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(slots)
        try:
            server.bind("socket")
        finally:
            os.chdir(here)
    os.mknod(slots / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(slots / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 250))


def immutable_and_append_only(slots: Path, outside: Path) -> None:
    (slots / "kept").mkdir()
    (slots / "kept" / "inside").write_bytes(CANARY)
    for path, flag in (
        ("slot.rank_0", "+i"),
        ("slot.rank_1", "+a"),
        ("kept/inside", "+i"),
        ("kept", "+i"),
        (".", "+i"),
    ):
        subprocess.run(["chattr", flag, str(slots / path)], check=True)


def odd_allocation(slots: Path, outside: Path) -> None:
    """Blocks beyond the size, and half a last block: a punch leaves both."""
    with (slots / "beyond").open("wb") as file:
        file.write(CANARY)
        subprocess.run(["fallocate", "-n", "-o", "8192", "-l", "65536", str(slots / "beyond")], check=True)


KINDS: list[Callable[[Path, Path], None]] = [
    stock_files, subdirectories, a_tree_deeper_than_any_limit, odd_names, open_modes, links_to_elsewhere, special_files,
    immutable_and_append_only, odd_allocation,
]  # fmt: skip


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly"])
@pytest.mark.parametrize("leave", KINDS, ids=lambda leave: leave.__name__)
def test_leftovers_go_with_the_volume_and_nothing_outside_is_touched(
    host: Host, backend: str, leave: Callable[[Path, Path], None]
) -> None:
    outside = host.base / "outside"
    outside.mkdir()
    (outside / "file").write_text("somebody's")
    before = [(path.name, path.read_text(), path.stat().st_mtime_ns) for path in outside.iterdir()]
    live, consumer = host.in_use(host.tier(backend))
    leave(Path(live.slots_path), outside)
    assert look(host.node, live).in_use, "looking at odd things ends no volume"
    consumer.kill()
    seen = look(host.node, live)
    assert seen.error is None
    assert seen.receipt is not None
    host.assert_nothing_left(live)
    assert [(path.name, path.read_text(), path.stat().st_mtime_ns) for path in outside.iterdir()] == before


def test_a_slot_file_with_a_second_name_elsewhere_is_erased_there_too(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer)
    outside = host.base / "second-name"
    os.link(f"{live.slots_path}/slot.rank_0", outside)
    assert raw_count(outside) == 4096
    consumer.kill()
    host.erase(live)
    assert raw_count(outside) == 0
    assert outside.stat().st_blocks == 0


def test_a_file_that_the_consumer_linked_into_the_volume_is_named_and_left_alone(host: Host) -> None:
    outside = host.base / "victim"
    outside.write_bytes(b"somebody's" * 1000)
    live, consumer = host.in_use(host.tier("SealOnly"))
    os.link(outside, f"{live.slots_path}/linked")
    consumer.kill()
    receipt = host.erase(live)
    assert outside.read_bytes() == b"somebody's" * 1000
    assert steps(receipt)["linked-elsewhere"].ok is None
    assert "linked" in steps(receipt)["linked-elsewhere"].detail
    host.assert_nothing_left(live)


def test_two_names_of_one_file_inside_the_volume_are_one_file_of_it(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.do(f"open(f'{{slots}}/one', 'wb').write({CANARY!r} * 100); os.link(f'{{slots}}/one', f'{{slots}}/two')")
    keeper = os.open(f"{live.slots_path}/one", os.O_PATH)
    os.sync()
    consumer.kill()
    live.close_watch()
    receipt = host.erase(live)
    assert "linked-elsewhere" not in steps(receipt)
    assert os.fstat(keeper).st_blocks == 0
    os.close(keeper)


def test_an_unlinked_slot_file_of_a_dead_process_is_punched_and_let_go(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    host.write_canary(consumer, keep_open=True)
    consumer.do("os.unlink(f'{slots}/slot.rank_0')")
    assert live.watch is not None
    before = live.watch.used_bytes()
    assert live.watch.refresh() == 0, "its process still has it"
    assert live.watch.used_bytes() == before, "the agent's own descriptor keeps the blocks from being given to others"
    consumer.do("os.close(keep['fd'])")
    assert live.watch.refresh() == 1
    assert live.watch.used_bytes() == before - 4 * MIB


def test_a_restarting_engine_that_replaces_its_file_leaves_no_old_bytes(host: Host) -> None:
    """unlink, make anew, as the stock backend does at each start: the old blocks are erased before they are free."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    assert live.watch is not None
    for _ in range(3):
        host.write_canary(consumer)
        old = os.open(f"{live.slots_path}/slot.rank_0", os.O_RDONLY)
        consumer.do(
            "os.unlink(f'{slots}/slot.rank_0'); os.close(os.open(f'{slots}/slot.rank_0', os.O_RDWR | os.O_CREAT))"
        )
        os.close(old)
        assert live.watch.refresh() == 1
    consumer.kill()
    host.erase(live)
    host.assert_nothing_left(live)


def test_a_consumer_with_very_many_files_does_not_take_the_agents_descriptors(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.do("[os.close(os.open(f'{slots}/{number}', os.O_WRONLY | os.O_CREAT)) for number in range(3000)]")
    before = len(os.listdir("/proc/self/fd"))
    assert live.watch is not None
    live.watch.refresh()
    assert len(os.listdir("/proc/self/fd")) - before < 1300
    consumer.do("keep['fd'] = os.open(f'{slots}/2999', os.O_RDONLY)")
    assert live.watch.holders() == 1, "files beyond the limit are looked at, too"


def test_a_lease_of_the_consumers_own_neither_blocks_nor_hides_it(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.do("""
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        keep["fd"] = os.open(f"{slots}/mine", os.O_RDWR | os.O_CREAT)
        fcntl.fcntl(keep["fd"], fcntl.F_SETLEASE, fcntl.F_WRLCK)
    """)
    assert live.watch is not None
    live.watch.refresh()
    assert live.watch.holders() == 1
    consumer.kill()
    assert look(host.node, live).receipt is not None


def test_clearing_attributes_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert files.clear_protection(fd) is False
        files.set_immutable(fd, True)
        assert files.has_attribute(fd, 0x10)
        assert files.clear_protection(fd) is True
        assert not files.has_attribute(fd, 0x10)
    finally:
        os.close(fd)
