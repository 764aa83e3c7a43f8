"""`kvtier run`, the fence around one process: what the command is told, whose exit code comes back, where signals go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtier_api.errors import UsageError
from kvtier_api.marker import check_marker
from kvtier_api.volume import VolumeState
from kvtier_node.run import run_fenced
from node_host import Host, eventually

pytestmark = pytest.mark.root

RUN = """
import json, os, sys
from kvtier_api.documents import load_documents
from kvtier_node.recovery import open_node, recover
from kvtier_node.run import run_fenced
node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
recover(node)
result = run_fenced(node, load_documents(sys.argv[3])[0], sys.argv[4:], say=lambda text: print(text, file=sys.stderr, flush=True))
print(json.dumps({
    "code": result.exit_code, "trigger": result.receipt and result.receipt.trigger, "error": result.error and str(result.error),
}))
"""


FORKED = (
    "(exec 3<> $KVTIER_SLOT_DIR/slot.rank_0; touch {0}.open; while [ ! -e {0} ]; do sleep 0.1; done) >/dev/null 2>&1 &"
    " while [ ! -e {0}.open ]; do sleep 0.1; done; exit 5"
)
"""A command that ends and leaves a child with a slot file, which ends when the file {0} is there."""


def begin(host: Host, command: list[str], backend: str = "SealOnly") -> subprocess.Popen[str]:
    manifest = host.tier(backend).model_dump_json(by_alias=True, exclude_none=True)
    return host.popen(
        [sys.executable, "-c", RUN, host.state, str(host.root), manifest, *command], stdout=-1, stderr=-1, text=True
    )


def end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    answer: dict[str, Any] = json.loads(out)
    return answer, err


@pytest.mark.parametrize(
    ("command", "code", "trigger"),
    [
        ("exit 0", 0, "Exit"),
        ("exit 42", 42, "Exit"),
        ("kill -9 $$", 137, "Crash"),
        ("kill -SEGV $$", 139, "Crash"),
    ],
)
def test_the_commands_own_exit_code_comes_back(host: Host, command: str, code: int, trigger: str) -> None:
    result = run_fenced(host.node, host.tier("SealOnly"), ["sh", "-c", command])
    assert result.receipt is not None
    assert (result.exit_code, result.receipt.trigger) == (code, trigger)
    host.assert_nothing_left()


@pytest.mark.parametrize(("command", "code"), [(["/no/such/program"], 127), (["/etc/passwd"], 126)])
def test_a_command_that_cannot_start_leaves_an_erased_volume(
    host: Host, command: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run_fenced(host.node, host.tier("SealOnly"), command)
    assert result.exit_code == code and result.receipt is not None
    assert command[0] in capfd.readouterr().err
    host.assert_nothing_left()


def test_the_command_is_told_its_paths_and_the_marker_agrees(host: Host) -> None:
    told = host.base / "told"
    env = {"PATH": os.environ["PATH"], "LOCAL_RANK": "1", "KEPT": "yes"}
    result = run_fenced(
        host.node,
        host.tier("Fscrypt"),
        [
            "sh",
            "-c",
            f'env > {told}; cat "$KVTIER_MARKER" > {told}.marker; stat -c "%U %a" "$KVTIER_SLOT_FILE" >> {told}',
        ],
        rank_env="LOCAL_RANK",
        env=env,
        on_started=lambda live, pid: check_marker(live.marker_path, nonce=str(live.row.facts["nonce"])) and None,
    )
    assert result.exit_code == 0
    lines = told.read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if "=" in line)
    assert seen["KEPT"] == "yes" and lines[-1] == "root 600"
    assert seen["KVTIER_VOLUME_ID"] == result.volume_id and seen["KVTIER_TIER"] == "default/demo"
    assert (
        seen["KVTIER_SLOT_FILE"] == f"{seen['KVTIER_SLOT_PREFIX']}.rank_1" == f"{seen['KVTIER_SLOT_DIR']}/slot.rank_1"
    )
    marker = json.loads(Path(f"{told}.marker").read_text())
    assert marker["nonce"] == seen["KVTIER_NONCE"] and marker["volume_id"] == result.volume_id
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(seen)


@pytest.mark.parametrize("rank", ["2", "-1", "one", None])
def test_a_rank_that_is_none_is_refused_before_anything_is_made(host: Host, rank: str | None) -> None:
    env = {} if rank is None else {"RANK": rank}
    with pytest.raises(UsageError, match="RANK"):
        run_fenced(host.node, host.tier("SealOnly"), ["true"], rank_env="RANK", env=env)
    assert host.node.ledger.volumes() == []


def test_the_command_runs_as_its_own_user_and_owns_its_files(host: Host) -> None:
    out = host.base / "out"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    result = run_fenced(
        host.node,
        host.tier("SealOnly"),
        ["sh", "-c", f"id -u > {out}/id; id -G >> {out}/id; head -c 4096 /dev/urandom > $KVTIER_SLOT_DIR/slot.rank_0"],
        uid=4321, gid=4322,
    )  # fmt: skip
    assert result.exit_code == 0
    assert (out / "id").read_text() == "4321\n4322\n"


def test_no_descriptor_of_the_agents_reaches_the_command(host: Host) -> None:
    told = host.base / "fds"
    run_fenced(host.node, host.tier("SealOnly"), ["sh", "-c", f"ls -l /proc/self/fd > {told}"])
    for line in told.read_text().splitlines():
        assert host.state not in line and "volume.img" not in line and "slot.rank" not in line, line


def test_sigterm_reaches_the_command_and_the_erasure_follows(host: Host) -> None:
    process = begin(host, ["sh", "-c", "trap 'exit 9' TERM; echo ready >&2; while :; do sleep 0.1; done"])
    assert process.stderr is not None
    eventually("ready", lambda: process.stderr.readline().strip() == "ready" if process.stderr else None)
    process.send_signal(signal.SIGTERM)
    answer, _ = end(process)
    assert answer == {"code": 9, "trigger": "Exit", "error": None}
    host.assert_nothing_left()


def test_a_forked_child_that_holds_a_slot_file_keeps_the_volume_until_it_ends(host: Host) -> None:
    mark = host.base / "child-ends"
    process = begin(
        host,
        ["sh", "-c", FORKED.format(mark)],
    )
    [row] = eventually("in use", lambda: [row for row in host.node.ledger.volumes() if row.state is VolumeState.IN_USE])
    pid = row.consumer["pid"] if row.consumer else 0
    eventually("the command has ended", lambda: not Path(f"/proc/{pid}").exists())
    for _ in range(5):
        assert process.poll() is None
        assert host.node.ledger.get(row.volume_id).state is VolumeState.IN_USE
    mark.touch()
    answer, _ = end(process)
    assert answer["code"] == 5 and answer["trigger"] == "Exit"
    host.assert_nothing_left()


def test_a_signal_after_the_commands_end_ends_the_waiting_and_leaves_the_volume_on_record(host: Host) -> None:
    """An erasure that cannot be done must not hold a terminal for ever; nothing is claimed, and the next start goes on."""
    mark = host.base / "child-ends"
    process = begin(
        host,
        ["sh", "-c", FORKED.format(mark)],
        backend="Fscrypt",
    )
    [row] = eventually("in use", lambda: [row for row in host.node.ledger.volumes() if row.state is VolumeState.IN_USE])
    pid = row.consumer["pid"] if row.consumer else 0
    eventually("the command has ended", lambda: not Path(f"/proc/{pid}").exists())
    process.send_signal(signal.SIGTERM)
    answer, told = end(process)
    assert answer["code"] == 5 and answer["trigger"] is None and "open or mapped" in answer["error"]
    assert "stays on record" in told
    [adopted] = host.recover().adopted
    assert adopted.volume_id == row.volume_id
    mark.touch()
    eventually("let go", lambda: adopted.watch is not None and adopted.watch.holders() == 0)
    host.drop_guardians()
    assert len(host.recover().erased) == 1
    host.assert_nothing_left()


def test_a_request_ends_the_command_and_erases(host: Host) -> None:
    process = begin(host, ["sleep", "300"])
    [row] = eventually("in use", lambda: [row for row in host.node.ledger.volumes() if row.state is VolumeState.IN_USE])
    host.node.ledger.add_request("default/demo", "All", "the prompt was a secret")
    answer, _ = end(process)
    assert answer == {"code": 143, "trigger": "Request", "error": None}
    assert host.node.ledger.open_requests() == []
    assert host.node.ledger.get(row.volume_id).state is VolumeState.ERASED


def test_a_killed_run_leaves_a_volume_that_the_next_start_adopts_or_erases(host: Host) -> None:
    mark = host.base / "started"
    process = begin(host, ["sh", "-c", f"touch {mark}; exec sleep 300 >/dev/null 2>&1"])
    eventually("started", mark.exists)
    [row] = [row for row in host.node.ledger.volumes() if row.state is VolumeState.IN_USE]
    process.kill()
    process.communicate()
    [adopted] = host.recover().adopted
    assert adopted.volume_id == row.volume_id
    assert row.consumer is not None
    os.kill(row.consumer["pid"], signal.SIGKILL)
    eventually("ended", lambda: not Path(f"/proc/{row.consumer['pid']}").exists() if row.consumer else None)
    host.drop_guardians()
    assert [receipt.trigger for receipt in host.recover().erased] == ["Crash"]
    host.assert_nothing_left()


def test_a_volume_that_fails_its_check_is_never_entered(host: Host) -> None:
    """The marker is changed before the gate opens: the command does not start, the volume is erased."""
    mark = host.base / "ran"

    def spoil(transition: Any) -> None:
        if transition.after == "Ready":
            place = host.node.ledger.get(transition.volume_id).place
            path = Path(place, "mnt", ".kvtier-marker.json")
            path.chmod(0o644)
            path.write_text("{}")

    host.reopen((spoil,))
    with pytest.raises(Exception, match="marker"):
        run_fenced(host.node, host.tier("SealOnly"), ["touch", str(mark)])
    assert not mark.exists()
    host.assert_nothing_left()
    [row] = host.node.ledger.volumes()
    assert row.state is VolumeState.ERASED


def test_outside_the_main_thread_nothing_hangs_and_nothing_is_left(host: Host) -> None:
    """Signals can be taken in the main thread only. The refusal must not leave a launcher waiting at its gate."""
    import threading

    caught: list[BaseException] = []

    def run() -> None:
        try:
            run_fenced(host.node, host.tier("SealOnly"), ["true"])
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert [type(error) for error in caught] == [ValueError]
    host.assert_nothing_left()
