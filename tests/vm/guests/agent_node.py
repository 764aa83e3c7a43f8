"""What every guest that runs the agent has in common: the node's disk, its ledger with an observer, and what is left over.

/dev/ubdb is an ext4 with the state directory and the tiers. The observer reports every arrow when it is on record and
before its effect; at arrow `stop_at` it stands still, so that the host can cut exactly there. Keys are reported the moment
the kernel has them: the test looks for them on the disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agent_sabotage
from umlguest import blockdev, channel

from kvtier_api.tier import KVCacheTier
from kvtier_node.children.keys import _KEY_ID_LABEL
from kvtier_node.kernel import bounded, device_mapper
from kvtier_node.kernel.processes import boot_id
from kvtier_node.ledger import Transition
from kvtier_node.node import Node
from kvtier_node.receipts import PLACE_NAME, export_chain, read_place, verify_chain
from kvtier_node.recovery import open_node

DISK = "/dev/ubdb"
NODE = Path("/mnt/node")
STATE, ROOT = NODE / "state", NODE / "tiers"
TIER = ROOT / "demo"
#: The kernel would write everything after 30 s, and ext4 after 5 s; by chance nothing may become durable here.
MOUNT_OPTIONS = ("noatime", "commit=300")

#: Called with every arrow before it is reported: what a test does to the disk in that moment.
at_each_arrow: list[Callable[[int, Transition], None]] = []

#: Devices of the test's own, which `left_over` does not count.
not_the_agents: set[str] = set()

_arrows = 0


def mount_disk(device: str = DISK, kind: str = "ext4") -> None:
    """Bring the machine into the state in which a host starts its agent: modules there, the node's disk mounted."""
    blockdev.load("loop", "dm-crypt")
    Path("/proc/sys/vm/dirty_writeback_centisecs").write_text("0")
    NODE.mkdir()
    options = ",".join(MOUNT_OPTIONS) if kind == "ext4" else "noatime"
    blockdev.run("mount", "-t", kind, "-o", options, device, str(NODE))
    ROOT.mkdir(mode=0o755, exist_ok=True)


def lie_from_arrow(wanted: int) -> tuple[str, Callable[[], None]]:
    """A device on the disk that from that arrow of this boot on says yes to every write and flush, and keeps none.

    And the function that makes it lie at once.
    """
    blockdev.load("dm-flakey")
    length = blockdev.sectors(DISK)
    device = blockdev.dm_create("flaky", f"flakey {DISK} 0 60000 0", length)
    not_the_agents.add("dm device flaky")

    def lie() -> None:
        # Neither the file system nor what is under way is flushed: what was not durable is lost from here on.
        blockdev.dm_reload("flaky", f"flakey {DISK} 0 0 60000 1 drop_writes", length, "--nolockfs", "--noflush")
        channel.report("lying")

    def at_arrow(number: int, _arrow: Transition) -> None:
        if number == wanted:
            lie()

    at_each_arrow.append(at_arrow)
    return device, lie


def tier(**changes: Any) -> KVCacheTier:
    """A tier of two ranks of 1 MiB; `changes` to its spec."""
    spec: dict[str, Any] = {"sizePerRank": "1Mi", "slotSize": "64Ki", "ranks": 2, "path": str(TIER)}
    spec |= {"encryption": {"backend": "DmCrypt"}} | changes
    return KVCacheTier.model_validate(
        {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheTier", "metadata": {"name": "demo"}, "spec": spec}
    )


def tier_of_args() -> KVCacheTier:
    """The tier that the test asks for: `backend`, and `device` where there is one."""
    device = channel.args.get("device")
    return tier(encryption={"backend": channel.args["backend"]}, **({"device": device} if device else {}))


def open_observed() -> Node:
    """Open the node as `kvtier node` does, and report what a start finds before it does anything."""
    if "sabotage" in channel.args:
        agent_sabotage.SABOTAGE[channel.args["sabotage"]]()
    bounded.call = _telling_keys(bounded.call)
    node = open_node(str(STATE), [str(ROOT)], name="vm", observers=[_observe])
    rebuilt = node.ledger.rebuilt
    channel.report("opened", boot=boot_id(), rebuilt=rebuilt and rebuilt[1], rows=rows(node), places=places(node))
    return node


def _observe(arrow: Transition) -> None:
    global _arrows
    for act in at_each_arrow:
        act(_arrows, arrow)
    fields = {"n": _arrows, "volume": arrow.volume_id, "before": arrow.before, "after": arrow.after}
    if channel.args.get("stop_at") == _arrows:
        channel.barrier("arrow", **fields)
    else:
        channel.report("arrow", **fields)
    _arrows += 1


def _telling_keys(real: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def call(function: str, **arguments: Any) -> dict[str, Any]:
        answer = real(function, **arguments)
        if function.endswith(":open_dm_crypt"):
            key = key_of(str(arguments["name"]))
            same = hashlib.sha256(_KEY_ID_LABEL + bytes.fromhex(key)).hexdigest()[:32] == answer["key_id"]
            channel.report("key", volume=arguments["name"], hex=key, is_the_one_made=same)
        return answer

    return call


def key_of(name: str) -> str:
    """The key that the kernel uses, in hexadecimal; empty where the device has no crypt target."""
    table = blockdev.run("dmsetup", "table", "--showkeys", name).split()
    return table[4] if table[2] == "crypt" else ""


def rows(node: Node) -> list[dict[str, Any]]:
    return [
        {"volume": row.volume_id, "state": row.state, "boot": row.boot_id, "place": row.place, "key_id": row.key_id}
        for row in node.ledger.volumes()
    ]


def places(node: Node) -> list[dict[str, Any]]:
    """Every directory of the tier as it lies there, and whether its record verifies. Nothing here asks the agent's own walk."""
    found = []
    for place in sorted(TIER.iterdir()) if TIER.exists() else []:
        record = place / PLACE_NAME
        signed = None
        if record.exists():
            try:
                signed = read_place(record.read_bytes(), node.identity.public_key).volume_id == place.name
            except Exception as error:  # whatever is wrong with it is the test's finding
                signed = f"{type(error).__name__}: {error}"
        found.append({"volume": place.name, "content": sorted(os.listdir(place)), "signed": signed})
    return found


def receipts(node: Node) -> dict[str, Any]:
    """Every receipt, and what an offline verification of the whole chain says."""
    verdict = verify_chain(list(export_chain(node.ledger, node.identity)), public_key=node.identity.public_key)
    listed = [
        {
            "volume": receipt.volume_id,
            "trigger": receipt.trigger,
            "technique": receipt.technique,
            "key_id": receipt.key_id,
            "device_serial": receipt.device_serial,
            "steps": [[step.name, step.ok, step.detail] for step in receipt.steps],
        }
        for receipt in node.ledger.receipts()
    ]
    return {"ok": verdict.ok, "problems": verdict.problems, "receipts": listed}


def left_over() -> list[str]:
    """Device mapper devices, loop devices with an image, and mounts below the node's disk."""
    found = [f"dm device {name}" for name in device_mapper.names()]
    found += [f"loop device {path.parents[1].name}" for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found += [f"mount {point}" for point in mounts if point.startswith(f"{NODE}/")]
    return [thing for thing in found if thing not in not_the_agents]


def kept_places(node: Node) -> Sequence[str]:
    """What is in the tier's directory still."""
    return [place["volume"] for place in places(node)]
