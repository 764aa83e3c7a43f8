"""`kvtier demo`: the demonstration. What it does and shows is kvtier_demo's; here is its command line."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier_cli.options import Output, OutputFormat

__all__ = ["demo"]


def demo(
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Your own words, in place of the demonstration's.")
    ] = None,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Recover a prompt from a stock slot file after SIGKILL, then try the same on kvtier's volume.

    [bold]Examples[/bold]

    $ kvtier demo

    $ kvtier demo --prompt 'my secret is 1234' -o json
    """
    from kvtier_api.errors import BackendUnavailable, UsageError

    if output is OutputFormat.YAML:
        raise UsageError("the demonstration has no YAML", obj="-o yaml", remedy="write -o table or -o json")
    try:
        from kvtier_demo import command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("torch", "numpy"):
            raise
        raise BackendUnavailable(
            f"the Python package {error.name} is missing", obj="kvtier demo", remedy="pip install 'kvtier[engine]'"
        ) from error
    command.demo(prompt=prompt, as_json=output is OutputFormat.JSON)
