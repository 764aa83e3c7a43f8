"""`kvtier status`: tiers, volumes, requests and events of this host, from the ledger, the status files and the manifests."""

from __future__ import annotations

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
    StateDir,
    absolute,
)
from kvtier_cli.output import count, note, show, size, table

if TYPE_CHECKING:
    from kvtier_api.tier import KVCacheTier
    from kvtier_node.ledger import Ledger, VolumeRow

__all__ = ["status"]

_EVENTS: Final = 10


def status(
    tier: Annotated[
        str | None,
        typer.Argument(help="One tier, by NAME or NAMESPACE/NAME, with its conditions.", autocompletion=tier_names),
    ] = None,
    namespace: Namespace = "default",
    all_volumes: Annotated[bool, typer.Option("--all", help="Volumes that have ended, too.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    manifests: Manifests = DEFAULT_MANIFESTS,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Show the tiers of this host, their volumes, and what needs attention.

    [bold]Examples[/bold]

    $ kvtier status

    $ kvtier status chat

    $ kvtier status -o json | jq '.volumes[].state'
    """
    from kvtier_api.errors import NotFound

    found = _gather(absolute(state_dir), absolute(manifests), all_volumes=all_volumes)
    key = None if tier is None else tier if "/" in tier else f"{namespace}/{tier}"
    if key is not None:
        known = sorted(_known(absolute(state_dir), absolute(manifests)))
        if key not in known:
            raise NotFound(
                "no such tier on this host",
                obj=f"tier {key}",
                remedy=f"one of: {', '.join(known) or '(there is none)'}",
            )
        found["tiers"] = [item for item in found["tiers"] if _key(item) == key]
        found["volumes"] = [item for item in found["volumes"] if item["tier"] == key]
        found["requests"] = [item for item in found["requests"] if item["tier"] == key]
    show(found, output, lambda: _for_people(found, one=key is not None))


def _key(tier: dict[str, Any]) -> str:
    return f"{tier['metadata'].get('namespace', 'default')}/{tier['metadata']['name']}"


def _known(state_dir: str, manifests: str) -> set[str]:
    """Tiers that can be asked for: one whose volumes have all ended, too."""
    from kvtier_cli.state import existing_ledger, known_tiers, was_used
    from kvtier_node.manifests import ManifestDirectory

    if not was_used(state_dir):
        return set(ManifestDirectory(manifests).scan().tiers)
    with existing_ledger(state_dir) as ledger:
        return known_tiers(ledger, state_dir, manifests)


def _gather(state_dir: str, manifests: str, *, all_volumes: bool) -> dict[str, Any]:
    from kvtier_cli.state import existing_ledger, was_used
    from kvtier_cli.tier_view import tiers_as_seen
    from kvtier_node.manifests import ManifestDirectory
    from kvtier_node.node_lock import running_node

    declared = ManifestDirectory(manifests).scan()
    found: dict[str, Any] = {
        "node": {"stateDir": state_dir, "running": None, "nodeId": None, "receipts": 0, "ledgerRebuilt": None},
        "tiers": [],
        "volumes": [],
        "requests": [],
        "events": [],
        "badManifests": [{"path": bad.path, "error": str(bad.error)} for bad in declared.bad],
    }
    tiers = dict(declared.tiers)
    if was_used(state_dir):
        with existing_ledger(state_dir) as ledger:
            running = running_node(state_dir)  # before its files are read: what it writes meanwhile is its own
            rows = ledger.volumes()
            tiers = tiers_as_seen(state_dir, rows, ledger.receipts(), tiers | _status_files(state_dir), running)
            _add_ledger(found, ledger, [row for row in rows if all_volumes or not row.is_terminal])
            found["node"] |= {"running": running, "nodeId": _node_id(state_dir)}
    found["tiers"] = [_in_order(tiers[key].to_manifest()) for key in sorted(tiers)]
    return found


def _in_order(manifest: dict[str, Any]) -> dict[str, Any]:
    """As people write it, and kubectl shows it."""
    return {name: manifest[name] for name in ("apiVersion", "kind", "metadata", "spec", "status") if name in manifest}


def _status_files(state_dir: str) -> dict[str, KVCacheTier]:
    from kvtier_node.status_files import StatusFiles

    tiers, bad = StatusFiles(state_dir).load()
    for path, error in bad:
        note(f"{path} cannot be read: {error}")
    return tiers


def _node_id(state_dir: str) -> str:
    from kvtier_node.identity import NodeIdentity

    return NodeIdentity.load(state_dir).node_id


def _add_ledger(found: dict[str, Any], ledger: Ledger, rows: list[VolumeRow]) -> None:
    from dataclasses import asdict

    found["volumes"] = [_volume(row) for row in rows]
    found["requests"] = [asdict(request) for request in ledger.open_requests()]
    found["events"] = [asdict(event) for event in ledger.events(_EVENTS)]
    rebuilt = ledger.rebuilt
    found["node"] |= {
        "receipts": ledger.head().count,
        "receiptsHead": ledger.head().hash,
        "ledgerRebuilt": None if rebuilt is None else {"at": rebuilt[0], "reason": rebuilt[1]},
        "mirrorProblem": ledger.mirror_problem,
    }


def _volume(row: VolumeRow) -> dict[str, Any]:
    from kvtier_cli.tier_view import consumer_lives

    return {
        "volume": row.volume_id,
        "tier": row.tier_key,
        "state": row.state.value,
        "since": row.state_since,
        "backend": row.backend.value,
        "place": row.place,
        "ranks": row.ranks,
        "bytesPerRank": row.bytes_per_rank,
        "consumer": row.consumer,
        "consumerLives": None if row.is_terminal else consumer_lives(row),
        "keyId": row.key_id,
        "bootId": row.boot_id,
        "reason": row.reason,
    }


def _for_people(found: dict[str, Any], *, one: bool) -> None:
    node = found["node"]
    running = f"kvtier node runs as process {node['running']}" if node["running"] else "no kvtier node runs"
    typer.echo(f"{running}; {count(node['receipts'], 'receipt')}; state in {node['stateDir']}")
    if node["ledgerRebuilt"]:
        typer.echo(f"the ledger was rebuilt at {node['ledgerRebuilt']['at']}: {node['ledgerRebuilt']['reason']}")
    _show_tiers(found["tiers"])
    if one:
        for tier in found["tiers"]:
            _show_conditions(tier)
    if found["volumes"]:
        table(
            "Volumes",
            ("VOLUME", "TIER", "STATE", "SINCE", "BACKEND", "SIZE", "CONSUMER"),
            [
                (
                    item["volume"],
                    item["tier"],
                    item["state"],
                    item["since"],
                    item["backend"],
                    size(item["ranks"] * item["bytesPerRank"]),
                    _consumer(item),
                )
                for item in found["volumes"]
            ],
        )
    ended = sum(item["consumerLives"] is False and item["state"] == "InUse" for item in found["volumes"])
    if ended and not node["running"]:
        what = count(ended, "volume")
        note(f"{what} of ended consumers: 'kvtier node' or the next 'kvtier run' erases what nobody else has open")
    if found["requests"]:
        rows = [
            (item["id"], item["tier"], item["scope"], item["reason"], item["created_at"]) for item in found["requests"]
        ]
        table("Open requests", ("REQUEST", "TIER", "SCOPE", "REASON", "SINCE"), rows)
    for bad in found["badManifests"]:
        note(f"manifest not used: {bad['error']}")
    if found["events"]:
        events = [(item["at"], item["reason"], item["object"], item["message"]) for item in found["events"]]
        table("Last events", ("AT", "REASON", "OBJECT", "MESSAGE"), events)


def _condition(tier: dict[str, Any], name: str) -> dict[str, Any]:
    conditions = tier.get("status", {}).get("conditions", [])
    return next((condition for condition in conditions if condition["type"] == name), {})


def _show_tiers(tiers: list[dict[str, Any]]) -> None:
    rows = []
    for tier in tiers:
        seen = tier.get("status", {})
        ready, volumes = _condition(tier, "Ready"), seen.get("volumes", {})
        rows.append(
            (
                _key(tier),
                ready.get("status", "not seen yet"),
                ready.get("reason"),
                seen.get("backend", tier["spec"]["encryption"]["backend"]),
                volumes.get("total", 0),
                volumes.get("inUse", 0),
                size(seen.get("residualBytes", 0)),
                seen.get("lastErasure", {}).get("time"),
                tier["spec"].get("governance", {}).get("owner"),
            )
        )
    columns = ("TIER", "READY", "REASON", "BACKEND", "VOLUMES", "IN USE", "RESIDUAL", "LAST ERASURE", "OWNER")
    table("Tiers", columns, rows)


def _show_conditions(tier: dict[str, Any]) -> None:
    conditions = tier.get("status", {}).get("conditions", [])
    rows = [(item["type"], item["status"], item["reason"], item.get("message")) for item in conditions]
    table(f"Conditions of {_key(tier)}", ("CONDITION", "STATUS", "REASON", "MESSAGE"), rows)


def _consumer(volume: dict[str, Any]) -> str | None:
    """Who uses a volume, on one line, and whether that is past."""
    record = volume["consumer"]
    if not record:
        return None
    name = f"pod {record['namespace']}/{record['name']}" if record.get("kind") == "pod" else f"pid {record['pid']}"
    return f"{name} (has ended)" if volume["consumerLives"] is False else name
