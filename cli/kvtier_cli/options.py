"""Options that commands share, with the defaults of a Linux service and a variable of the environment for each."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

__all__ = ["Manifests", "Namespace", "Output", "OutputFormat", "Roots", "StateDir", "absolute", "root_paths"]

DEFAULT_STATE_DIR: Final = Path("/var/lib/kvtier/state")
DEFAULT_ROOT: Final = Path("/var/lib/kvtier/tiers")
DEFAULT_MANIFESTS: Final = Path("/etc/kvtier/tiers.d")
_PANEL: Final = "Where"


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


StateDir: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--state-dir",
        envvar="KVTIER_STATE_DIR",
        help="Ledger, receipts, the node's key.",
        readable=False,  # the command's own error says more
        rich_help_panel=_PANEL,
    ),
]
Roots: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        "--root",
        envvar="KVTIER_ROOT",
        help=f"A directory under which tiers may lie; can be given again. \\[default: {DEFAULT_ROOT}]",
        rich_help_panel=_PANEL,
        show_default=False,
        readable=False,
    ),
]
Manifests: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--manifests",
        envvar="KVTIER_MANIFESTS",
        help="The directory of KVCacheTier manifests (*.yaml).",
        readable=False,
        rich_help_panel=_PANEL,
    ),
]
Output: TypeAlias = Annotated[
    OutputFormat, typer.Option("-o", "--output", help="table, json or yaml.", metavar="FORMAT")
]
Namespace: TypeAlias = Annotated[
    str, typer.Option("-n", "--namespace", help="The tier's namespace.", envvar="KVTIER_NAMESPACE")
]


def absolute(path: Path) -> str:
    """As the agent needs it: absolute and clean, no link resolved (a link on the way is refused later, and named)."""
    return os.path.abspath(path)


def root_paths(roots: list[Path] | None) -> list[str]:
    return [absolute(root) for root in roots or [DEFAULT_ROOT]]
