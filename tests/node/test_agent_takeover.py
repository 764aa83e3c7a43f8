"""`kvtier node` guards what nobody guards any more: real kills of guardians, consumers and agents."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from kvtier_node.ledger import Ledger
from requirements import need_root
from standalone import Host, has_ended, standalone_host, wait_for

BACKENDS = [pytest.param("SealOnly"), pytest.param("Fscrypt", marks=pytest.mark.root)]


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


def declare(host: Host, backend: str, **spec: object) -> None:
    if backend == "Fscrypt":
        need_root()
    host.declare("chat", encryption={"backend": backend}, **spec)


@pytest.mark.parametrize("backend", BACKENDS)
def test_when_kvtier_run_is_killed_the_node_takes_its_volume_and_erases_it_after_the_command(
    host: Host, backend: str
) -> None:
    declare(host, backend)
    node = host.node()
    process, told, pid = host.run("chat", 'exec 3<>"$KVTIER_SLOT_PREFIX.rank_0"; sleep 600 & wait')
    volume = told["KVTIER_VOLUME_ID"]
    process.sigkill()
    node.event("took-over", volume=volume)
    assert host.volume(volume)["state"] == "InUse"
    assert Path(told["KVTIER_SLOT_PREFIX"] + ".rank_0").exists()
    child = int(wait_for(lambda: children_of(host), "the sleeper")[0])
    os.kill(pid, signal.SIGKILL)
    # The shell is dead; the child that it forked still holds the slot file, and is the consumer too.
    wait_for(lambda: has_ended(pid), "the shell's end")
    assert host.volume(volume)["state"] == "InUse"
    os.kill(child, signal.SIGKILL)
    host.wait_state(volume, "Erased")
    receipt = next(item for item in host.receipts() if item["volume_id"] == volume)
    assert (receipt["trigger"], receipt["deadline_met"]) == ("Crash", True)
    assert host.mounts() == []
    wait_for(lambda: list((host.root / "chat").iterdir()) == [], "the removal of its place, which follows the record")


def children_of(host: Host) -> list[str]:
    """Processes that have a file of this host's volumes open."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
            command = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"sleep\0") and any("slot.rank_" in link and str(host.root) in link for link in links):
            found.append(name)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_that_was_killed_and_started_again_adopts_what_is_in_use(host: Host, backend: str) -> None:
    declare(host, backend)
    first = host.node()
    process, told, pid = host.run("chat", "sleep 600")
    volume = told["KVTIER_VOLUME_ID"]
    process.sigkill()
    first.event("took-over", volume=volume)
    first.sigkill()
    second = host.node()
    assert second.event("recovered")["adopted"] == [volume]
    assert Path(told["KVTIER_MARKER"]).exists()
    os.kill(pid, signal.SIGKILL)
    host.wait_state(volume, "Erased")


def test_stopping_the_node_erases_nothing_that_is_in_use(host: Host) -> None:
    declare(host, "SealOnly")
    first = host.node()
    process, told, pid = host.run("chat", "sleep 600")
    volume = told["KVTIER_VOLUME_ID"]
    process.sigkill()
    first.event("took-over", volume=volume)
    assert first.terminate() == 0
    assert [line["event"] for line in first.log()][-1] == "stopped"
    assert host.volume(volume)["state"] == "InUse"
    assert Path(told["KVTIER_MARKER"]).exists()
    assert not has_ended(pid)
    assert host.node().event("recovered")["adopted"] == [volume]


def test_a_consumer_that_died_while_no_agent_ran_is_erased_before_the_node_is_ready(host: Host) -> None:
    declare(host, "SealOnly")
    process, told, pid = host.run("chat", "sleep 600")
    process.sigkill()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_ended(pid), "the command's end")
    node = host.node()
    events = [line["event"] for line in node.log()]
    erased = next(i for i, line in enumerate(node.log()) if line.get("after") == "Erased")
    assert erased < events.index("ready")
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"
    assert host.receipts()[0]["deadline_met"] is None  # nobody saw when it died: nothing is claimed


def test_the_node_leaves_a_volume_to_its_living_kvtier_run(host: Host) -> None:
    declare(host, "SealOnly")
    node = host.node()
    process, told, pid = host.run("chat", "sleep 600")
    host.wait_condition("chat", "Provisioned", "True", "Provisioned")
    os.kill(pid, signal.SIGTERM)
    assert process.popen.wait(60) == 128 + signal.SIGTERM
    assert not [line for line in node.log() if line["event"] == "took-over"]
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"


def test_a_second_node_is_refused_and_told_which_process_runs(host: Host) -> None:
    first = host.node()
    second = host.kvtier("node", "--listen", "off")
    assert second.returncode == 9
    assert f"(process {first.pid})" in second.stderr
    assert "remedy:" in second.stderr
    first.sigkill()
    third = host.start("node", "--listen", "off")
    third.event("ready")


def test_a_port_in_use_is_an_error_with_a_remedy(host: Host) -> None:
    port = host.node().event("listening")["port"]
    other = host.base / "other"
    done = host.kvtier("node", "--listen", f"127.0.0.1:{port}", env={"KVTIER_STATE_DIR": str(other)})
    assert done.returncode == 9
    assert f"127.0.0.1:{port}" in done.stderr


def test_the_ledger_has_every_arrow_of_a_volume_that_two_processes_led_through_its_life(host: Host) -> None:
    declare(host, "SealOnly")
    node = host.node()
    process, told, pid = host.run("chat", "sleep 600")
    process.sigkill()
    node.event("took-over", volume=told["KVTIER_VOLUME_ID"])
    os.kill(pid, signal.SIGKILL)
    host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")
    with Ledger.open(host.state, create=False) as ledger:
        arrows = ledger.transitions(told["KVTIER_VOLUME_ID"])
    assert [arrow.after.value for arrow in arrows] == [
        "Planned",
        "Provisioning",
        "Ready",
        "InUse",
        "Dying",
        "Erasing",
        "Erased",
    ]
    times = [datetime.fromisoformat(arrow.at) for arrow in arrows]
    assert times == sorted(times)
