"""A consumer that the kernel kills because its cgroup's memory is full (memory.max), seen by its guardian alone.

args: lines. The guardian only looks, as `kvtier node` does; it learns nothing from the cgroup.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import agent_life
import agent_node
from umlguest import channel

from kvtier_node.guarding import wait_for_end
from kvtier_node.provisioning import provision
from kvtier_node.recovery import recover

TOP = Path("/sys/fs/cgroup")
LIMIT_BYTES = 48 << 20


def main() -> None:
    agent_node.mount_disk(kind=channel.args["kind"])
    node = agent_node.open_observed()
    recover(node)
    live = provision(node, agent_node.tier_of_args(), uid=agent_life.USER, gid=agent_life.USER)
    (TOP / "cgroup.subtree_control").write_text("+memory")
    group = TOP / "consumer"
    group.mkdir()
    (group / "memory.max").write_text(str(LIMIT_BYTES))
    consumer = agent_life.consume(node, live, sorted(Path(live.slots_path).iterdir()))
    (group / "cgroup.procs").write_text(str(consumer.pid))
    assert consumer.stdin is not None
    consumer.stdin.write(b"eat\n")
    consumer.stdin.flush()
    died_s = _until_dead(consumer.pid)
    seen = wait_for_end(node, live, limit_s=60)
    erased_s = time.monotonic() - died_s
    events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    channel.report("killed", signal=-consumer.wait(), oom_kills=int(events["oom_kill"]), erased_after_s=erased_s)
    channel.report("ended", volume=live.volume_id, erased=seen.receipt is not None, error=str(seen.error or seen.why))
    channel.report(
        "done",
        rows=agent_node.rows(node),
        chain=agent_node.receipts(node),
        places=agent_node.kept_places(node),
        left_over=agent_node.left_over(),
    )
    node.ledger.close()


def _until_dead(pid: int) -> float:
    """Wait without reaping: the zombie is there until the guest asks for its end, as one of a slow parent is."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return time.monotonic()


if __name__ == "__main__":
    main()
