"""Somebody unmounts a dm-crypt volume in use: while a process has a file open it stays; when nobody can use it, it is erased.

args: lines.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import agent_life
import agent_node
from umlguest import blockdev, channel

from kvtier_node.consumers import ProcessConsumer
from kvtier_node.guarding import Look, look
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.provisioning import provision, start
from kvtier_node.recovery import recover


def unmount(live: LiveVolume) -> None:
    blockdev.run("umount", "-l", f"{live.row.place}/mnt")


def until_erased(node: Node, live: LiveVolume) -> Look:
    until = time.monotonic() + 60
    while (seen := look(node, live)).receipt is None and time.monotonic() < until:
        time.sleep(0.1)
    return seen


def main() -> None:
    agent_node.mount_disk(kind=channel.args["kind"])
    node = agent_node.open_observed()
    recover(node)
    live = provision(node, agent_node.tier_of_args(), uid=agent_life.USER, gid=agent_life.USER)
    consumer = agent_life.consume(node, live, sorted(Path(live.slots_path).iterdir()))
    unmount(live)
    looks = [look(node, live) for _ in range(3)]
    channel.report(
        "held",
        in_use=[seen.in_use for seen in looks],
        why=looks[-1].why,
        errors=[str(seen.error) for seen in looks if seen.error],
        key=bool(agent_node.key_of(live.volume_id)),
    )
    consumer.kill()
    consumer.wait()
    channel.report(
        "ended", volume=live.volume_id, erased=(seen := until_erased(node, live)).receipt is not None, error=seen.why
    )

    other = provision(node, agent_node.tier_of_args(), uid=agent_life.USER, gid=agent_life.USER)
    sleeper = subprocess.Popen(["sleep", "3600"])
    start(node, other, ProcessConsumer.of(sleeper.pid))
    unmount(other)
    seen = until_erased(node, other)
    receipt = seen.receipt
    channel.report(
        "unused",
        erased=receipt is not None,
        why=seen.why,
        error=str(seen.error),
        lives=sleeper.poll() is None,
        steps=[[step.name, step.ok] for step in receipt.steps] if receipt else [],
    )
    sleeper.kill()
    sleeper.wait()
    channel.report(
        "done",
        rows=agent_node.rows(node),
        chain=agent_node.receipts(node),
        places=agent_node.kept_places(node),
        left_over=agent_node.left_over(),
    )
    node.ledger.close()


if __name__ == "__main__":
    main()
