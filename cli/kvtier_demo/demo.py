"""The demonstration as a whole: the stock way, the attack, then kvtier. What prints and parses is the command line's.

Nothing here is canned: the prompt is the caller's, the files are real, the attack sees only a file and the model.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier_api.errors import InvalidResource, VerificationFailed
from kvtier_demo.attack import recover_prompt
from kvtier_demo.canary import count_canaries, pieces_of
from kvtier_demo.child import Consumer, consumer_command
from kvtier_demo.generate import serve
from kvtier_demo.model import DemoModel, ModelConfig
from kvtier_demo.protected import Protection, run_protected
from kvtier_demo.rawimage import allocated_bytes
from kvtier_demo.report import DemoFigures, StockFigures
from kvtier_demo.stock import wipe_leftover

__all__ = ["DEFAULT_PROMPT", "DemoOptions", "run_demo", "run_stock"]

DEFAULT_PROMPT: Final = (
    "My name is Anna Example, born 14 March 1979. My doctor wrote: biopsy positive, stage II. "
    "Please explain the treatment, and do not tell my employer. My account is DE00 1234 5678 9012 3456 00."
)


@dataclass(frozen=True)
class DemoOptions:
    """What to run. `work_parent`: where the work directory is made (default: the system's); it should be on a disk."""

    prompt: str = field(default=DEFAULT_PROMPT, repr=False)
    model: ModelConfig = field(default_factory=ModelConfig)
    work_parent: Path | None = None
    stock_capacity_bytes: int = 1 << 30
    bytes_per_rank: int = 64 << 20
    erase_deadline_s: float = 30.0


def run_demo(
    options: DemoOptions, protection: Protection | None, *, tell: Callable[[str], None] = lambda _: None
) -> DemoFigures:
    """Run part (a), and part (b) where a `protection` is given. `tell` gets a line at each step.

    Raises InvalidResource for a prompt that does not fit, VerificationFailed where the control run proves nothing.
    """
    if not options.prompt.strip():
        raise InvalidResource("is empty", obj="prompt", remedy="type any text")
    try:
        options.prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidResource("is not text in UTF-8", obj="prompt", remedy="check the terminal's locale") from None
    tell("building the model")
    model = DemoModel(options.model)
    served = serve(model, options.prompt)
    pieces = pieces_of(served.full_blocks())
    with _work_directory(options.work_parent) as directory:
        stock = run_stock(model, options, pieces=pieces, directory=directory, tell=tell)
        if not stock.canary_hits:
            raise VerificationFailed("no canary in the stock file: the search is not able to find", obj="stock")
        kvtier = None
        if protection is not None:
            kvtier = run_protected(
                model,
                options.prompt,
                pieces=pieces,
                protection=protection,
                work_directory=directory,
                bytes_per_rank=options.bytes_per_rank,
                erase_deadline_s=options.erase_deadline_s,
                tell=tell,
            )
    return DemoFigures(prompt_tokens=served.prompt_tokens, stock=stock, kvtier=kvtier)


def run_stock(
    model: DemoModel, options: DemoOptions, *, pieces: list[bytes], directory: Path, tell: Callable[[str], None]
) -> StockFigures:
    """Part (a): serve, offload to a plain slot file, SIGKILL, and read the prompt off what is left."""
    prefix = directory / "stock" / "slot"
    leftover = Path(f"{prefix}.rank_0")
    command = consumer_command(
        "stock", model.config, "--disk-path", str(prefix), "--capacity-bytes", str(options.stock_capacity_bytes)
    )
    try:
        with Consumer(command) as consumer:
            tell("stock: serving the prompt, offloading its KV blocks to a plain slot file")
            report = consumer.serve(options.prompt)
            tell("stock: SIGKILL")
            consumer.sigkill()
            consumer.wait()
        tell("stock: reading the prompt off the left-over file")
        found = recover_prompt(leftover, model)
        return StockFigures(
            tokens_recovered=found.matching(model.tokenizer.prompt_tokens(options.prompt)),
            word_for_word=found.text == options.prompt,
            bytes_on_disk=allocated_bytes(leftover),
            canary_hits=count_canaries(leftover, pieces, options.prompt).total,
            reload_hits=report.reload_hits,
            reload_identical=report.logits_identical,
            o_direct=report.o_direct,
            attack_s=found.seconds,
            recovered_text=found.text,
        )
    finally:
        wipe_leftover(str(leftover))


@contextmanager
def _work_directory(parent: Path | None) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kvtier-demo-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
