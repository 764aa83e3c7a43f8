"""Host hardening: measured on this kernel where it can be set up for real, read from tables of other hosts where not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_node.hardening import measure_host
from requirements import missing, need_root, need_tool

HEAD = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """/proc and /sys of a host with nothing to find fault with."""
    write(tmp_path, "proc/swaps", HEAD)
    write(tmp_path, "proc/sys/kernel/core_pattern", "\n")
    write(tmp_path, "proc/sys/kernel/core_uses_pid", "0\n")
    write(tmp_path, "sys/power/state", "freeze mem\n")
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    return tmp_path


def write(base: Path, name: str, text: str) -> None:
    (base / name).parent.mkdir(parents=True, exist_ok=True)
    (base / name).write_text(text)


def look(base: Path, roots: list[str] | None = None, consumers: list[int] | None = None) -> dict[str, bool | None]:
    facts = measure_host(roots or ["/proc"], consumers or [], proc=f"{base}/proc", sys=f"{base}/sys")
    return {name: getattr(facts, name).ok for name in ("swap", "core_dumps", "hibernation")}


def block(base: Path, device: int, uuid: str | None, slaves: dict[str, int] | None = None) -> None:
    where = f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    (base / where).mkdir(parents=True, exist_ok=True)
    if uuid is not None:
        write(base, f"{where}/dm/uuid", f"{uuid}\n")
    for name, number in (slaves or {}).items():
        write(base, f"{where}/slaves/{name}/dev", f"{os.major(number)}:{os.minor(number)}\n")


def test_a_hard_host_is_hard(other: Path) -> None:
    assert look(other) == {"swap": True, "core_dumps": True, "hibernation": True}


def test_this_host_is_measured_without_an_error(tmp_path: Path) -> None:
    facts = measure_host([str(tmp_path)], [os.getpid()])
    for fact in (facts.swap, facts.core_dumps, facts.hibernation, facts.snapshots):
        assert fact.reason


@pytest.fixture
def real_swap(tmp_path: Path) -> Iterator[Path]:
    need_root()
    need_tool("mkswap")
    path = tmp_path / "swap file"
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 4 << 20)
        file.write(bytes(4 << 20))
    subprocess.run(["mkswap", path], check=True, capture_output=True)
    if subprocess.run(["swapon", path], capture_output=True, check=False).returncode != 0:
        missing("a kernel that takes a swap file")
    try:
        yield path
    finally:
        subprocess.run(["swapoff", path], check=True)


@pytest.mark.root
def test_a_real_swap_file_on_an_unencrypted_disk_is_seen(real_swap: Path) -> None:
    swap = measure_host([]).swap
    assert swap.ok is False
    assert f"swap on {real_swap} is not encrypted" in swap.reason


def test_swap_on_dm_crypt_is_told_from_swap_that_is_not(other: Path) -> None:
    device = os.stat(other).st_dev  # of a swap file: its file system's device
    area = other / "area"
    area.touch()
    write(other, "proc/swaps", f"{HEAD}{area} file 1 0 -2\n")
    block(other, device, "LVM-abc", {"dm-1": os.makedev(253, 1)})
    block(other, os.makedev(253, 1), "CRYPT-LUKS2-0123-luks")
    assert look(other)["swap"] is True
    block(other, device, "LVM-abc", {"dm-1": os.makedev(253, 1), "sda": os.makedev(8, 0)})
    block(other, os.makedev(8, 0), None)
    assert look(other)["swap"] is False  # one path to a disk without encryption is enough


def test_a_swap_area_that_cannot_be_looked_at_has_no_verdict(other: Path) -> None:
    write(other, "proc/swaps", f"{HEAD}/nonexistent\\040(deleted) file 1 0 -2\n")
    assert look(other)["swap"] is None


@pytest.mark.parametrize(("backing", "ok"), [("none", True), ("/dev/sda3", False), (None, True)])
def test_zram_is_memory_unless_it_writes_back(other: Path, backing: str | None, ok: bool) -> None:
    area = other / "area"
    area.touch()
    device = os.stat(other).st_dev
    write(other, "proc/swaps", f"{HEAD}{area} partition 1 0 100\n")
    (other / "sys/block/zram0").mkdir(parents=True)
    (other / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").symlink_to(other / "sys/block/zram0")
    if backing is not None:
        write(other, "sys/block/zram0/backing_dev", f"{backing}\n")
    assert look(other)["swap"] is ok


@pytest.mark.parametrize(
    ("pattern", "ok"),
    [("|/usr/lib/systemd/systemd-coredump %P", False), ("|/bin/false", True), ("", True), ("core", None)],
)
def test_a_core_pattern_that_pipes_takes_every_process_whatever_its_limit(
    other: Path, pattern: str, ok: bool | None
) -> None:
    write(other, "proc/sys/kernel/core_pattern", f"{pattern}\n")
    expected = ok if ok is not None else resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
    assert look(other)["core_dumps"] is expected


@pytest.mark.parametrize(("limit", "ok"), [(0, True), (4096, False)])
def test_with_core_files_the_limit_of_the_real_consumer_decides(tmp_path: Path, limit: int, ok: bool) -> None:
    if Path("/proc/sys/kernel/core_pattern").read_text().startswith("|"):
        pytest.skip("core dumps are piped on this host")
    code = f"import resource as r; r.setrlimit(r.RLIMIT_CORE, ({limit}, {limit})); print('set', flush=True); input()"
    consumer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert consumer.stdout is not None and consumer.stdout.readline() == b"set\n"
        assert measure_host([], [consumer.pid]).core_dumps.ok is ok
    finally:
        consumer.kill()
        consumer.wait()


def test_a_consumer_that_ended_meanwhile_counts_no_more(other: Path) -> None:
    write(other, "proc/sys/kernel/core_pattern", "core\n")
    write(
        other, "proc/7/limits", "Limit Soft Limit Hard Limit Units\nMax core file size        0   unlimited   bytes\n"
    )
    assert look(other, consumers=[7, 8])["core_dumps"] is True
    write(
        other, "proc/8/limits", "Limit Soft Limit Hard Limit Units\nMax core file size        unlimited   unlimited\n"
    )
    assert look(other, consumers=[7, 8])["core_dumps"] is False
    write(other, "proc/8/limits", "nothing\n")
    assert look(other, consumers=[7, 8])["core_dumps"] is None


@pytest.mark.parametrize(
    ("disk", "resume", "swaps", "ok"),
    [
        ("[platform] shutdown", "0:0", "", True),
        ("[platform] shutdown", "8:3", "", False),
        ("[platform] shutdown", "0:0", "/dev/sda2 partition 1 0 -2\n", False),
        ("[platform] shutdown", "0:0", "/dev/zram0 partition 1 0 100\n", True),
        ("[disabled]", "8:3", "/dev/sda2 partition 1 0 -2\n", True),
        (None, "8:3", "", None),
    ],
)
def test_hibernation_needs_a_kernel_that_can_and_a_disk_to_write_to(
    other: Path, disk: str | None, resume: str, swaps: str, ok: bool | None
) -> None:
    write(other, "sys/power/state", "freeze mem disk\n")
    write(other, "sys/power/resume", f"{resume}\n")
    write(other, "proc/swaps", HEAD + swaps)
    if disk is not None:
        write(other, "sys/power/disk", f"{disk}\n")
    assert look(other)["hibernation"] is ok


@pytest.mark.parametrize(
    ("uuid", "below", "ok"),
    [
        (None, None, True),
        ("LVM-linear", None, True),
        ("LVM-thin", "LVM-pool-tpool", False),
        ("LVM-origin", "LVM-origin-real", False),
        ("CRYPT-LUKS2-x", "LVM-thinpool-tpool", False),
    ],
)
def test_thin_volumes_and_snapshots_below_the_root_are_found(
    other: Path, uuid: str | None, below: str | None, ok: bool
) -> None:
    if not measure_host([str(other)], sys=f"{other}/sys").snapshots.ok:
        missing("a /tmp whose file system keeps no old blocks")
    device = os.stat(other).st_dev
    block(other, device, uuid, {"dm-9": os.makedev(253, 9)} if below else None)
    if below:
        block(other, os.makedev(253, 9), below)
    assert measure_host([str(other / "not/made/yet")], sys=f"{other}/sys").snapshots.ok is ok
