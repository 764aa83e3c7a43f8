"""The agent's whole life on a node, over and over: open, recover, provision, serve a consumer that is killed, erase.

args: rounds; lines (canaries that the consumer writes into its slots); backend (DmCrypt); device (None: an image); stop_at
(arrow of this boot at which to stand still); lie_at (arrow from which on the disk keeps nothing; -1: from the start); may_fail
(what goes wrong is reported); abandon (an administrator ends the volume in use). The order is that of `kvtier node`: what a
power cut left is erased before anybody is served.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import agent_node
from umlguest import channel

from kvtier_api.errors import KvtierError
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import abandon
from kvtier_node.guarding import wait_for_end
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.provisioning import provision, start
from kvtier_node.recovery import recover
from kvtier_node.tier_check import check_tier

USER = 1000
CONSUMER = Path(__file__).with_name("agent_consumer.py")


def recovered(node: Node) -> None:
    found = recover(node)
    channel.report(
        "recovered",
        failed=[str(error) for _, error in found.failed],
        adopted=[live.volume_id for live in found.adopted],
        elsewhere=found.guarded_elsewhere,
        rows=agent_node.rows(node),
        chain=agent_node.receipts(node),
        places=agent_node.kept_places(node),
        left_over=agent_node.left_over(),
    )
    for live in [*found.adopted, *(live for live, _ in found.failed)]:  # the test's verdict is given; the disk may go
        live.close_watch()
        live.guardian.close()


def served(node: Node) -> None:
    live = provision(node, agent_node.tier_of_args(), uid=USER, gid=USER)
    slots = sorted(Path(live.slots_path).iterdir())
    zeros = [not any(slot.read_bytes()) for slot in slots]
    channel.report("served", volume=live.volume_id, slots=[slot.name for slot in slots], zeros=all(zeros))
    consumer = consume(node, live, slots)
    if channel.args.get("abandon"):
        abandon(node, live, "the disk is to be examined")
        channel.listen()
    consumer.kill()
    consumer.wait()
    seen = wait_for_end(node, live, limit_s=60)
    channel.report("ended", volume=live.volume_id, erased=seen.receipt is not None, error=str(seen.error or seen.why))


def consume(node: Node, live: LiveVolume, slots: list[Path]) -> subprocess.Popen[bytes]:
    """A process that has written its canaries into every slot file, and holds them open."""
    command = [sys.executable, "-I", "-S", str(CONSUMER), str(USER), *map(str, slots)]
    consumer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert consumer.stdin is not None and consumer.stdout is not None
    consumer.stdin.write("".join(channel.args["lines"]).encode() + b"\n")
    consumer.stdin.flush()
    start(node, live, ProcessConsumer.of(consumer.pid))
    consumer.stdin.write(b"go\n")
    consumer.stdin.flush()
    if consumer.stdout.readline() != b"written\n":
        raise RuntimeError("the consumer did not write")
    if channel.args.get("device"):
        channel.report("checked", text=check_tier(node, agent_node.tier_of_args()).message)
    channel.report("written", volume=live.volume_id, pid=consumer.pid)
    return consumer


def main() -> None:
    channel.report("up", pid=os.getpid())
    lie_at = channel.args.get("lie_at")
    if lie_at is None:
        agent_node.mount_disk(kind=channel.args["kind"])
    else:
        device, lie = agent_node.lie_from_arrow(lie_at)
        agent_node.mount_disk(device, channel.args["kind"])
        if lie_at < 0:
            lie()
    node = agent_node.open_observed()
    if channel.args.get("sabotage") == "served before recovery":
        served(node)
    recovered(node)
    for _ in range(channel.args["rounds"]):
        try:
            served(node)
        except (KvtierError, RuntimeError) as error:  # on a disk that lies anything may fail
            if lie_at is None and not channel.args.get("may_fail"):
                raise
            channel.report("failed", text=f"{type(error).__name__}: {error}")
            channel.listen()
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
