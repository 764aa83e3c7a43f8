"""`kvtier receipts`: what was erased, when, how, proven by what; and whether the chain of receipts holds."""

from __future__ import annotations

import os
import string
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvtier_cli.completion import receipt_ids, tier_names
from kvtier_cli.options import (
    DEFAULT_MANIFESTS,
    DEFAULT_STATE_DIR,
    Manifests,
    Namespace,
    Output,
    OutputFormat,
    StateDir,
    absolute,
)
from kvtier_cli.output import count, note, show, table

if TYPE_CHECKING:
    from kvtier_node.receipts import Receipt, Verification

__all__ = ["app"]

_KEY_LIMIT_BYTES: Final = 1024

app = typer.Typer(no_args_is_help=True, help="Receipts of erasures: list, show, verify, export.")


@app.command("list")
def list_(
    tier: Annotated[
        str | None, typer.Option("--tier", help="Of this tier only: NAME or NAMESPACE/NAME.", autocompletion=tier_names)
    ] = None,
    namespace: Namespace = "default",
    limit: Annotated[int, typer.Option("--limit", help="The newest so many; 0 for all.", min=0)] = 50,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    manifests: Manifests = DEFAULT_MANIFESTS,
    output: Output = OutputFormat.TABLE,
) -> None:
    """List receipts, oldest first.

    [bold]Examples[/bold]

    $ kvtier receipts list --tier chat

    $ kvtier receipts list --limit 0 -o json
    """
    from kvtier_api.errors import NotFound
    from kvtier_cli.state import existing_ledger, known_tiers

    where = absolute(state_dir)
    with existing_ledger(where) as ledger:
        found = ledger.receipts()
        known = set() if tier is None else known_tiers(ledger, where, absolute(manifests))
    if tier is not None:
        key = tier if "/" in tier else f"{namespace}/{tier}"
        if key not in known:
            names = ", ".join(sorted(known)) or "(there is none)"
            raise NotFound("no such tier on this host", obj=f"tier {key}", remedy=f"one of: {names}")
        found = [item for item in found if item.tier and f"{item.tier.namespace}/{item.tier.name}" == key]
    if limit:
        found = found[-limit:]
    plain = [receipt.model_dump(mode="json") for receipt in found]
    show(plain, output, lambda: _list_for_people(found))


def _list_for_people(receipts: list[Receipt]) -> None:
    rows = [
        (
            item.seq,
            item.id,
            f"{item.tier.namespace}/{item.tier.name}" if item.tier else None,
            item.volume_id,
            item.trigger.value,
            item.technique.value,
            item.end,
            item.duration_s,
            {True: "met", False: "MISSED", None: None}[item.deadline_met],
        )
        for item in receipts
    ]
    columns = ("#", "RECEIPT", "TIER", "VOLUME", "TRIGGER", "TECHNIQUE", "END", "SECONDS", "DEADLINE")
    table("Receipts", columns, rows)


