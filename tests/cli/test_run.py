"""`kvtier run` as a person meets it: real commands, real volumes, exit codes, what is left afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from requirements import need_root
from standalone import Host, has_ended, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}
FSCRYPT = {"encryption": {"backend": "Fscrypt"}}


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


@pytest.fixture
def user_host() -> Iterator[Host]:
    """As an ordinary user, whoever runs the tests."""
    with standalone_host(65534 if os.geteuid() == 0 else None) as it:
        yield it


def left_of(host: Host, tier: str) -> list[str]:
    return [str(path) for path in (host.root / tier).rglob("*")]


@pytest.mark.root
def test_the_commands_exit_code_comes_back_and_nothing_is_left_of_its_volume(host: Host) -> None:
    need_root()
    host.declare("chat", ranks=2, **FSCRYPT)
    done = host.kvtier(
        "run",
        "--tier",
        "chat",
        "--",
        "sh",
        "-c",
        'ls "$KVTIER_SLOT_DIR"; echo secret > "$KVTIER_SLOT_PREFIX.rank_0"; exit 7',
    )
    assert (done.returncode, done.stdout.split()) == (7, ["slot.rank_0", "slot.rank_1"]), done.stderr
    assert "erased kvv-" in done.stderr
    assert "KeyDestroyed" in done.stderr
    assert left_of(host, "chat") == []
    assert host.mounts() == []
    receipt = host.receipts()[0]
    assert (receipt["trigger"], receipt["backend"], receipt["deadline_met"]) == ("Exit", "Fscrypt", True)
    assert receipt["id"] in done.stderr


def test_without_root_a_sealing_tier_works_under_a_root_of_the_users_own(user_host: Host) -> None:
    user_host.declare("chat", **SEALED)
    done = user_host.kvtier("run", "--tier", "chat", "--", "sh", "-c", 'id -u; test -w "$KVTIER_SLOT_PREFIX.rank_0"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(65534 if os.geteuid() == 0 else os.geteuid())
    assert left_of(user_host, "chat") == []
    assert user_host.receipts()[0]["technique"] == "ProcessDeath"


def test_plaintext_that_was_on_the_disk_is_said_in_the_last_sentence(host: Host) -> None:
    host.declare("chat", **SEALED)
    words = 'yes "words of a user" | head -c 100000 > "$KVTIER_SLOT_PREFIX.rank_0"'
    done = host.kvtier("run", "--tier", "chat", "--", "sh", "-c", words)
    assert done.returncode == 0, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "erased kvv-" in last
    assert "plaintext was found in it, and overwritten: the engine did not seal: 25 blocks" in last
    done = host.kvtier("run", "--tier", "chat", "--", "true")
    assert "plaintext" not in done.stderr


def test_what_a_sigkill_of_run_and_command_left_is_erased_before_the_next_command_starts(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, pid = host.run("chat", "sleep 600")
    process.sigkill()
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_ended(pid), "the command's end")
    done = host.kvtier("run", "--tier", "chat", "--", "sh", "-c", f"test ! -e {told['KVTIER_SLOT_DIR']}")
    assert done.returncode == 0, done.stderr
    assert f"erased {told['KVTIER_VOLUME_ID']}, left by an earlier Crash" in done.stderr
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"


def test_a_volume_in_use_is_left_alone_by_the_next_run(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, _ = host.run("chat", "sleep 600")
    process.sigkill()
    assert host.kvtier("run", "--tier", "chat", "--", "true").returncode == 0
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"
    assert Path(told["KVTIER_MARKER"]).exists()


def test_sigterm_reaches_the_command_and_its_volume_is_erased(host: Host) -> None:
    host.declare("chat", **SEALED)
    process, told, _ = host.run("chat", "trap 'exit 5' TERM; touch $NOTE/trapped; while :; do sleep 0.1; done")
    notes = next(host.base.glob("notes-*"))
    wait_for(lambda: (notes / "trapped").exists(), "the trap")
    assert process.terminate() == 5
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "Erased"


def test_the_rank_comes_from_the_variable_and_names_the_slot_file(host: Host) -> None:
    host.declare("chat", ranks=3, **SEALED)
    command = ("run", "--tier", "chat", "--rank-env", "LOCAL_RANK", "--", "sh", "-c", 'basename "$KVTIER_SLOT_FILE"')
    done = host.kvtier(*command, env={"LOCAL_RANK": "2"})
    assert done.stdout.strip() == "slot.rank_2", done.stderr
    assert host.kvtier(*command, env={"LOCAL_RANK": "3"}).returncode == 2
    assert host.kvtier(*command).returncode == 2
    assert left_of(host, "chat") == []


def test_the_command_runs_as_the_user_who_owns_the_slots(host: Host) -> None:
    need_root()
    host.declare("chat", **SEALED)
    done = host.kvtier(
        "run",
        "--tier",
        "chat",
        "--user",
        "65534:65533",
        "--",
        "sh",
        "-c",
        'id -u; id -g; id -G; stat -c %u:%g:%a "$KVTIER_SLOT_PREFIX.rank_0"',
    )
    assert done.stdout.split() == ["65534", "65533", "65533", "65534:65533:600"], done.stderr


@pytest.mark.parametrize(
    ("user", "code"),
    [
        ("no-such-user-here", 2),
        ("0:no-such-group-here", 2),
        ("4294967295", 2),
        ("99999999999999999999", 2),
        ("-1", 2),
        ("", 2),
        ("0:", 2),
        (":0", 2),
        ("0:0:0", 2),
        ("²", 2),
    ],
)
def test_a_wrong_user_is_named_and_nothing_is_made(host: Host, user: str, code: int) -> None:
    host.declare("chat", **SEALED)
    done = host.kvtier("run", "--tier", "chat", f"--user={user}", "--", "true")
    assert done.returncode == code, done.stderr
    assert "--user" in done.stderr
    assert "Traceback" not in done.stderr
    assert not host.state.exists()


def test_only_root_can_run_a_command_as_another(user_host: Host) -> None:
    user_host.declare("chat", **SEALED)
    done = user_host.kvtier("run", "--tier", "chat", "--user", "0", "--", "true")
    assert done.returncode == 5
    assert "only root" in done.stderr


def test_a_tier_of_a_file_needs_no_manifest_directory(host: Host) -> None:
    path = host.declare("chat", **SEALED)
    elsewhere = host.base / "one.yaml"
    path.rename(elsewhere)
    done = host.kvtier(
        "run", "--tier-file", str(elsewhere), "--manifests", "/nonexistent", "--", "sh", "-c", "echo $KVTIER_TIER"
    )
    assert done.stdout.strip() == "default/chat", done.stderr


def test_success_with_an_erasure_that_is_not_complete_is_exit_code_11() -> None:
    from kvtier_api.errors import EraseIncomplete
    from kvtier_cli.run import _conclude
    from kvtier_node.run import RunResult

    error = EraseIncomplete("a file is open")
    assert _conclude(RunResult(0, None, error, "kvv-0")) == 11
    assert _conclude(RunResult(3, None, error, "kvv-0")) == 3
