"""The process that gets killed: runs the model on a prompt, offloads its KV blocks, proves the reload, then waits.

::

    python -m kvtier_demo.consumer --mode stock --disk-path DIR/slot --capacity-bytes N
    kvtier run --tier NAME -- python -m kvtier_demo.consumer --mode kvtier

The prompt comes as one line of JSON, `{"prompt": "..."}`, on the descriptor `--prompt-fd` (default 0, standard input):
never in argv or the environment, which others can read. The consumer answers with one line of JSON on standard output
(`Report`), which never holds the prompt, and then waits for its end: SIGKILL, or end of file on that descriptor, so
that it does not outlive the process that started it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import IO, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvtier_api.errors import KvtierError, UsageError
from kvtier_demo.generate import BlockStore, offload, reload, serve
from kvtier_demo.model import DemoModel, ModelConfig
from kvtier_demo.stock import StockDisk
from kvtier_demo.stores import kvtier_store

__all__ = ["Failure", "Report", "main"]


class Report(BaseModel):
    """What the consumer did before it began to wait. `reload_hits` of `reload_asked` blocks came from the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    event: Literal["ready"] = "ready"
    pid: int
    prompt_tokens: int
    total_tokens: int
    offloaded_blocks: int
    reload_hits: int
    reload_asked: int
    logits_identical: bool
    o_direct: bool


class Failure(BaseModel):
    """Why the consumer ended early: cause, object and remedy of the error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    event: Literal["failed"] = "failed"
    cause: str
    obj: str = ""
    remedy: str = ""
    exit_code: int


class _PromptLine(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)
    prompt: str


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kvtier_demo.consumer", description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("stock", "kvtier"), required=True)
    parser.add_argument("--prompt-fd", type=int, default=0, help="descriptor with the line of JSON (default 0)")
    parser.add_argument("--disk-path", help="prefix of the slot file, for --mode stock")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--capacity-bytes", type=int, default=1 << 30, help="apparent size, for --mode stock")
    parser.add_argument("--model", default="{}", help="ModelConfig as JSON")
    return parser.parse_args(argv)


def _read_prompt(source: IO[bytes]) -> str:
    try:
        return _PromptLine.model_validate_json(source.readline()).prompt
    except ValidationError:
        raise UsageError("no line of JSON with a prompt", obj="--prompt-fd", remedy='send {"prompt": "..."}') from None


def _open_store(arguments: argparse.Namespace, block_bytes: int) -> tuple[BlockStore, bool]:
    if arguments.mode == "kvtier":
        store = kvtier_store(block_bytes)
        return store, store.direct
    if not arguments.disk_path:
        raise UsageError("is needed for --mode stock", obj="--disk-path")
    stock = StockDisk(
        arguments.disk_path, rank=arguments.rank, capacity_bytes=arguments.capacity_bytes, block_bytes=block_bytes
    )
    return stock, stock.direct


def _work(arguments: argparse.Namespace, source: IO[bytes]) -> Report:
    try:
        config = ModelConfig.model_validate_json(arguments.model)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(first["msg"], obj=f"--model {'.'.join(map(str, first['loc']))}") from error
    model = DemoModel(config)
    # The store opens first: an engine allocates its slots before it serves.
    store, direct = _open_store(arguments, config.block_shape.block_bytes)
    served = serve(model, _read_prompt(source))
    offloaded = offload(served, store)
    again = reload(model, served.tokens, store, served.last_logits)
    return Report(
        pid=os.getpid(),
        prompt_tokens=served.prompt_tokens,
        total_tokens=len(served.tokens),
        offloaded_blocks=offloaded,
        reload_hits=again.hits,
        reload_asked=again.asked,
        logits_identical=again.logits_identical,
        o_direct=direct,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns 0 at end of file, the error's exit code where the work failed."""
    arguments = _arguments(argv)
    with os.fdopen(arguments.prompt_fd, "rb") as source:
        try:
            report: Report | Failure = _work(arguments, source)
        except KvtierError as error:
            report = Failure(cause=error.cause, obj=error.obj, remedy=error.remedy, exit_code=error.exit_code)
        except OSError as error:
            report = Failure(cause=str(error.strerror), obj=str(error.filename or ""), exit_code=10)
        print(json.dumps(report.model_dump()), flush=True)
        if isinstance(report, Failure):
            return report.exit_code
        while source.read(4096):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
