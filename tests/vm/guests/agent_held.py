"""An erasure of a volume that cannot be unmounted: its consumer lives, holds a file open, and the mount leaked.

The leak is a mount namespace that was copied while the volume was mounted (a container started meanwhile, say): the agent can
neither see nor undo it. args: lines; device (None: on an image, or a block device).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import time
from pathlib import Path
from typing import Any

import agent_life
import agent_node
from umlguest import blockdev, channel

from kvtier_api.erasure import Trigger
from kvtier_node.erasing import Death, erase
from kvtier_node.provisioning import provision
from kvtier_node.recovery import recover

CLONE_NEWNS = 0x00020000
DIRTY = 65536


def leak_the_mount(slot: Path) -> int:
    """A process with a mount namespace of its own, a copy of this one, in which it holds a file of the volume. Its pid."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0:
                os.open(slot, os.O_RDWR)
                os.write(ready_write, b"x")
                time.sleep(3600)
        finally:
            os._exit(code)
    os.close(ready_write)
    if os.read(ready_read, 1) != b"x":
        raise RuntimeError("the mount could not be leaked")
    return child


def seen_through(fd: int, *, direct: bool, at: int = 0) -> str:
    """What reading the block at `at` gives: `canary`, `other`, or the name of the error."""
    buffer = mmap.mmap(-1, 4096)
    flags = os.O_DIRECT if direct else 0
    try:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | flags)
        try:
            os.preadv(again, [buffer], at)
        finally:
            os.close(again)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "canary" if channel.args["lines"][0].encode() in buffer[:] else "other"


def main() -> None:
    agent_node.mount_disk(kind=channel.args["kind"])
    node = agent_node.open_observed()
    recover(node)
    device = channel.args["device"]
    live = provision(node, agent_node.tier_of_args(), uid=agent_life.USER, gid=agent_life.USER)
    slots = sorted(Path(live.slots_path).iterdir())
    consumer = agent_life.consume(node, live, slots)
    held = os.open(slots[0], os.O_RDWR)
    holder = leak_the_mount(slots[0])
    mapped = f"/dev/mapper/{live.volume_id}"
    channel.report("before", direct=seen_through(held, direct=True), cached=seen_through(held, direct=False))
    os.pwrite(held, "".join(channel.args["lines"]).encode(), DIRTY)  # dirty pages at the moment of the erasure

    began_s = time.monotonic()
    receipt = erase(node, live, Trigger.REQUEST, death=Death.now())
    steps = [[step.name, step.ok, step.detail] for step in receipt.steps]
    table = blockdev.run("dmsetup", "table", "--showkeys", live.volume_id).split()
    channel.report(
        "erased", technique=receipt.technique, steps=steps, took_s=time.monotonic() - began_s, table=table[2:]
    )
    dirty = seen_through(held, direct=False, at=DIRTY)
    channel.report(
        "after", direct=seen_through(held, direct=True), cached=seen_through(held, direct=False), dirty=dirty
    )
    channel.report("held", left_over=agent_node.left_over(), places=agent_node.kept_places(node))

    os.close(held)
    consumer.kill()
    consumer.wait()
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    until = time.monotonic() + 120
    while agent_node.left_over() and time.monotonic() < until:
        time.sleep(0.05)  # the kernel takes mounts apart in the background
    result: dict[str, Any] = {"left_over": agent_node.left_over(), "node": os.path.exists(mapped)}
    result |= {
        "chain": agent_node.receipts(node),
        "rows": agent_node.rows(node),
        "places": agent_node.kept_places(node),
    }
    if device:
        with open(device, "rb") as file:
            result["blank"] = not any(any(chunk) for chunk in iter(lambda: file.read(1 << 20), b""))
    channel.report("done", **result)
    node.ledger.close()


if __name__ == "__main__":
    main()
