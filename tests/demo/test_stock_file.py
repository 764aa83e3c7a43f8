"""The stand-in makes its slot file as vLLM's simple disk backend does; else the attack on it would prove little."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from requirements import need_module

need_module("numpy")

from kvtier_api.errors import EngineError  # noqa: E402
from kvtier_demo.stock import StockDisk, wipe_leftover  # noqa: E402

BLOCK = 8192


def _disk(tmp_path: Path, rank: int = 0, slots: int = 16) -> StockDisk:
    return StockDisk(str(tmp_path / "kv" / "slot"), rank=rank, capacity_bytes=slots * BLOCK + 1, block_bytes=BLOCK)


def test_the_file_is_named_by_rank_private_and_sparse(tmp_path: Path) -> None:
    disk = _disk(tmp_path, rank=3)
    info = os.stat(tmp_path / "kv" / "slot.rank_3")
    assert (info.st_mode & 0o7777, info.st_size, info.st_blocks) == (0o600, 16 * BLOCK, 0)
    disk.close()


def test_it_is_opened_with_o_direct_where_the_file_system_can(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    assert bool(fcntl.fcntl(disk._fd, fcntl.F_GETFL) & os.O_DIRECT) == disk.direct
    disk.close()


def test_an_older_file_and_a_symbolic_link_are_unlinked_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"keep")
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "slot.rank_0").symlink_to(victim)
    disk = _disk(tmp_path)
    disk.put(b"a", bytes(BLOCK))
    disk.close()
    assert victim.read_bytes() == b"keep"


def test_slot_n_lies_at_n_times_the_block_size_without_a_header_and_stays_after_the_end(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    blocks = [os.urandom(BLOCK) for _ in range(3)]
    for number, block in enumerate(blocks):
        disk.put(bytes([number]), block)
    assert [disk.get(bytes([number])) for number in range(3)] == blocks
    assert disk.get(b"unknown") is None
    disk.close()
    assert Path(disk.path).read_bytes()[: 3 * BLOCK] == b"".join(blocks)


def test_blocks_that_o_direct_cannot_write_and_a_full_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="multiple of 4096"):
        StockDisk(str(tmp_path / "slot"), rank=0, capacity_bytes=1 << 20, block_bytes=5000)
    disk = _disk(tmp_path, slots=1)
    disk.put(b"a", bytes(BLOCK))
    with pytest.raises(EngineError, match="all slots are used"):
        disk.put(b"b", bytes(BLOCK))
    disk.close()


def test_the_demonstration_overwrites_its_own_leftover(tmp_path: Path) -> None:
    disk = _disk(tmp_path)
    block = os.urandom(BLOCK)
    disk.put(b"a", block)
    disk.close()
    os.link(disk.path, tmp_path / "second-name")
    wipe_leftover(disk.path)
    assert not os.path.lexists(disk.path)
    assert block not in (tmp_path / "second-name").read_bytes()
    wipe_leftover(disk.path)
