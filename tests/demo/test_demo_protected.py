"""Part (b)'s driver with the real engine and real kills, on a plain directory with sealed slots.

The node agent is not here: the fence below makes the slot file and, after the death, removes it. What is tested is that
the driver measures: it finds nothing when the engine seals, and everything when it does not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier_api.errors import VerificationFailed
from kvtier_api.marker import MARKER_NAME, Marker

if TYPE_CHECKING:
    from kvtier_demo.generate import Served
    from kvtier_demo.model import DemoModel
    from kvtier_demo.protected import Erasure
    from kvtier_demo.report import ProtectedFigures

pytestmark = [pytest.mark.torch, pytest.mark.slow]
NONCE = "0" * 32


@dataclass
class DirectoryFence:
    """Stands for a SealOnly volume, with the marker's contract and no agent."""

    root: Path
    shows_files: bool
    command_prefix: tuple[str, ...] = ()
    backend: str = "SealOnly"
    weaker: tuple[str, ...] = ("slots only",)

    @property
    def slot(self) -> Path:
        return self.root / "slots" / "slot.rank_0"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KVTIER_MARKER": str(self.root / MARKER_NAME), "KVTIER_NONCE": NONCE}

    def raw_files(self) -> list[Path]:
        return [self.slot] if self.shows_files else []

    def wait_erased(self, *, deadline_s: float) -> Erasure:
        from kvtier_demo.protected import Erasure

        assert deadline_s > 0
        self.slot.unlink()
        return Erasure(receipt_id="none", verified=False, erased_at_s=time.monotonic())


@dataclass
class DirectoryProtection:
    root: Path
    sealed: bool = True
    shows_files: bool = True

    @contextmanager
    def fence(self, *, block_bytes: int, bytes_per_rank: int) -> Iterator[DirectoryFence]:
        fence = DirectoryFence(self.root, self.shows_files)
        fence.slot.parent.mkdir(mode=0o700, parents=True)
        fd = os.open(fence.slot, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(fd, 0, bytes_per_rank)
        os.close(fd)
        marker = Marker(
            volume_id="kvv-" + "0" * 20,
            tier_uid="uid",
            tier_namespace="default",
            tier_name="demo",
            nonce=NONCE,
            ranks=1,
            slot_files=["slot.rank_0"],
            slot_size_bytes=block_bytes,
            bytes_per_rank=bytes_per_rank,
            seal_slots=self.sealed,
            salt_policy="Required",
            salt_hash="sha256",
            max_age_s=3600,
            backend="SealOnly",
            own_device=False,
        )
        (self.root / MARKER_NAME).write_bytes(marker.to_bytes())
        yield fence


def _run(
    model: DemoModel, served: Served, prompt: str, protection: DirectoryProtection, work_directory: Path
) -> ProtectedFigures:
    from kvtier_demo.canary import pieces_of
    from kvtier_demo.protected import run_protected

    return run_protected(
        model,
        prompt,
        pieces=pieces_of(served.full_blocks()),
        protection=protection,
        work_directory=work_directory,
        bytes_per_rank=4 << 20,
        erase_deadline_s=30,
        tell=lambda _: None,
    )


def test_the_same_attack_finds_nothing_in_sealed_slots_though_the_reload_worked(
    tmp_path: Path, model: DemoModel, served: Served, prompt: str
) -> None:
    figures = _run(model, served, prompt, DirectoryProtection(tmp_path / "volume"), tmp_path)
    assert (figures.tokens_recovered, figures.canary_hits) == (0, 0)
    assert figures.bytes_searched >= 4 << 20
    assert figures.reload_hits == (len(served.tokens) - 1) // model.config.block_tokens
    assert figures.reload_identical
    assert (figures.bytes_on_disk, figures.receipt_id, figures.verified) == (0, "none", False)
    assert figures.death_to_erased_s > 0
    assert figures.weaker == ["slots only"]


def test_without_seals_the_same_driver_recovers_the_prompt_so_its_zeros_mean_something(
    tmp_path: Path, model: DemoModel, served: Served, prompt: str
) -> None:
    figures = _run(model, served, prompt, DirectoryProtection(tmp_path / "volume", sealed=False), tmp_path)
    assert figures.tokens_recovered == served.prompt_tokens
    assert figures.canary_hits > 0


def test_a_run_with_nothing_to_search_is_refused_and_not_reported_as_clean(
    tmp_path: Path, model: DemoModel, served: Served, prompt: str
) -> None:
    with pytest.raises(VerificationFailed, match="no raw bytes to search"):
        _run(model, served, prompt, DirectoryProtection(tmp_path / "volume", shows_files=False), tmp_path)
