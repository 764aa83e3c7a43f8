"""The agent with one of its guarantees taken out. A test that does not turn red then proves nothing.

Each function takes one thing out, in this process, before the agent starts. What only a child process does is taken out where
the agent calls it.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umlguest import channel

from kvtier_api.errors import KvtierError
from kvtier_node import recovery
from kvtier_node.backends import raw_device
from kvtier_node.consumers import Evidence
from kvtier_node.kernel import block_device, bounded
from kvtier_node.ledger import Ledger, VolumeRow, database
from kvtier_node.paths import Directory


def ledger_is_not_durable() -> None:
    """`PRAGMA synchronous = OFF`: a commit returns before it is on the disk."""
    real = database._make_durable

    def careless(connection: sqlite3.Connection, path: str, *, new: bool) -> None:
        real(connection, path, new=new)
        connection.execute("PRAGMA synchronous = OFF")

    database._make_durable = careless


def effect_before_record() -> None:
    """The volume's directory and image are there before the ledger knows of them."""
    real = Ledger.plan

    def late(self: Ledger, row: VolumeRow) -> VolumeRow:
        os.mkdir(row.place)
        image = Path(row.place, "volume.img")
        image.write_bytes(os.urandom(4096))
        os.sync()
        channel.barrier("made")
        return real(self, row)

    Ledger.plan = late  # type: ignore[method-assign]


def record_is_not_durable() -> None:
    """place.json is written and renamed, and not fsynced before there is more in the place."""

    def careless(self: Directory, name: str, data: bytes, mode: int = 0o600) -> None:
        fd = self.create_file(f".{name}.tmp", mode)
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(f".{name}.tmp", name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    Directory.write_file_atomic = careless  # type: ignore[method-assign]


def key_is_kept() -> None:
    """The erasure says that the key is destroyed, and leaves the kernel as it is."""
    real = bounded.call

    def pretend(function: str, **arguments: Any) -> dict[str, Any]:
        if function.endswith("crypt_device:destroy_key"):
            return {"found": "crypt", "wiped": True, "left": "error", "inactive": False}
        return real(function, **arguments)

    bounded.call = pretend


def pages_are_kept() -> None:
    """What a leaked mount has in the page cache stays there."""
    real = bounded.call

    def pretend(function: str, **arguments: Any) -> dict[str, Any]:
        if function.endswith("cached_pages:drop"):
            return {"mounted": True, "files": 0, "pages": 0, "unknown": 0}
        return real(function, **arguments)

    bounded.call = pretend


def key_is_written_to_the_disk() -> None:
    """Half of the key, in hexadecimal, in a file of the state directory."""
    real = bounded.call

    def leaking(function: str, **arguments: Any) -> dict[str, Any]:
        import agent_node

        answer = real(function, **arguments)
        if function.endswith(":open_dm_crypt"):
            leak = agent_node.STATE / "debug.log"
            leak.write_text(agent_node.key_of(arguments["name"])[:64])
            os.sync()
        return answer

    bounded.call = leaking


def another_boot_is_not_noticed() -> None:
    """A volume in use stays in use, whatever happened since: the boot, and that its mount went with it."""
    recovery.usage = lambda node, live: Evidence(True, "it was in use")


def devices_are_known_by_their_names() -> None:
    """/dev/ubdc is /dev/ubdc."""
    raw_device.block_device.marks = lambda fd: [block_device.THIS_BOOT + "the same name"]


def leftovers_are_not_erased() -> None:
    """Recovery gives up on what it finds."""

    def refuse(*_arguments: Any) -> Any:
        raise KvtierError("not today")

    recovery.erase = refuse


SABOTAGE: dict[str, Callable[[], None]] = {
    "ledger is not durable": ledger_is_not_durable,
    "effect before record": effect_before_record,
    "record is not durable": record_is_not_durable,
    "key is kept": key_is_kept,
    "pages are kept": pages_are_kept,
    "key is written to the disk": key_is_written_to_the_disk,
    "another boot is not noticed": another_boot_is_not_noticed,
    "devices are known by their names": devices_are_known_by_their_names,
    "leftovers are not erased": leftovers_are_not_erased,
    "served before recovery": lambda: None,  # `agent_life` does it
}
