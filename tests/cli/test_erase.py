"""`kvtier erase` where there is nothing of this state directory's to erase: what lies there all the same is named."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from standalone import KVTIER, Host, standalone_host

SEALED = {"encryption": {"backend": "SealOnly"}}
ERASE = ("erase", "chat", "--reason", "x", "--yes", "--wait")


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        it.declare("chat", **SEALED)
        yield it


@pytest.fixture
def elsewhere(host: Host) -> str:
    """Another state directory that was used, with a volume of its own of another tier, long erased."""
    host.declare("other", **SEALED)
    where = str(host.base / "elsewhere")
    assert host.kvtier("run", "--tier", "other", "--state-dir", where, "--", "true").returncode == 0
    return where


def test_a_wrong_state_directory_does_not_say_that_there_is_nothing_to_erase(host: Host, elsewhere: str) -> None:
    _, told, _ = host.run("chat", "sleep 600")
    volume = told["KVTIER_VOLUME_ID"]
    done = host.kvtier(*ERASE, "--state-dir", elsewhere)
    assert done.returncode == 6, done.stdout + done.stderr
    assert "nothing to erase" not in done.stdout
    assert volume in done.stderr
    assert f"object: {host.root}/chat\n  remedy: give its --state-dir" in done.stderr
    assert Path(told["KVTIER_SLOT_DIR"]).exists()
    assert host.volume(volume)["state"] == "InUse"

    assert host.kvtier(*ERASE).returncode == 0  # with the right one
    assert not Path(told["KVTIER_SLOT_DIR"]).exists()
    assert "nothing to erase" in host.kvtier(*ERASE, "--state-dir", elsewhere).stdout


def test_a_volume_of_another_state_directory_is_not_called_something_to_move_away(host: Host, elsewhere: str) -> None:
    _, told, _ = host.run("chat", "sleep 600")
    done = host.kvtier("run", "--tier", "chat", "--state-dir", elsewhere, "--", "true")
    assert done.returncode == 6
    assert "made with another state directory or node key" in done.stderr
    assert told["KVTIER_VOLUME_ID"] in done.stderr
    assert "give its --state-dir" in done.stderr
    assert "move it away" not in done.stderr


def test_beside_such_a_volume_what_kvtier_did_not_make_is_still_to_be_moved_away(host: Host, elsewhere: str) -> None:
    host.run("chat", "sleep 600")
    (host.root / "chat" / "notes.txt").write_text("somebody's")
    (host.root / "chat" / f"kvv-{'0' * 20}").mkdir()  # called like a volume, and no more
    done = host.kvtier("run", "--tier", "chat", "--state-dir", elsewhere, "--", "true")
    assert done.returncode == 6
    cause, remedy = done.stderr.split("\n")[0], done.stderr.split("remedy: ")[1]
    assert f"did not make: 'kvv-{'0' * 20}', 'notes.txt'; and volumes that were made with another" in cause
    assert "of the volumes: give its --state-dir; of the rest: move it away" in remedy


def test_nothing_to_erase_is_said_at_once_and_nobody_is_asked(host: Host) -> None:
    assert host.kvtier("run", "--tier", "chat", "--", "true").returncode == 0
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [*KVTIER, "erase", "chat", "--reason", "x"], env=host.env, stdin=theirs, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(ours)
        os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "nothing to erase: default/chat has no volume\n"
    assert host.json("status")["requests"] == []
