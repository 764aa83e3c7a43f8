"""`kvtier`: the command line as a whole. One module a command; here is only what all share: errors, exit codes, version.

Nothing heavy is imported before a command runs: `kvtier --help` must not wait for torch, pydantic or aiohttp.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated

import typer

from kvtier_api.errors import KvtierError
from kvtier_cli import demo, erase, node, receipts, run, status, streams
from kvtier_cli.output import complain

__all__ = ["app", "main"]

EXIT_DEFECT = 70
"""sysexits.h, EX_SOFTWARE: a defect of kvtier's own."""
EXIT_INTERRUPTED = 130
EXIT_READER_GONE = 141
"""128 and SIGPIPE, as of a program that the signal ends."""

app = typer.Typer(
    name="kvtier",
    help="KV-cache stores of LLM inference: declared, encrypted, erased after every exit and crash, on record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"kvtier {version('kvtier')}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback for any error.", envvar="KVTIER_DEBUG")
    ] = False,
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["KVTIER_DEBUG"] = "1"


app.command("node", rich_help_panel="Serve")(node.node)
app.command("run", rich_help_panel="Serve", context_settings=run.CONTEXT)(run.run)
app.command("status", rich_help_panel="Look")(status.status)
app.command("erase", rich_help_panel="Act")(erase.erase)
app.add_typer(receipts.app, name="receipts", rich_help_panel="Look")
app.command("demo", rich_help_panel="Look")(demo.demo)


def report(error: KvtierError) -> None:
    """Cause, object and remedy on stderr."""
    lines = [f"error: {error.cause}"]
    if error.obj:
        lines.append(f"  object: {error.obj}")
    if error.remedy:
        lines.append(f"  remedy: {error.remedy}")
    complain("\n".join(line if line.isprintable() else ascii(line) for line in lines) + "\n")


def main() -> None:
    """The entry point: every way out is an exit code of README, "Exit codes"."""
    streams.open_missing()
    streams.watch_stdout()
    try:
        _main()
    finally:
        streams.let_go()


def _run() -> int:
    """The command's exit code, once all that it printed is written."""
    try:
        # Completion goes by the name of the command, which "python -m" hides.
        code = app(standalone_mode=False, prog_name="kvtier" if sys.argv[0].endswith(".py") else None)
    except SystemExit as end:  # of typer's own, after completion
        code = end.code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _main() -> None:
    try:
        code = _run()
    except streams.ReaderGone:  # nothing to say, and nobody to say it to
        sys.exit(EXIT_READER_GONE)
    except KvtierError as error:
        if _debugging():
            raise
        report(error)
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)
    except typer.TyperException as error:
        _show_usage_error(error)
    except Exception as error:
        if _debugging():
            raise
        complain(f"error: a defect of kvtier: {type(error).__name__}: {error}\n  remedy: kvtier --debug shows where\n")
        sys.exit(EXIT_DEFECT)
    sys.exit(code)


def _debugging() -> bool:
    return os.environ.get("KVTIER_DEBUG", "") not in ("", "0")


def _show_usage_error(error: Exception) -> None:
    if isinstance(message := getattr(error, "message", None), str):
        error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]  # pydantic's, below typer
    show = getattr(error, "show", None)
    if show is not None:
        with suppress(OSError, SystemExit):  # a stderr that takes nothing must not change the exit code
            show()
    else:
        complain(f"error: {error}\n")
    sys.exit(getattr(error, "exit_code", 2))


if __name__ == "__main__":
    main()
