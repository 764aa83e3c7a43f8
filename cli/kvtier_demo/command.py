"""What `kvtier demo` runs: both parts on this host, with progress, ending with a table or with JSON."""

from __future__ import annotations

from rich.console import Console

from kvtier_demo.demo import DEFAULT_PROMPT, DemoOptions, run_demo
from kvtier_demo.fence import HostProtection
from kvtier_demo.report import print_report, to_json

__all__ = ["demo"]


def demo(*, prompt: str | None, as_json: bool) -> None:
    """Run the demonstration; progress goes to stderr, the figures to stdout."""
    progress = Console(stderr=True)
    with progress.status("starting") as status:

        def tell(text: str) -> None:
            status.update(text)
            progress.print(f"• {text}", style="dim", markup=False)

        figures = run_demo(DemoOptions(prompt=prompt or DEFAULT_PROMPT), HostProtection(), tell=tell)
    if as_json:
        print(to_json(figures))
    else:
        print_report(figures, Console())
