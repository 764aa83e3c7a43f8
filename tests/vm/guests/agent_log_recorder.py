"""Lives of the agent on a disk that logs every write (dm-log-writes), with a mark in the log after each arrow.

/dev/ubdb is the disk, /dev/ubdc takes the log. args: rounds, lines, backend. The file system is made on the logged device, so
that a replay can begin with an empty disk. The log is complete when `recorded` is reported.
"""

from __future__ import annotations

import agent_life
import agent_node
from umlguest import blockdev, channel

from kvtier_node.ledger import Transition

LOG = "/dev/ubdc"


def mark(text: str) -> None:
    blockdev.run("dmsetup", "message", "logged", "0", "mark", text)


def mark_arrow(number: int, arrow: Transition) -> None:
    mark(f"arrow:{arrow.volume_id}:{arrow.after}")  # a space would end the message


blockdev.load("dm-log-writes")
device = blockdev.dm_create("logged", f"log-writes {agent_node.DISK} {LOG}", blockdev.sectors(agent_node.DISK))
blockdev.make_file_system("ext4", device)
agent_node.not_the_agents.add("dm device logged")
mark("formatted")
agent_node.mount_disk(device)
agent_node.at_each_arrow.append(mark_arrow)
node = agent_node.open_observed()
mark("opened")
agent_life.recovered(node)
for _ in range(channel.args["rounds"]):
    agent_life.served(node)
node.ledger.close()
blockdev.run("umount", str(agent_node.NODE))
mark("unmounted")
blockdev.run("dmsetup", "remove", "logged")
channel.report("recorded")
