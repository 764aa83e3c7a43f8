"""`kvtier erase`: end every volume of a tier now, or give one up. Asks for the name to be typed, as it cannot be undone."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kvtier_cli.completion import tier_names
from kvtier_cli.options import (
    DEFAULT_MANIFESTS,
    DEFAULT_STATE_DIR,
    Manifests,
    Namespace,
    Output,
    OutputFormat,
    Roots,
    StateDir,
    absolute,
    root_paths,
)
from kvtier_cli.output import count, note, show, table

if TYPE_CHECKING:
    from kvtier_node.ledger import EraseRequest, VolumeRow
    from kvtier_node.node import Node
    from kvtier_node.receipts import Receipt

__all__ = ["erase"]

_POLL_S: Final = 0.2
_SCOPES: Final = {
    "--tenant": "the engine holds tenants' keys: call SlotStore.erase(tenant) in the process that serves the tier",
    "--older-than": "the engine drops key epochs by itself at retention.maxAge: lower that in the manifest",
}


def erase(
    tier: Annotated[str, typer.Argument(help="The tier, by NAME or NAMESPACE/NAME.", autocompletion=tier_names)],
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes on record.")],
    namespace: Namespace = "default",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for the name to be typed.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until everything is erased.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", help="The longest wait.")] = 120.0,
    abandon: Annotated[
        str | None, typer.Option("--abandon", metavar="VOLUME", help="Give this one volume up, with nothing claimed.")
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Refused here: see the message.")] = None,
    older_than: Annotated[str | None, typer.Option("--older-than", help="Refused here: see the message.")] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    root: Roots = None,
    manifests: Manifests = DEFAULT_MANIFESTS,
    output: Output = OutputFormat.TABLE,
) -> int:
    """Erase every volume of a tier, those in use included: their processes are ended first.

    Guarded volumes are erased by their guardian ('kvtier node' or 'kvtier run'), the others by this command.

    [bold]Examples[/bold]

    $ kvtier erase chat --reason 'customer left' --wait

    $ kvtier erase team-a/chat --reason TICKET-7 --yes --wait -o json

    $ kvtier erase chat --abandon kvv-0123456789abcdef0123 --reason 'disk was destroyed, certificate 4711'
    """
    from kvtier_api.errors import EraseIncomplete, UsageError
    from kvtier_cli.state import existing_ledger
    from kvtier_node.recovery import open_node

    for option, value in (("--tenant", tenant), ("--older-than", older_than)):
        if value is not None:
            raise UsageError("this command erases whole volumes", obj=f"{option} {value}", remedy=_SCOPES[option])
    if not reason.strip():
        raise UsageError("is empty", obj="--reason", remedy="say who asked, and why")
    key = tier if "/" in tier else f"{namespace}/{tier}"
    where = absolute(state_dir)
    with existing_ledger(where):
        pass  # nothing is made or rebuilt where kvtier never ran
    node = open_node(where, root_paths(root))
    try:
        if abandon is not None:
            return _abandon(node, key, abandon, reason, yes=yes, output=output, timeout_s=timeout)
        rows = _volumes_of(node, key, absolute(manifests))
        if not rows:
            return _nothing(node, key, absolute(manifests), output)
        _confirm(
            tier,
            f"{count(len(rows), 'volume')} of {key} and everything in {'it' if len(rows) == 1 else 'them'}",
            yes=yes,
        )
        request = node.ledger.add_request(key, "All", reason)
        errors = _erase_unguarded(node, request)
        complete = _wait(node, request, timeout if wait else 0.0)
        result = _result(node, request, rows, complete=complete)
        show(result, output, lambda: _for_people(result))
        for error in errors:
            note(error)
        if errors or (wait and not complete):
            return EraseIncomplete.exit_code
        _refuse_others(node, key, absolute(manifests))
        return 0
    finally:
        node.ledger.close()


def _volumes_of(node: Node, key: str, manifests: str) -> list[VolumeRow]:
    """Volumes of the tier that have not ended. Raises NotFound for a tier that nobody ever declared or used."""
    from kvtier_api.errors import NotFound
    from kvtier_cli.state import known_tiers

    if key not in known_tiers(node.ledger, node.state_dir, manifests):
        raise NotFound("no such tier on this host", obj=f"tier {key}", remedy="see 'kvtier status'")
    rows = [row for row in node.ledger.volumes() if row.tier_key == key]
    return [row for row in rows if not row.is_terminal]


def _refuse_others(node: Node, key: str, manifests: str) -> None:
    """Raise ForeignData for volumes in the tier's directory that this state directory knows nothing of: they are not erased.

    Raises UnsafePath, NotPermitted where it cannot be looked at: then nobody can say that nothing is left.
    """
    from kvtier_api.errors import ForeignData
    from kvtier_cli.state import declared_tiers

    tier = declared_tiers(node.state_dir, manifests).get(key)
    found = node.places.volumes_of_another(tier.spec.path) if tier is not None else []
    if tier is not None and found:
        raise ForeignData(
            f"{count(len(found), 'volume')} not erased: made with another state directory or node key: {', '.join(found)}",
            obj=tier.spec.path,
            remedy="give its --state-dir",
        )


def _nothing(node: Node, key: str, manifests: str, output: OutputFormat) -> int:
    """Nobody is asked, and nothing is put on record, where there is nothing to erase."""
    _refuse_others(node, key, manifests)
    result: dict[str, Any] = {"request": None, "tier": key, "state": "Complete", "receipts": [], "left": []}
    show(result, output, lambda: _for_people(result))
    return 0


def _confirm(word: str, what: str, *, yes: bool) -> None:
    from kvtier_api.errors import UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to confirm it", obj=word, remedy="give --yes")
    sys.stderr.write(f"This ends {what}. It cannot be undone.\nType {word} to go on: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != word:
        raise UsageError("the name does not match; nothing was done", obj=word, remedy="type it as it is written")


def _erase_unguarded(node: Node, request: EraseRequest) -> list[str]:
    """Erase what is in scope and has no guardian; what could not be erased, in words."""
    from kvtier_api.errors import KvtierError
    from kvtier_node.guarding import fulfil_requests, in_scope
    from kvtier_node.recovery import guard

    errors = []
    for row in node.ledger.volumes():
        if not in_scope(request, row):
            continue
        live = None
        try:
            live = guard(node, row)
            if live is not None:
                fulfil_requests(node, [live])
                if live.said:
                    errors.append(f"{row.volume_id} is not erased yet: {live.said}")
        except KvtierError as error:
            errors.append(f"{row.volume_id} is not erased yet: {error}")
        finally:
            if live is not None:
                live.close_watch()
                live.guardian.close()
    return errors


def _wait(node: Node, request: EraseRequest, limit_s: float) -> bool:
    from kvtier_node.guarding import close_if_fulfilled

    until = time.monotonic() + limit_s
    while not close_if_fulfilled(node, request):
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_S)
    return True


def _result(node: Node, request: EraseRequest, rows: list[VolumeRow], *, complete: bool) -> dict[str, Any]:
    wanted = {row.volume_id for row in rows}
    receipts = [receipt for receipt in node.ledger.receipts() if receipt.volume_id in wanted]
    left = sorted(wanted - {receipt.volume_id for receipt in receipts})
    return {
        "request": request.id,
        "tier": request.tier,
        "state": "Complete" if complete else "Open",
        "receipts": [_line(receipt) for receipt in receipts],
        "left": left,
    }


def _line(receipt: Receipt) -> dict[str, Any]:
    return {
        "receipt": receipt.id,
        "volume": receipt.volume_id,
        "trigger": receipt.trigger.value,
        "technique": receipt.technique.value,
        "end": receipt.end,
    }


def _for_people(result: dict[str, Any]) -> None:
    if result["receipts"]:
        rows = [tuple(item.values()) for item in result["receipts"]]
        table(f"Erased of {result['tier']}", ("RECEIPT", "VOLUME", "TRIGGER", "TECHNIQUE", "END"), rows)
    elif not result["left"]:
        typer.echo(f"nothing to erase: {result['tier']} has no volume")
    for volume in result["left"]:
        typer.echo(f"requested, not erased yet: {volume}")


def _abandon(
    node: Node, key: str, volume_id: str, reason: str, *, yes: bool, output: OutputFormat, timeout_s: float
) -> int:
    from kvtier_api.errors import Busy, InvalidResource
    from kvtier_node.erasing import abandon
    from kvtier_node.node_lock import running_node
    from kvtier_node.recovery import guard, usage

    row = node.ledger.get(volume_id)
    if row.tier_key != key:
        raise InvalidResource(f"the volume is of tier {row.tier_key}", obj=volume_id, remedy="name that tier")
    if row.is_terminal:
        raise InvalidResource(
            f"the volume has ended already ({row.state.value})", obj=volume_id, remedy="nothing is left"
        )
    _confirm(
        volume_id, f"the record of {volume_id}, without an erasure: what is at {row.place} may stay readable", yes=yes
    )
    live = guard(node, row)
    if live is not None:
        try:
            used = usage(node, live)
            if used.alive:
                raise Busy(
                    f"the volume is in use: {used.reason}", obj=volume_id, remedy="erase it, or end what uses it first"
                )
            abandon(node, live, reason)
        finally:
            live.close_watch()
            live.guardian.close()
    elif running_node(node.state_dir) is None or not _by_node(node, key, volume_id, reason=reason, timeout_s=timeout_s):
        raise Busy(
            "another process guards the volume",
            obj=volume_id,
            remedy="end the 'kvtier run' that it belongs to, or look at the log of 'kvtier node'",
        )
    receipt = next(item for item in node.ledger.receipts() if item.volume_id == volume_id)
    result = {"tier": key, "volume": volume_id, "state": "Abandoned", "receipt": receipt.id, "reason": reason}
    show(result, output, lambda: typer.echo(f"abandoned {volume_id}: nothing is claimed; receipt {receipt.id}"))
    return 0


def _by_node(node: Node, key: str, volume_id: str, *, reason: str, timeout_s: float) -> bool:
    """Ask the running `kvtier node`, which guards what nobody else does; whether it did it in time."""
    from kvtier_api.errors import Busy
    from kvtier_node.ledger import ABANDON

    request = node.ledger.add_request(key, ABANDON, reason, argument=volume_id)
    until = time.monotonic() + min(timeout_s, 30.0)
    while time.monotonic() < until:
        if node.ledger.get(volume_id).is_terminal:
            return True
        closed = next(item for item in node.ledger.requests() if item.id == request.id)
        if closed.state == "Failed":
            raise Busy(str(closed.result), obj=volume_id, remedy="erase it, or end what uses it first")
        time.sleep(_POLL_S)
    if not node.ledger.get(volume_id).is_terminal:
        node.ledger.close_request(request.id, "not done in time; withdrawn", done=False)
        return False
    return True