@app.command("show")
def show_(
    receipt: Annotated[
        str,
        typer.Argument(
            help="A receipt's id (kvr-…), its number, or a volume's id (kvv-…).", autocompletion=receipt_ids
        ),
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show one receipt with its steps and what it does not cover.

    [bold]Examples[/bold]

    $ kvtier receipts show kvr-0123456789abcdef0123

    $ kvtier receipts show 17 -o yaml
    """
    from kvtier_api.errors import NotFound
    from kvtier_cli.state import existing_ledger

    with existing_ledger(absolute(state_dir)) as ledger:
        found = [item for item in ledger.receipts() if receipt in (item.id, item.volume_id, str(item.seq))]
    if not found:
        raise NotFound("no such receipt", obj=receipt, remedy="see 'kvtier receipts list'")
    show(found[0].model_dump(mode="json"), output, lambda: _one_for_people(found[0]))


def _one_for_people(receipt: Receipt) -> None:
    plain = receipt.model_dump(mode="json")
    steps, gaps, versions = plain.pop("steps"), plain.pop("not_covered"), plain.pop("versions")
    tier = plain.pop("tier")
    plain["tier"] = f"{tier['namespace']}/{tier['name']}" if tier else None
    plain["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    table(f"Receipt {receipt.id}", ("FIELD", "VALUE"), list(plain.items()))
    words = {True: "ok", False: "failed", None: "not measured"}
    table("Steps", ("STEP", "RESULT", "DETAIL"), [(step["name"], words[step["ok"]], step["detail"]) for step in steps])
    table("Not covered", ("WHAT",), [(gap,) for gap in gaps])


@app.command()
def verify(
    file: Annotated[
        Path | None,
        typer.Argument(readable=False, help="An exported chain; needs no state directory. Without it: the ledger's."),
    ] = None,
    public_key: Annotated[
        str | None, typer.Option("--public-key", metavar="HEX|FILE", help="The node's key, kept from before.")
    ] = None,
    expect_head: Annotated[
        str | None, typer.Option("--expect-head", metavar="HASH", help="The head that the chain must end in.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    output: Output = OutputFormat.TABLE,
) -> int:
    """Verify the chain: nothing removed, changed or reordered, every signature by one node. Exit code 13 if it does not hold.

    [bold]Examples[/bold]

    $ kvtier receipts verify

    $ kvtier receipts export chain.jsonl --public-key node.pub

    $ kvtier receipts verify chain.jsonl --public-key node.pub
    """
    from dataclasses import asdict

    from kvtier_api.errors import VerificationFailed

    key = None if public_key is None else _public_key(public_key)
    if expect_head is not None:
        _check_hash(expect_head)
    found = _verify_file(file, key, expect_head) if file is not None else _verify_ledger(state_dir, key, expect_head)
    show(asdict(found), output, lambda: _verdict_for_people(found))
    return 0 if found.ok else VerificationFailed.exit_code


def _verify_file(file: Path, key: bytes | None, expect_head: str | None) -> Verification:
    from kvtier_api.errors import NotFound
    from kvtier_node.receipts import verify_export

    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise NotFound(
            f"cannot be read: {error.strerror}", obj=str(file), remedy="name an exported chain, or - for stdin"
        ) from error
    return verify_export(content, public_key=key, expect_head=expect_head)


def _verify_ledger(state_dir: Path, key: bytes | None, expect_head: str | None) -> Verification:
    from kvtier_cli.state import existing_ledger
    from kvtier_node.identity import NodeIdentity
    from kvtier_node.receipts import verify_chain

    where = absolute(state_dir)
    with existing_ledger(where) as ledger:
        lines = ledger.receipt_lines()
    key = key or NodeIdentity.load(where).public_key
    return verify_chain(lines, public_key=key, expect_head=expect_head, require_head=False)


def _public_key(text: str) -> bytes:
    """64 hex digits, or a file that holds them. Raises UsageError, NotFound for a file that does not exist."""
    from kvtier_api.errors import NotFound, UsageError

    where, shown = text, f"--public-key {text[:200]}"
    remedy = "give 64 hex digits, or a file that holds them ('kvtier receipts export --public-key FILE' writes it)"
    key = _key_in(text)
    if key is not None:
        return key
    try:
        with open(where, "rb") as file:
            content = file.read(_KEY_LIMIT_BYTES)
    except FileNotFoundError as error:
        raise NotFound("no public key, and no file of this name", obj=shown, remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot be read: {error.strerror if isinstance(error, OSError) else error}", obj=shown, remedy=remedy
        ) from error
    key = _key_in(content.decode("ascii", errors="replace").strip())
    if key is None:
        raise UsageError("no public key in the file", obj=shown, remedy=remedy)
    return key


def _key_in(text: str) -> bytes | None:
    return bytes.fromhex(text) if len(text) == 64 and set(text) <= set(string.hexdigits) else None


def _check_hash(text: str) -> None:
    from kvtier_api.errors import UsageError

    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise UsageError("no hash", obj=f"--expect-head {text[:80]}", remedy="give 64 lower-case hex digits")


def _verdict_for_people(found: Verification) -> None:
    typer.echo(
        f"{'verified' if found.ok else 'NOT VERIFIED'}: {count(found.count, 'receipt')} of node {found.node_id or '-'}"
    )
    typer.echo(f"head {found.head}")
    if not found.key_pinned:
        typer.echo("the key is the chain's own: pin it with --public-key to know that it is this node's")
    for problem in found.problems:
        typer.echo(f"  {problem}")


@app.command()
def export(
    file: Annotated[
        Path, typer.Argument(readable=False, help="Where to write; - is stdout. An existing file is refused.")
    ] = Path("-"),
    public_key: Annotated[
        Path | None,
        typer.Option("--public-key", metavar="FILE", help="Where to write the node's public key, to verify with."),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Export the whole chain as JSON lines, with a signed head; it can be verified anywhere.

    Keep the public key where the chain's keeper cannot change it: only a key from before shows a chain that was made anew.

    [bold]Examples[/bold]

    $ kvtier receipts export chain.jsonl

    $ kvtier receipts export chain.jsonl --public-key node.pub

    $ kvtier receipts export | kvtier receipts verify -
    """
    from kvtier_cli.state import existing_ledger
    from kvtier_node.identity import NodeIdentity
    from kvtier_node.receipts import export_chain

    where = absolute(state_dir)
    with existing_ledger(where) as ledger:
        identity = NodeIdentity.load(where)
        content = b"".join(export_chain(ledger, identity))
    key = identity.public_key.hex()
    if public_key is not None and not _holds_key(public_key, identity.public_key):
        _write_new(public_key, f"{key}\n".encode())
    if str(file) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    _write_new(file, content)
    note(f"exported to {file}; the node's public key is {key}")


def _holds_key(file: Path, key: bytes) -> bool:
    """Whether the file has this very key already: from an export before."""
    try:
        with open(file, "rb") as found:
            return _key_in(found.read(_KEY_LIMIT_BYTES).decode("ascii", errors="replace").strip()) == key
    except OSError:
        return False  # what is in the way is named when it is written


def _write_new(file: Path, content: bytes) -> None:
    """A whole new file, or none. Raises NotPermitted for one that is there, NotFound, KernelError."""
    from kvtier_api.errors import KernelError, NotFound, NotPermitted

    try:
        out = open(file, "xb")  # noqa: SIM115  closed below, and removed where it is not whole
    except FileExistsError as error:
        raise NotPermitted("is there already", obj=str(file), remedy="name a new file") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound("its directory does not exist", obj=str(file), remedy="make it, or name another") from error
    except OSError as error:
        kind = NotPermitted if isinstance(error, PermissionError) else KernelError
        raise kind(
            f"cannot be made: {error.strerror}", obj=str(file), remedy="name a file that you can write"
        ) from error
    try:
        with out:
            out.write(content)
    except OSError as error:
        os.unlink(file)
        raise KernelError(
            f"cannot be written: {error.strerror}; it was removed again", obj=str(file), remedy="free space there"
        ) from error
