"""Part (a) with real processes and a real SIGKILL; nothing of it is left behind."""

from __future__ import annotations

import json
import os
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier_api.errors import InvalidResource, KernelError, KvtierError
from requirements import need_module

if TYPE_CHECKING:
    from kvtier_demo.model import DemoModel

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_sigkill_of_a_stock_engine_leaves_the_prompt_word_for_word(tmp_path: Path, prompt: str) -> None:
    need_module("torch")
    from rich.console import Console

    from kvtier_demo.demo import DemoOptions, run_demo
    from kvtier_demo.rawimage import chunks
    from kvtier_demo.report import print_report, to_json

    steps: list[str] = []
    work, kept = tmp_path / "work", tmp_path / "kept"
    work.mkdir()

    def tell(step: str) -> None:
        steps.append(step)
        if "SIGKILL" in step:
            os.link(next(work.glob("*/stock/slot.rank_0")), kept)  # a second name, to see what becomes of the bytes

    figures = run_demo(DemoOptions(prompt=prompt, work_parent=work), None, tell=tell)
    stock = figures.stock
    assert (stock.recovered_text, stock.word_for_word, stock.tokens_recovered) == (prompt, True, figures.prompt_tokens)
    assert stock.reload_hits >= figures.prompt_tokens // 16
    assert stock.reload_identical
    assert stock.bytes_on_disk >= 32768 * stock.reload_hits
    assert stock.canary_hits > 0
    assert list(work.iterdir()) == [], "the leftover and its directory are gone"
    assert not any(data.any() for _, _, data in chunks(kept, overlap_bytes=0)), "its bytes were overwritten"
    assert len(steps) >= 4

    document = to_json(figures)
    assert json.loads(document)["stock"]["tokens_recovered"] == figures.prompt_tokens
    assert "Brückner" not in document
    printed = StringIO()
    print_report(figures, Console(file=printed, width=200))
    assert "word for word" in printed.getvalue()
    assert "Zoë Brückner" in printed.getvalue()


def test_the_prompt_is_in_no_argument_and_no_environment(tmp_path: Path, model: DemoModel) -> None:
    from kvtier_demo.child import Consumer, consumer_command

    command = consumer_command("stock", model.config, "--disk-path", str(tmp_path / "slot"))
    with Consumer(command) as consumer:
        report = consumer.serve("canary4711 canary4711")
        process = Path("/proc") / str(report.pid)
        assert b"canary4711" not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        assert "canary4711" not in report.model_dump_json()
        consumer.sigkill()
        assert consumer.wait() == -9


def test_a_consumer_ends_with_the_process_that_started_it(tmp_path: Path, model: DemoModel) -> None:
    from kvtier_demo.child import Consumer, consumer_command

    command = consumer_command("stock", model.config, "--disk-path", str(tmp_path / "slot"))
    with Consumer(command) as consumer:
        pid = consumer.serve("hello").pid
        os.kill(pid, 0)
        assert consumer._process.stdin is not None
        consumer._process.stdin.close()  # what the kernel does when the parent dies
        assert consumer.wait() == 0


def test_a_failure_in_the_consumer_is_told_with_its_cause(tmp_path: Path, model: DemoModel) -> None:
    from kvtier_demo.child import Consumer, consumer_command

    command = consumer_command(
        "stock", model.config, "--disk-path", str(tmp_path / "slot"), "--capacity-bytes", "32768"
    )
    with Consumer(command) as consumer, pytest.raises(KvtierError, match="all slots are used"):
        consumer.serve("a prompt of more than one block, " * 4)


def test_a_consumer_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    need_module("torch")
    from kvtier_demo.child import Consumer

    with Consumer(["/bin/true"]) as consumer, pytest.raises(KernelError, match="without a report"):
        consumer.serve("hello")
    with Consumer(["/bin/cat", "/dev/stdin"]) as consumer, pytest.raises(KernelError, match="without a report"):
        consumer.serve("hello")


@pytest.mark.parametrize(("text", "cause"), [("  ", "is empty"), ("\udcff", "not text in UTF-8")])
def test_a_prompt_that_is_none_is_refused(text: str, cause: str, tmp_path: Path) -> None:
    need_module("torch")
    from kvtier_demo.demo import DemoOptions, run_demo

    with pytest.raises(InvalidResource, match=cause):
        run_demo(DemoOptions(prompt=text, work_parent=tmp_path), None)
