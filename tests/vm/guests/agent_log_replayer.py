"""Starts the agent on every disk that a power cut could have left while `agent_log_recorder` ran, as the next boot would.

/dev/ubdb holds the log. args: disk_bytes, shard, shards, seed (of the torn writes), recover_every (of this shard's states:
recovery runs in those). Reports one or two `state` per barrier after the mark `formatted`.
"""

from __future__ import annotations

import random

import agent_life
import agent_node
from umlguest import channel, replay

from kvtier_node.recovery import open_node

wanted = channel.args
states = replay.states(
    "/dev/ubdb",
    wanted["disk_bytes"],
    first_mark="formatted",
    shard=wanted["shard"],
    shards=wanted["shards"],
    chance=random.Random(wanted["seed"]),
)
for number, state in enumerate(states):
    with state.mounted(place=agent_node.NODE):
        if number == 0:
            agent_node.not_the_agents.update(agent_node.left_over())  # the state's own loop device, the same each time
        there = (agent_node.STATE / "ledger.db").exists()
        node = open_node(str(agent_node.STATE), [str(agent_node.ROOT)], name="vm")
        rebuilt = node.ledger.rebuilt
        channel.report(
            "state",
            entry=state.entry.number,
            torn=state.torn,
            marks=state.marks,
            ledger_was_there=there,
            rebuilt=rebuilt and rebuilt[1],
            arrows=[[arrow.volume_id, arrow.after] for arrow in node.ledger.transitions()],
            rows=agent_node.rows(node),
            places=agent_node.places(node),
        )
        if number % wanted["recover_every"] == 0:
            agent_life.recovered(node)
        node.ledger.close()
channel.report("replayed")
