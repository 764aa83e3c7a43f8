"""`kvtier run`: the fence around one command. A volume before it, erasure after it, the command's own exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier_cli.completion import tier_names
from kvtier_cli.options import (
    DEFAULT_MANIFESTS,
    DEFAULT_STATE_DIR,
    Manifests,
    Namespace,
    Roots,
    StateDir,
    absolute,
    root_paths,
)
from kvtier_cli.output import note

if TYPE_CHECKING:
    from kvtier_api.tier import KVCacheTier
    from kvtier_node.node import Node
    from kvtier_node.receipts import Receipt
    from kvtier_node.run import RunResult

__all__ = ["CONTEXT", "run"]

CONTEXT: Final[dict[str, Any]] = {"allow_interspersed_args": False}
"""Options after the first word of the command are the command's."""


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.", metavar="-- CMD…")],
    tier: Annotated[
        str | None, typer.Option("--tier", "-t", help="The tier's name, or NAMESPACE/NAME.", autocompletion=tier_names)
    ] = None,
    namespace: Namespace = "default",
    tier_file: Annotated[
        Path | None,
        typer.Option("--tier-file", readable=False, help="A manifest to take the tier from, in place of --manifests."),
    ] = None,
    rank_env: Annotated[
        str | None,
        typer.Option("--rank-env", metavar="VAR", help="Variable that holds the rank; sets KVTIER_SLOT_FILE."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", metavar="UID[:GID]", help="Run the command as this user (numbers or names).")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    root: Roots = None,
    manifests: Manifests = DEFAULT_MANIFESTS,
) -> int:
    """Run a command with a fresh, encrypted volume of a tier, and erase the volume after it.

    Whatever an earlier crash left is erased first. The command gets KVTIER_SLOT_PREFIX, KVTIER_SLOT_DIR, KVTIER_MARKER and
    KVTIER_NONCE in its environment, and its exit code is returned.

    [bold]Examples[/bold]

    $ kvtier run --tier chat -- vllm serve my/model

    $ kvtier run --tier team-a/chat --user vllm --rank-env LOCAL_RANK -- python serve.py

    $ kvtier run --tier-file tier.yaml --state-dir ./state --root $PWD/kv -- sh -c 'ls -l $KVTIER_SLOT_DIR'
    """
    from kvtier_cli.users import parse_user
    from kvtier_node.recovery import open_node
    from kvtier_node.run import run_fenced

    wanted = _tier(tier, namespace, tier_file, manifests)
    uid, gid = parse_user(user)
    node = open_node(absolute(state_dir), root_paths(root))
    try:
        _recover_first(node)
        result = run_fenced(node, wanted, command, rank_env=rank_env, uid=uid, gid=gid, say=note)
        return _conclude(result)
    finally:
        node.ledger.close()


def _tier(tier: str | None, namespace: str, tier_file: Path | None, manifests: Path) -> KVCacheTier:
    from kvtier_api.errors import UsageError
    from kvtier_node.manifests import find_tier, load_tier_file

    if tier is not None and "/" in tier:
        namespace, _, tier = tier.partition("/")
    if tier_file is not None:
        return load_tier_file(str(tier_file), namespace, tier)
    if tier is None:
        raise UsageError("no tier is named", obj="kvtier run", remedy="give --tier NAME or --tier-file FILE")
    return find_tier(absolute(manifests), namespace, tier)


def _recover_first(node: Node) -> None:
    """The fence: what nobody guards is erased, or left to those who still use it, before anything new is made."""
    from kvtier_node.recovery import recover
    from kvtier_node.run import said_if_slow

    left = any(not row.is_terminal for row in node.ledger.volumes())
    doing = "erasing what an earlier crash left" if left else "looking for what an earlier crash left"
    with said_if_slow(note, f"{doing}; the command starts after that"):
        found = recover(node)
    for receipt in found.erased:
        note(
            f"erased {receipt.volume_id}, left by an earlier {receipt.trigger.value}; receipt {receipt.id}{_found(receipt)}"
        )
    for live, error in found.failed:
        note(f"{live.volume_id} cannot be erased yet, 'kvtier node' tries again: {error}")
    for row, error in found.unguarded:
        note(f"{row.volume_id} cannot be taken in hand, 'kvtier node' tries again: {error}")
    for live in (*found.adopted, *(live for live, _ in found.failed)):
        live.close_watch()
        live.guardian.close()


def _found(receipt: Receipt) -> str:
    from kvtier_node.receipts import plaintext_of

    detail = plaintext_of(receipt.steps)
    return f"; plaintext was found in it, and overwritten: {detail}" if detail else ""


def _conclude(result: RunResult) -> int:
    from kvtier_api.errors import EraseIncomplete

    receipt = result.receipt
    if receipt is not None:
        late = {True: "", False: f", after the deadline of {receipt.deadline_s} s", None: ""}[receipt.deadline_met]
        note(
            f"erased {result.volume_id} in {receipt.duration_s} s{late}"
            f" ({receipt.trigger.value}, {receipt.technique.value}); receipt {receipt.id}{_found(receipt)}"
        )
        return result.exit_code
    note(f"{result.volume_id} is not erased yet, 'kvtier node' or the next start tries again: {result.error}")
    return result.exit_code or EraseIncomplete.exit_code
