"""Recovers, then asks for volumes that may have to be refused, one after another; each that is made is erased again.

args: kind; attempts: list of {backend, device, inside}. `inside`: a file system (with options) that is made under the tier's
path first, on dm-crypt over /dev/ubdc: {"kind": ..., "encrypted": bool, "options": "..."}.
"""

from __future__ import annotations

import os
from typing import Any

import agent_life
import agent_node
from umlguest import blockdev, channel

from kvtier_api.erasure import Trigger
from kvtier_api.errors import KvtierError
from kvtier_node.erasing import erase
from kvtier_node.node import Node
from kvtier_node.provisioning import provision

UNDER = "/dev/ubdc"


def make_file_system(kind: str, encrypted: bool, options: str) -> None:
    """Mount a fresh file system on the tiers' root; an encrypted one as a host that encrypts its disks has it."""
    device = UNDER
    if encrypted:
        blockdev.run(
            "cryptsetup", "open", "--type", "plain", "--hash", "plain", "--cipher", "aes-xts-plain64", "--key-size", "512",
            "--key-file", "-", "--keyfile-size", "64", "--batch-mode", UNDER, "host", data=os.urandom(64),
        )  # fmt: skip
        device = "/dev/mapper/host"
    if kind in ("btrfs", "f2fs"):
        blockdev.run(f"mkfs.{kind}", "-q", "-f", device)
    else:
        blockdev.make_file_system(kind, device)
    blockdev.run("mount", "-t", kind, *(["-o", options] if options else []), device, str(agent_node.ROOT))


def undo_file_system(encrypted: bool) -> None:
    blockdev.run("umount", str(agent_node.ROOT))
    if encrypted:
        blockdev.run("cryptsetup", "close", "host")


def attempt(node: Node, backend: str, device: str | None, name: str) -> dict[str, Any]:
    wanted = agent_node.tier(encryption={"backend": backend}, **({"device": device} if device else {}))
    try:
        live = provision(node, wanted, uid=agent_life.USER, gid=agent_life.USER)
    except KvtierError as error:
        return {"name": name, "error": type(error).__name__, "text": str(error)}
    receipt = erase(node, live, Trigger.REQUEST)
    return {"name": name, "error": None, "text": live.row.reason, "technique": receipt.technique}


def main() -> None:
    agent_node.mount_disk(kind=channel.args["kind"])
    node = agent_node.open_observed()
    agent_life.recovered(node)
    for number, wanted in enumerate(channel.args["attempts"]):
        inside = wanted.get("inside")
        if inside:
            make_file_system(inside["kind"], inside["encrypted"], inside.get("options", ""))
        name = wanted.get("name", str(number))
        channel.report("attempt", **attempt(node, wanted["backend"], wanted.get("device"), name))
        if inside:
            undo_file_system(inside["encrypted"])
    channel.report(
        "tried", left_over=agent_node.left_over(), rows=agent_node.rows(node), places=agent_node.places(node)
    )
    node.ledger.close()


if __name__ == "__main__":
    main()
