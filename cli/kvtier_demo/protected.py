"""Part (b): the same consumer, prompt and SIGKILL inside a fence of kvtier, and the same attack on the raw image.

What provisions and erases is given as a `Protection`; this module drives it and measures. The image is copied while the
consumer lives and its blocks are written, which is the best an attacker can take; it is attacked, and so is what is
left after the erasure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtier_api.errors import VerificationFailed
from kvtier_demo.attack import recover_prompt
from kvtier_demo.canary import count_canaries
from kvtier_demo.child import Consumer, consumer_command
from kvtier_demo.model import DemoModel
from kvtier_demo.rawimage import allocated_bytes, copy_data
from kvtier_demo.report import ProtectedFigures

__all__ = ["Erasure", "Fence", "Protection", "run_protected"]


@dataclass(frozen=True)
class Erasure:
    """An erasure that ended. `erased_at_s`: CLOCK_MONOTONIC seconds at which the kernel had confirmed it."""

    receipt_id: str
    verified: bool
    erased_at_s: float


class Fence(Protocol):
    """A volume in use by one command."""

    @property
    def command_prefix(self) -> Sequence[str]:
        """What stands before the consumer's command line, e.g. `kvtier run ... --`; may be empty."""
        ...

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the command."""
        ...

    @property
    def backend(self) -> str:
        """The volume backend that was chosen; known at the latest when the consumer has reported."""
        ...

    @property
    def weaker(self) -> Sequence[str]:
        """What this backend protects less than a volume with a key of its own, in words."""
        ...

    def raw_files(self) -> Sequence[Path]:
        """Every file or device below the volume that holds its bytes as the disk does; asked before and after."""
        ...

    def wait_erased(self, *, deadline_s: float) -> Erasure:
        """Wait for the erasure after the consumer's death, and verify its receipt offline."""
        ...


class Protection(Protocol):
    """Makes a tier with slots of `block_bytes`, `bytes_per_rank` in all, for one run."""

    def fence(self, *, block_bytes: int, bytes_per_rank: int) -> AbstractContextManager[Fence]: ...


def run_protected(
    model: DemoModel,
    prompt: str,
    *,
    pieces: Sequence[bytes],
    protection: Protection,
    work_directory: Path,
    bytes_per_rank: int,
    erase_deadline_s: float,
    tell: Callable[[str], None],
) -> ProtectedFigures:
    """Serve `prompt` inside a fence, kill, attack, wait for the receipt; return the figures.

    Raises VerificationFailed where the fence names no raw file to search, and whatever the fence and consumer raise.
    """
    block_bytes = model.config.block_shape.block_bytes
    with protection.fence(block_bytes=block_bytes, bytes_per_rank=bytes_per_rank) as fence:
        command = [*fence.command_prefix, *consumer_command("kvtier", model.config)]
        with Consumer(command, environment=fence.environment) as consumer:
            tell("kvtier: serving the same prompt inside the fence")
            report = consumer.serve(prompt)
            os.sync()  # what the file system still holds back belongs to the image that is taken
            taken = [_take(path, work_directory / f"image-{n}") for n, path in enumerate(fence.raw_files())]
            if not any(allocated_bytes(image) for image in taken):
                raise VerificationFailed(
                    "no raw bytes to search: finding nothing would prove nothing", obj=fence.backend
                )
            tell("kvtier: SIGKILL")
            dead_at_s = consumer.sigkill()
            erasure = fence.wait_erased(deadline_s=erase_deadline_s)
            consumer.wait()
        left = [path for path in fence.raw_files() if path.exists()]
        tell("kvtier: the same attack on the raw image, as it was before the kill and as it is now")
        tokens = model.tokenizer.prompt_tokens(prompt)
        attacks = [recover_prompt(image, model) for image in (*taken, *left)]
        canaries = [count_canaries(image, pieces, prompt) for image in (*taken, *left)]
        return ProtectedFigures(
            backend=fence.backend,
            tokens_recovered=max(attack.matching(tokens) for attack in attacks),
            bytes_searched=sum(attack.scanned_bytes for attack in attacks),
            bytes_on_disk=sum(allocated_bytes(path) for path in left),
            canary_hits=sum(hits.total for hits in canaries),
            reload_hits=report.reload_hits,
            reload_identical=report.logits_identical,
            death_to_erased_s=max(erasure.erased_at_s - dead_at_s, 0.0),
            attack_s=sum(attack.seconds for attack in attacks),
            receipt_id=erasure.receipt_id,
            verified=erasure.verified,
            weaker=list(fence.weaker),
        )


def _take(source: Path, target: Path) -> Path:
    copy_data(source, target)
    return target
