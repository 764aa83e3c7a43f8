"""What the agent may do, as it runs from the chart: its rights are those that the chart and the service unit state, and no more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installed import CHART, Installed

pytestmark = [pytest.mark.root, pytest.mark.slow]

UNIT = CHART.parents[1] / "docs" / "kvtier-node.service"
DAEMONSET = CHART / "templates" / "node-daemonset.yaml"
# linux/capability.h
NUMBERS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "KILL": 5, "LINUX_IMMUTABLE": 9, "IPC_LOCK": 14,
    "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_RESOURCE": 24, "MKNOD": 27, "LEASE": 28,
}  # fmt: skip


def stated_by_the_unit() -> set[str]:
    (line,) = [line for line in UNIT.read_text().splitlines() if line.startswith("CapabilityBoundingSet=")]
    return {word.removeprefix("CAP_") for word in line.partition("=")[2].split()}


def stated_by_the_chart() -> set[str]:
    """The list in the comment above the container's security context: names in front of what each is for."""
    text = DAEMONSET.read_text()
    lines = re.findall(r"^ +#   ([A-Z][A-Z_, ]+?) +[a-z/]", text, re.MULTILINE)
    return {name for line in lines for name in line.replace(",", " ").split()}


def sets_of(status: str) -> dict[str, int]:
    return {line[:6]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}


def test_every_thread_of_the_agent_has_the_rights_that_are_stated_and_no_others(installed: Installed) -> None:
    """Privileged is every right: what is not needed is given up at the start, and cannot be had by what it starts either."""
    assert stated_by_the_unit() == stated_by_the_chart() == set(NUMBERS)
    machine = sets_of(Path("/proc/self/status").read_text())["CapBnd"]  # a machine may itself be without one of them
    wanted = sum(1 << number for number in NUMBERS.values()) & machine
    assert wanted != machine
    process = installed.node.inside / "proc" / str(installed.agent_pid())
    threads = sorted((process / "task").iterdir())
    assert len(threads) > 1
    for thread in threads:
        sets = sets_of((thread / "status").read_text())
        assert sets == {"CapInh": 0, "CapPrm": wanted, "CapEff": wanted, "CapBnd": wanted, "CapAmb": 0}, thread.name


def test_the_agent_sees_of_the_node_what_the_chart_mounts_and_writes_nowhere_else(installed: Installed) -> None:
    process = installed.node.inside / "proc" / str(installed.agent_pid())
    lines = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
    of_disks = {
        fields[4]: fields[5].split(",")[0]
        for fields in lines
        if fields[fields.index("-") + 1] not in ("proc", "sysfs", "cgroup", "cgroup2", "tmpfs", "mqueue", "devpts")
        and not re.match(r"/(var/lib/kubelet|var/lib/kvtier/tiers|dev)/", fields[4])
    }
    writable = {path for path, mode in of_disks.items() if mode == "rw"}
    known = {"/var/lib/kvtier/state", "/var/lib/kvtier/tiers", "/var/lib/kubelet", "/dev"}
    assert writable <= known | {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/termination-log"}
    assert known - {"/dev"} <= writable
    assert of_disks["/"] == "ro"
    first = installed.node.inside / "proc" / "1"
    shared = {name for name in ("net", "ipc", "uts", "pid") if same(process / "ns" / name, first / "ns" / name)}
    assert shared == {"pid"}, "hostPID alone: who holds a file of a volume may be any process of the node"


def same(one: Path, other: Path) -> bool:
    return one.readlink() == other.readlink()
