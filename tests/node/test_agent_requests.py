"""Requests and late erasures: `kvtier erase` end to end, a deadline that is missed, a volume that is given up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from requirements import need_root
from standalone import Host, has_ended, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


def test_an_erase_request_ends_every_consumer_whoever_guards_it(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.declare("other", **SEALED)
    node = host.node()
    orphan, told_orphan, orphan_pid = host.run("chat", "sleep 600")
    orphan.sigkill()
    node.event("took-over", volume=told_orphan["KVTIER_VOLUME_ID"])
    guarded, told_guarded, _ = host.run("chat", "sleep 600")
    _, told_other, _ = host.run("other", "sleep 600")
    done = host.json("erase", "chat", "--reason", "customer left", "--yes", "--wait")
    assert done["state"] == "Complete"
    assert {item["volume"] for item in done["receipts"]} == {
        told_orphan["KVTIER_VOLUME_ID"],
        told_guarded["KVTIER_VOLUME_ID"],
    }
    assert {item["trigger"] for item in done["receipts"]} == {"Request"}
    assert done["left"] == []
    assert has_ended(orphan_pid)
    assert guarded.popen.wait(60) != 0
    assert host.volume(told_other["KVTIER_VOLUME_ID"])["state"] == "InUse"
    assert host.json("status")["requests"] == []


def test_without_a_node_the_command_erases_what_nobody_guards(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, pid = host.run("chat", "sleep 600")
    process.sigkill()
    done = host.json("erase", "chat", "--reason", "TICKET-7", "--yes", "--wait")
    assert [item["volume"] for item in done["receipts"]] == [told["KVTIER_VOLUME_ID"]]
    wait_for(lambda: has_ended(pid), "the consumer's end")
    assert host.json("erase", "chat", "--reason", "again", "--yes", "--wait")["receipts"] == []


def test_without_wait_the_request_is_on_record_and_done_by_the_guardian(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, _ = host.run("chat", "sleep 600")
    assert host.json("erase", "chat", "--reason", "x", "--yes")["request"].startswith("kvq-")
    assert process.popen.wait(60) != 0
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"


def test_a_request_does_not_end_a_volume_that_was_made_after_it(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    _, told, _ = host.run("chat", 'exec 3<>"$KVTIER_SLOT_PREFIX.rank_0"; sleep 600 & echo $! > $NOTE/child; wait')
    [note] = [path / "child" for path in host.base.glob("notes-*")]
    child = int(wait_for(lambda: note.exists() and note.read_text(), "the child, which has the slot file too"))
    host.pids.append(child)
    host.kvtier("erase", "chat", "--reason", "x", "--yes")
    later, told_later, _ = host.run("chat", "sleep 600")
    # What the first command forked still holds its slot file: the request stays open, and the later volume stays in use.
    assert len(host.json("status")["requests"]) == 1
    os.kill(child, signal.SIGKILL)
    host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")
    wait_for(lambda: not host.json("status")["requests"], "the end of the request")
    assert host.volume(told_later["KVTIER_VOLUME_ID"])["state"] == "InUse"
    assert later.popen.poll() is None


@pytest.mark.parametrize(
    ("options", "remedy"),
    [(("--tenant", "ab12"), "SlotStore.erase(tenant)"), (("--older-than", "1h"), "retention.maxAge")],
)
def test_what_only_the_engine_can_erase_is_refused_with_what_to_do(
    host: Host, options: tuple[str, str], remedy: str
) -> None:
    done = host.kvtier("erase", "chat", "--reason", "x", "--yes", *options)
    assert done.returncode == 2
    assert remedy in done.stderr


def test_nothing_is_erased_without_a_confirmation(host: Host) -> None:
    host.declare("chat", **SEALED)
    _, told, _ = host.run("chat", "sleep 600")
    done = host.kvtier("erase", "chat", "--reason", "x")
    assert (done.returncode, "--yes" in done.stderr) == (2, True)
    for typed, code in (("chatt", 2), ("chat", 0)):
        assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"
        assert on_a_terminal(host, ["erase", "chat", "--reason", "x", "--wait"], typed) == code
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"


def on_a_terminal(host: Host, arguments: list[str], typed: str) -> int:
    from standalone import KVTIER

    controller, terminal = os.openpty()
    try:
        os.write(controller, f"{typed}\n".encode())
        done = subprocess.run(
            [*KVTIER, *arguments], env=host.env, stdin=terminal, capture_output=True, timeout=60, check=False
        )
    finally:
        os.close(controller)
        os.close(terminal)
    return done.returncode


@pytest.fixture
def blocked(host: Host) -> Iterator[tuple[Host, str, subprocess.Popen[bytes]]]:
    """A volume whose consumer is dead, and whose key the kernel keeps: a stranger's working directory is inside."""
    need_root()
    host.declare("chat", encryption={"backend": "Fscrypt"}, scrub={"deadline": "1s"})
    node = host.node()
    process, told, pid = host.run("chat", "mkdir $KVTIER_SLOT_DIR/in; sleep 600")
    process.sigkill()
    node.event("took-over")
    inside = Path(told["KVTIER_SLOT_DIR"]) / "in"
    wait_for(inside.exists, "the directory")
    stranger = subprocess.Popen(["sleep", "600"], cwd=inside)
    try:
        os.kill(pid, signal.SIGKILL)
        yield host, told["KVTIER_VOLUME_ID"], stranger
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.root
def test_a_missed_deadline_is_a_condition_a_metric_and_on_the_receipt(
    blocked: tuple[Host, str, subprocess.Popen[bytes]],
) -> None:
    host, volume, stranger = blocked
    said = host.wait_condition("chat", "Scrubbed", "False", "DeadlineMissed")
    assert volume in said["message"]
    host.wait_state(volume, "Erasing")
    assert any(item["reason"] == "DeadlineMissed" for item in host.json("status")["events"])
    stranger.kill()
    stranger.wait()
    host.wait_state(volume, "Erased")
    assert host.receipts()[-1]["deadline_met"] is False
    said = host.wait_condition("chat", "Scrubbed", "True", "NothingLeft")
    assert host.receipts()[-1]["id"] in said["message"], "it is erased, and it was late"


@pytest.mark.root
def test_a_volume_that_the_node_cannot_erase_is_abandoned_on_an_administrators_word(
    blocked: tuple[Host, str, subprocess.Popen[bytes]],
) -> None:
    host, volume, _ = blocked
    host.wait_condition("chat", "Scrubbed", "False", "DeadlineMissed")
    done = host.json("erase", "chat", "--abandon", volume, "--reason", "disk destroyed", "--yes")
    assert done["state"] == "Abandoned"
    assert host.volume(volume)["state"] == "Abandoned"
    receipt = host.receipts()[-1]
    assert (receipt["technique"], receipt["id"]) == ("Nothing", done["receipt"])
    host.wait_condition("chat", "Scrubbed", "False", "Abandoned")


def test_a_volume_in_use_is_not_abandoned(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, _ = host.run("chat", "sleep 600")
    volume = told["KVTIER_VOLUME_ID"]
    abandon = ("erase", "chat", "--abandon", volume, "--reason", "x", "--yes")
    done = host.kvtier(*abandon)  # its kvtier run guards it
    assert done.returncode == 9
    process.sigkill()
    done = host.kvtier(*abandon)
    assert (done.returncode, "in use" in done.stderr) == (9, True)
    assert host.volume(volume)["state"] == "InUse"
