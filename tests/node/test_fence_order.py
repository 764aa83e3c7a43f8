"""Fence: nobody is given a volume before what was there is erased, and no consumer runs before it is on record."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvtier_api.volume import VolumeState
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.guarding import stop_consumer
from kvtier_node.provisioning import start
from node_host import CANARY, Host, eventually

pytestmark = pytest.mark.root


def launcher(host: Host, gate: int, command: list[str]) -> int:
    process = host.popen(
        [sys.executable, "-I", "-m", "kvtier_node.children.launch", str(gate), "0", "0", *command], pass_fds=[gate]
    )
    return process.pid


def test_the_command_waits_at_its_gate_and_becomes_the_process_that_is_on_record(host: Host) -> None:
    reader, gate = os.pipe()
    mark = host.base / "mark"
    pid = launcher(host, reader, ["sh", "-c", f"echo $$ > {mark}"])
    before = ProcessConsumer.of(pid)
    os.close(reader)
    eventually("at the gate", lambda: "pipe_read" in wait_channel(pid))
    assert not mark.exists()
    os.write(gate, b"g")
    eventually("ran", lambda: mark.exists() and mark.read_text())
    assert int(mark.read_text()) == pid
    assert before.pid == pid
    os.close(gate)


def wait_channel(pid: int) -> str:
    """Where in the kernel the process waits; by its system call where wchan is hidden."""
    channel = Path(f"/proc/{pid}/wchan").read_text()
    if channel not in ("", "0"):
        return channel
    return "pipe_read" if Path(f"/proc/{pid}/syscall").read_text().startswith("0 ") else ""


@pytest.mark.parametrize("what", ["guardian dies", "another byte"])
def test_without_its_guardians_word_the_command_never_starts(host: Host, what: str) -> None:
    reader, gate = os.pipe()
    mark = host.base / "mark"
    launcher(host, reader, ["touch", str(mark)])
    os.close(reader)
    if what == "another byte":
        os.write(gate, b"x")
    os.close(gate)
    assert host.processes[-1].wait(120) == 1
    assert not mark.exists()


def test_leftovers_of_a_dead_consumer_are_erased_before_the_next_volume_is_made(host: Host) -> None:
    """After a crash of agent and consumer, with recovery run as it must be: erased and on record before anything is served."""
    live, consumer = host.in_use(host.tier("SealOnly"))
    consumer.do(f"open(f'{{slots}}/slot.rank_0', 'r+b').write({CANARY!r})")
    consumer.kill()
    order: list[tuple[str, str]] = []
    host.reopen((lambda transition: order.append((transition.volume_id, transition.after)),))
    host.recover()
    second = host.provision(host.tier("SealOnly"))
    assert order.index((live.volume_id, "Erased")) < order.index((second.volume_id, "Planned"))
    assert not os.path.lexists(live.row.place)
    for name in os.listdir(second.slots_path):
        assert not any(Path(second.slots_path, name).read_bytes()), "slot files are zeros at first read"


def test_what_cannot_be_erased_is_never_part_of_what_the_next_consumer_gets(host: Host) -> None:
    tier = host.tier("Fscrypt")
    live, consumer = host.in_use(tier)
    host.write_canary(consumer, keep_open=True)
    host.drop_guardians()
    # The consumer is dead for kvtier (another boot's), and in truth holds a file: the key cannot go.
    row = host.node.ledger.note(live.volume_id, consumer=None)
    assert row.state is VolumeState.IN_USE
    host.reopen()
    host.node.ledger.advance(live.volume_id, VolumeState.DYING, reason="Crash")
    [(failed, error)] = host.recover().failed
    assert failed.volume_id == live.volume_id and "INCOMPLETELY_REMOVED" in str(error)
    second = host.provision(tier)
    assert second.row.place != live.row.place and second.row.key_id != live.row.key_id
    assert not any(Path(second.slots_path, "slot.rank_0").read_bytes())
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASING
    consumer.kill()
    host.drop_guardians()
    assert live.volume_id in [receipt.volume_id for receipt in host.recover().erased]


def test_two_runs_on_one_tier_at_once_have_two_volumes(host: Host) -> None:
    manifest = host.tier("Fscrypt").model_dump_json(by_alias=True, exclude_none=True)
    code = """
import sys
from kvtier_api.documents import load_documents
from kvtier_node.recovery import open_node, recover
from kvtier_node.run import run_fenced
node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
recover(node)
result = run_fenced(node, load_documents(sys.argv[3])[0], ["sh", "-c", sys.argv[4]])
assert result.receipt is not None, result.error
print(result.volume_id, result.exit_code, result.receipt.trigger)
"""
    shell = (
        f"echo secret > $KVTIER_SLOT_DIR/$$; mkdir -p {host.base}/runs; ls $KVTIER_SLOT_DIR > {host.base}/runs/$$;"
        f" while [ $(ls {host.base}/runs | wc -l) -lt 2 ]; do sleep 0.1; done; exit 7"
    )
    runs = [
        host.popen(
            [sys.executable, "-c", code, host.state, str(host.root), manifest, shell], stdout=-1, stderr=-1, text=True
        )
        for _ in range(2)
    ]
    answers = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], answers
    volumes = {answer[0].split()[0] for answer in answers}
    assert len(volumes) == 2
    assert all(answer[0].split()[1:] == ["7", "Exit"] for answer in answers)
    for seen in (host.base / "runs").iterdir():
        assert len(seen.read_text().split()) == 3, "two slot files and its own: nothing of the other run's"
    host.assert_nothing_left()
    assert {receipt.volume_id for receipt in host.node.ledger.receipts()} == volumes


def test_two_recoveries_at_once_erase_each_volume_once(host: Host) -> None:
    for number in range(3):
        _, consumer = host.in_use(host.tier("SealOnly", name=f"tier{number}"))
        consumer.kill()
    host.drop_guardians()
    code = """
import sys
from kvtier_node.recovery import open_node, recover
found = recover(open_node(sys.argv[1], [sys.argv[2]], name="node-a"))
assert found.failed == [], found.failed
print(len(found.erased))
"""
    runs = [
        host.popen([sys.executable, "-c", code, host.state, str(host.root)], stdout=-1, stderr=-1, text=True)
        for _ in range(3)
    ]
    answers = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], answers
    assert sum(int(answer[0]) for answer in answers) == 3
    assert len(host.node.ledger.receipts()) == 3
    assert {row.state for row in host.node.ledger.volumes()} == {VolumeState.ERASED}


def test_a_guardian_that_lives_is_left_to_its_volume(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    found = host.recover_elsewhere()
    assert found["elsewhere"] == [live.volume_id] and found["erased"] == []
    assert os.path.exists(live.marker_path)


def test_a_process_that_has_the_pid_of_the_consumer_by_now_is_not_signalled(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    innocent = host.popen(["sleep", "300"])
    found = ProcessConsumer.of(innocent.pid)
    start(host.node, live, ProcessConsumer(found.pid, found.start_time - 1, found.boot_id))
    stop_consumer(live, grace_s=0.1)
    assert innocent.poll() is None
