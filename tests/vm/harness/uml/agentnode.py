"""The agent's node from outside: its disk over many boots, each cut of its power, and what must be true after each.

`AgentNode` boots guests that report as `agent_node` and `agent_life` do, collects every key that any boot reported, and
searches the raw disk for them and for the canaries. The claims are plain functions on a machine's events.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uml.imagesearch import Hit, Needle, canary_lines, canary_needles, key_needles, search
from uml.machine import LIMIT_S, Event, Machine

#: The arrows of a volume that is made, used and erased, in order.
LIFE = ("Planned", "Provisioning", "Ready", "InUse", "Dying", "Erasing", "Erased")
CANARIES = canary_lines(200, seed=7)
_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0", "-J", "size=4"],
    "xfs": ["mkfs.xfs", "-q", "-K"],
}
_SIZE_MIB = {"ext4": 96, "xfs": 320}  # XFS is not made smaller than 300 MiB
_OF_A_RECORD = ("place.json", "consumer.json", ".place.json.", ".consumer.json.")


def make_node_disk(path: Path, kind: str = "ext4") -> Path:
    """A disk with an empty file system, made by the host: the guest's first boot shall begin with the agent."""
    with open(path, "xb") as file:
        file.truncate(_SIZE_MIB[kind] << 20)
    tool = shutil.which(_MAKE[kind][0], path="/usr/sbin:/sbin:/usr/bin:/bin")
    assert tool is not None, _MAKE[kind][0]
    subprocess.run([tool, *_MAKE[kind][1:], str(path)], check=True, capture_output=True)
    return path


@dataclass
class AgentNode:
    """One node over all its boots. `start` is the fixture `boot`; keys are hexadecimal, by what used them."""

    disk: Path
    start: Callable[..., Machine]
    kind: str = "ext4"
    backend: str = "DmCrypt"
    keys: dict[str, str] = field(default_factory=dict)
    serials: dict[str, str] = field(default_factory=dict)

    def boot(self, guest: str = "agent_life.py", *, disks: tuple[Path, ...] = (), **args: Any) -> Machine:
        lines = [line.decode() for line in CANARIES]
        args = {"rounds": 1, "lines": lines, "backend": self.backend, "kind": self.kind} | args
        return self.start(guest, work=self.disk.parent, disks=[self.disk, *disks], serials=self.serials, args=args)

    def cut(self, machine: Machine, *, claims: bool = True) -> None:
        """Cut the power (if it is still on), then hold every claim against what the boot reported and what the disk has.

        Without `claims` only the disk counts: nothing else can be asked of a boot on a disk that lies.
        """
        machine.cut()
        self.note_keys(machine)
        if claims:
            claims_of_boot(machine)
        if self.backend == "DmCrypt":
            hits = self.hits()
            assert not hits, f"{len(hits)} hits on the raw disk, the first is {hits[0]}"

    def note_keys(self, machine: Machine) -> None:
        self.keys |= keys_of(machine)

    def hits(self) -> list[Hit]:
        """Canaries and keys (whole, half, hexadecimal, base64) anywhere on the raw disk."""
        return search(self.disk, _needles(self.keys))


def keys_of(machine: Machine) -> dict[str, str]:
    """Every key that the kernel was given in this boot, by what it was for. Each must be the one that is on record."""
    found = {}
    for event in machine.events:
        if event.tag == "key":
            assert event["is_the_one_made"], "the kernel uses another key than the one that was made and is on record"
            assert len(event["hex"]) == 128
            found[f"{event['volume']} {event['hex'][:4]}"] = event["hex"]
    return found


def canary_needles_and_keys(machine: Machine) -> list[Needle]:
    return _needles(keys_of(machine))


def _needles(keys: dict[str, str]) -> list[Needle]:
    needles = canary_needles(CANARIES)
    for name, key in keys.items():
        needles += key_needles(name, bytes.fromhex(key))
    return needles


def after_a_power_cut(machine: Machine, timeout_s: float = LIMIT_S) -> None:
    """Let a boot run to its end; it must have found a sound ledger, erased everything, and served after that only."""
    machine.wait_for("done", timeout_s)
    machine.wait_off(timeout_s)


def claims_of_boot(machine: Machine) -> None:
    """What holds for every boot, wherever its power was cut."""
    found: dict[str, Event] = {}
    for event in machine.events:
        match event.tag:
            case "opened":
                ledger_and_places(event)
            case "recovered":
                everything_is_erased(event, found["opened"])
            case "served":
                assert "recovered" in found, "served before recovery had ended"
                assert event["zeros"], "a new consumer would read old bytes"
            case "ended":
                assert event["erased"], event["error"]
            case "done":
                nothing_left(event)
        found.setdefault(event.tag, event)
    for trouble in ("Kernel panic", "BUG:", "Oops"):
        assert trouble not in machine.console, machine.console[-4000:]


def ledger_and_places(opened: Event) -> None:
    """The ledger opened as it was; whatever lies on the disk is on record there (Record-before-write)."""
    assert opened["rebuilt"] is None, f"the ledger did not survive the cut: {opened['rebuilt']}"
    states = {row["volume"]: row["state"] for row in opened["rows"]}
    for place in opened["places"]:
        recorded_before_written(place, states)


def recorded_before_written(place: dict[str, Any], states: dict[str, str]) -> None:
    """`place`: its name, what is in it, whether its record verifies (`agent_node.places`); `states`: the ledger's."""
    name, content = place["volume"], place["content"]
    assert name in states, f"{name} is on the disk and not in the ledger"
    assert place["signed"] in (None, True), f"{name}: its record does not verify: {place['signed']}"
    beyond = [entry for entry in content if not entry.startswith(_OF_A_RECORD)]
    if beyond:
        assert place["signed"] is True, f"{name} holds {beyond} without a record"
        assert states[name] not in ("Planned", "Erased", "Abandoned"), f"{name} is {states[name]} and holds {beyond}"


def everything_is_erased(recovered: Event, opened: Event) -> None:
    """Every volume of an earlier boot ended Erased, by the power loss, with a receipt in a chain that verifies."""
    assert recovered["failed"] == [], recovered["failed"]
    assert recovered["adopted"] == [], "no consumer lives over a power cut"
    assert recovered["elsewhere"] == [], "nobody guards a volume over a power cut"
    nothing_left(recovered)
    receipts = {receipt["volume"]: receipt for receipt in recovered["chain"]["receipts"]}
    before = {row["volume"]: row for row in opened["rows"]}
    for row in before.values():
        if row["state"] in ("Erased", "Abandoned"):
            continue
        receipt = receipts[row["volume"]]
        assert receipt["trigger"] == "PowerLoss", receipt
        steps = {name: ok for name, ok, _ in receipt["steps"]}
        nothing_was_made = row["state"] in ("Planned", "Provisioning") and set(steps) == {"place"}
        assert receipt["technique"] == ("Nothing" if nothing_was_made else "KeyLost"), (row["state"], receipt)
        assert False not in steps.values(), receipt


def nothing_left(event: Event) -> None:
    assert {row["state"] for row in event["rows"]} <= {"Erased"}, event["rows"]
    assert event["chain"]["ok"], event["chain"]["problems"]
    volumes = [receipt["volume"] for receipt in event["chain"]["receipts"]]
    assert sorted(volumes) == sorted(row["volume"] for row in event["rows"]), "one receipt per volume, no more"
    assert event["places"] == [], f"left of ended volumes: {event['places']}"
    assert event["left_over"] == [], f"left in the kernel: {event['left_over']}"


def arrows(machine: Machine) -> list[str]:
    return [event["after"] for event in machine.events if event.tag == "arrow"]
