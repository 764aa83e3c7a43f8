"""SIGKILL of the agent, or of one of its children, again and again in one boot; each time a new agent recovers.

Unlike a power cut a kill leaves everything in the kernel: keys, crypt devices, loop devices, mounts. args: lines; kills: list of
{"arrow": n} (the agent, at that arrow, before its effect) and {"after": share of a life} (the agent); child_shard: [i, n], every
n-th of the points at which a child changes device mapper or a mount (the agent lives on). Reports `killed` after each recovery.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import agent_life
import agent_node
from umlguest import channel

from kvtier_api.erasure import Trigger
from kvtier_node.erasing import erase
from kvtier_node.ledger import Transition
from kvtier_node.node import Node
from kvtier_node.provisioning import provision
from kvtier_node.recovery import open_node, recover

CONTROL = "/dev/mapper/control"
COUNTER, TRACES, STAND_IN = Path("/tmp/children"), Path("/tmp/traces"), Path("/tmp/python-with-a-fault")
KILLED = Path("/tmp/killed.trace")
#: What is counted, and may be killed: calls to device mapper, and mounts. strace counts the calls that pass its filter.
FILTERS = {"ioctl": f"-e trace=ioctl -P {CONTROL}", "mount": "-e trace=mount", "umount2": "-e trace=umount2"}
PROBE = "dm device kvtier-probe-"


def stand_in(traced: str) -> str:
    """An interpreter that counts its starts in $n and runs itself as `traced` says, or as it is where that is empty.

    The tracer is detached (-D): the child still is its starter's.
    """
    COUNTER.write_text("")
    STAND_IN.write_text(
        f'#!/bin/sh\necho >>"{COUNTER}"\nn=$(wc -l <"{COUNTER}")\n{traced}\nexec "{sys.executable}" "$@"\n'
    )
    STAND_IN.chmod(0o755)
    return str(STAND_IN)


def traced_all() -> str:
    strace = f'"{shutil.which("strace")}" -D -f -q -y -e trace=ioctl,mount,umount2 -e signal=none'
    return f'exec {strace} -o "{TRACES}/$n" "{sys.executable}" "$@"'


def killed_one(fault: dict[str, Any]) -> str:
    strace = f'"{shutil.which("strace")}" -D -f -q -o "{KILLED}" -e signal=none {FILTERS[fault["call"]]}'
    injection = f"-e inject={fault['call']}:signal=KILL:when={fault['number']}"
    return f'[ "$n" -eq {fault["child"]} ] && exec {strace} {injection} "{sys.executable}" "$@"'


def points() -> list[dict[str, Any]]:
    """From the traces: every call of a child that changes device mapper or a mount, as a fault."""
    found = []
    for trace in sorted(TRACES.iterdir(), key=lambda path: int(path.name)):
        counts: dict[tuple[str, str], int] = {}
        for line in trace.read_text(errors="replace").splitlines():
            match = re.match(r"(\d+) +(\w+)\((.*)", line)
            if match is None or (match[2] == "ioctl" and f"<{CONTROL}>" not in match[3]):
                continue
            process, call, text = match.groups()
            counts[process, call] = counts.get((process, call), 0) + 1  # strace counts per process
            if call != "ioctl" or re.search(r"DM_(DEV_(CREATE|REMOVE|SUSPEND)|TABLE_(LOAD|CLEAR)|TARGET_MSG)", text):
                name = text.split(",")[1].strip() if call == "ioctl" else call
                found.append({"child": int(trace.name), "call": call, "number": counts[process, call], "name": name})
    return found


def agent(fault: dict[str, Any]) -> int:
    """A life of an agent in a process of its own, which `fault` ends. Its pid."""
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        os.setsid()

        def die_at(number: int, _arrow: Transition) -> None:
            if number == fault["arrow"]:
                os.kill(os.getpid(), signal.SIGKILL)

        if "arrow" in fault:
            agent_node.at_each_arrow.append(die_at)
        if "child" in fault:
            sys.executable = stand_in(killed_one(fault))
        elif "trace" in fault:
            sys.executable = stand_in(traced_all())
        node = agent_node.open_observed()
        agent_life.recovered(node)
        agent_life.served(node)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def recovered_fully(node: Node) -> list[str]:
    """Recover until nothing is in use: the killed agent's consumer ends when it sees that. What could not be erased."""
    until = time.monotonic() + 120
    while True:
        found = recover(node)
        for live in found.adopted:
            live.close_watch()
            live.guardian.close()
        if (not found.adopted and not found.guarded_elsewhere) or time.monotonic() > until:
            return [str(error) for _, error in found.failed] + found.guarded_elsewhere
        time.sleep(0.05)


def recovery(fault: dict[str, Any], status: int) -> None:
    """A new agent, in the same boot. What a killed agent's probe left goes when the next volume is made, so one is made then."""
    node = open_node(str(agent_node.STATE), [str(agent_node.ROOT)], name="vm")
    failed = recovered_fully(node)
    last = agent_node.receipts(node)["receipts"][-1:]
    if "child" not in fault and any(thing.startswith(PROBE) for thing in agent_node.left_over()):
        erase(
            node, provision(node, agent_node.tier_of_args(), uid=agent_life.USER, gid=agent_life.USER), Trigger.REQUEST
        )
    channel.report(
        "killed",
        fault=fault,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        child_was_killed="child" in fault and was_killed(fault["name"]),
        rebuilt=node.ledger.rebuilt,
        failed=failed,
        last=last,
        rows=agent_node.rows(node),
        chain=agent_node.receipts(node),
        places=agent_node.kept_places(node),
        left_over=agent_node.left_over(),
    )
    node.ledger.close()


def was_killed(name: str) -> bool:
    """Whether the trace has that call without a result. The tracer may still be writing."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        lines = KILLED.read_text(errors="replace").splitlines() if KILLED.exists() else []
        if any(name in line and line.endswith("= ?") for line in lines):
            return True
        time.sleep(0.05)
    return False


def one(fault: dict[str, Any]) -> None:
    KILLED.unlink(missing_ok=True)
    pid = agent(fault)
    if "after_s" in fault:
        time.sleep(fault["after_s"])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    recovery(fault, status)


def one_child(fault: dict[str, Any]) -> None:
    """A life may have a child more or less than the traced one had: who looks at a device while it is unmounted, sees it busy."""
    for moved in (0, -1, 1):
        one(fault | {"child": fault["child"] + moved, "point": fault["point"]})
        if was_killed(fault["name"]):
            return


def main() -> None:
    agent_node.mount_disk(kind=channel.args["kind"])
    TRACES.mkdir()
    began_s = time.monotonic()
    shard, shards = channel.args["child_shard"]
    one({"trace": True} if shards else {})
    span_s = time.monotonic() - began_s
    for fault in channel.args["kills"]:
        one(fault | ({"after_s": fault["after"] * span_s} if "after" in fault else {}))
    found = points() if shards else []
    for point in range(shard, len(found), shards or 1):
        one_child(found[point] | {"point": point})
    channel.report("finished", points=len(found), span_s=span_s)


if __name__ == "__main__":
    main()
