"""A consumer's end is seen by what the kernel says of it, whatever way it ends; one that lives is never taken for dead."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.volume import VolumeState
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.guarding import LOOK_S, look
from kvtier_node.live import LiveVolume
from kvtier_node.provisioning import start
from kvtier_node.receipts import Receipt
from kvtier_node.recovery import evidence
from leftovers import remove_cgroup
from node_host import CANARY, Consumer, Host, eventually
from requirements import missing, need_tool

pytestmark = pytest.mark.root


def watch(host: Host, live: LiveVolume) -> Receipt:
    """What a guardian does: look at its pace, until there is a receipt."""

    def once() -> Receipt | None:
        receipt = look(host.node, live).receipt
        if receipt is None:
            time.sleep(LOOK_S)
        return receipt

    receipt: Receipt = eventually("the end of the consumer is seen", once)
    return receipt


@pytest.fixture
def used(host: Host) -> tuple[LiveVolume, Consumer]:
    live, consumer = host.in_use(host.tier("SealOnly"))
    assert look(host.node, live).in_use
    return live, consumer


def test_clean_exit(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    consumer.end()
    assert watch(host, live).volume_id == live.volume_id


def test_sigkill(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    consumer.kill()
    assert watch(host, live).trigger is Trigger.CRASH


def test_a_zombie_that_nobody_waits_for_has_ended(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    os.kill(consumer.pid, signal.SIGKILL)
    eventually("a zombie", lambda: " Z " in Path(f"/proc/{consumer.pid}/stat").read_text())
    assert watch(host, live)


def test_two_looks_a_second_at_least() -> None:
    """With `LOOK_S` between two looks an end is seen within a second, four times over."""
    assert LOOK_S <= 0.25


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory limit of its own: cgroup v2 where it has the memory controller, else v1."""
    for base, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        group = Path(base, f"kvtier-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        if not (group / limit).exists():  # no controller here, or a plain directory that only holds the hierarchies
            group.rmdir()
            continue
        (group / limit).write_text(str(64 << 20))
        yield group
        eventually("the group is empty", lambda group=group: not (group / "cgroup.procs").read_text())
        remove_cgroup(group)
        return
    missing("a cgroup with the memory controller")


def test_oom_kill(host: Host, used: tuple[LiveVolume, Consumer], small_cgroup: Path) -> None:
    live, consumer = used
    (small_cgroup / "cgroup.procs").write_text(str(consumer.pid))
    assert consumer.process.stdin is not None
    consumer.process.stdin.write('"keep[0] = bytearray(os.urandom(512 << 20))"\n')
    consumer.process.stdin.flush()
    assert consumer.process.wait(60) == -signal.SIGKILL
    assert watch(host, live).trigger is Trigger.CRASH


def has_open(pid: int, path: str) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it opens and closes others meanwhile
        return False


def test_a_killed_child_alone_ends_nothing_and_a_forked_child_that_holds_a_file_counts_as_alive(
    host: Host, used: tuple[LiveVolume, Consumer]
) -> None:
    live, consumer = used
    fork = """
        answer = os.fork()
        if answer == 0:
            fd = os.open(f"{slots}/slot.rank_0", os.O_RDWR)
            while True:
                time.sleep(60)
    """
    first, second = int(consumer.do(fork)), int(consumer.do(fork))
    eventually("both have it", lambda: all(has_open(pid, f"{live.slots_path}/slot.rank_0") for pid in (first, second)))
    assert live.watch is not None and live.watch.holders() == 1, "one file"
    os.kill(first, signal.SIGKILL)
    assert look(host.node, live).in_use, "the consumer itself lives"
    consumer.kill()
    seen = look(host.node, live)
    assert seen.in_use and "open or mapped" in seen.why, "its child has a slot file"
    os.kill(second, signal.SIGKILL)
    assert watch(host, live)


def test_a_file_that_is_only_mapped_counts_as_in_use(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    child = int(
        consumer.do("""
            answer = os.fork()
            if answer == 0:
                map_alone(f"{slots}/slot.rank_1", 4096)
                open(f"{slots}/mapped", "w").close()
                while True:
                    time.sleep(60)
        """)
    )
    eventually("mapped", lambda: os.path.exists(f"{live.slots_path}/mapped"))
    consumer.kill()
    assert "slots/slot.rank_1" not in " ".join(
        os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")
    )
    assert look(host.node, live).in_use
    os.kill(child, signal.SIGKILL)
    assert watch(host, live)


def test_a_child_in_another_pid_and_mount_namespace_counts_as_alive(
    host: Host, used: tuple[LiveVolume, Consumer]
) -> None:
    live, consumer = used
    need_tool("unshare")
    inner = host.popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", sys.executable, "-c",
         "import os, sys, time; fd = os.open(sys.argv[1], os.O_RDWR); print(os.getpid(), flush=True); time.sleep(300)",
         f"{live.slots_path}/slot.rank_0"],
        stdout=-1, text=True,
    )  # fmt: skip
    assert inner.stdout is not None
    assert inner.stdout.readline().strip() == "1", "a PID namespace of its own"
    consumer.kill()
    assert look(host.node, live).in_use
    inner.kill()
    assert watch(host, live)


def test_a_consumer_in_another_pid_namespace(host: Host) -> None:
    """Known by its number out here, as for a container."""
    live = host.provision(host.tier("SealOnly"))
    outer = host.consumer(live, prefix=("unshare", "--mount-proc", "--pid", "--fork", "--kill-child"))
    assert outer.do("answer = os.getpid()") == "1"
    [inner] = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
    start(host.node, live, ProcessConsumer.of(int(inner)))
    assert look(host.node, live).in_use
    os.kill(int(inner), signal.SIGKILL)
    assert watch(host, live)


def test_a_number_that_another_process_has_by_now_is_not_the_consumer(host: Host) -> None:
    live = host.provision(host.tier("SealOnly"))
    mine = ProcessConsumer.of(os.getpid())
    start(host.node, live, ProcessConsumer(mine.pid, mine.start_time - 1, mine.boot_id))
    assert not evidence(live).alive
    assert watch(host, live)


def test_the_same_number_in_another_boot_is_not_the_consumer() -> None:
    mine = ProcessConsumer.of(os.getpid())
    assert mine.alive()
    assert not ProcessConsumer(mine.pid, mine.start_time, "00000000-0000-0000-0000-000000000000").alive()


def test_a_death_while_the_agent_was_down_is_seen_at_its_start(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    host.drop_guardians()
    consumer.kill()
    host.reopen()
    [receipt] = host.recover().erased
    assert (receipt.volume_id, receipt.trigger) == (live.volume_id, Trigger.CRASH)
    assert receipt.deadline_met is None, "nobody saw when it died: nothing is claimed of the deadline"
    host.assert_nothing_left(live)


def test_a_life_that_outlasts_the_agent_is_adopted_with_its_bytes(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    host.drop_guardians()
    host.reopen()
    [adopted] = host.recover().adopted
    assert adopted.volume_id == live.volume_id
    assert host.node.ledger.get(live.volume_id).state is VolumeState.IN_USE
    assert consumer.do("answer = os.read(os.open(f'{slots}/slot.rank_0', os.O_RDONLY), 64)") == repr(CANARY)
    consumer.kill()
    assert watch(host, adopted)
    host.assert_nothing_left(live)


def test_a_child_that_outlasts_consumer_and_agent_is_adopted(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    consumer = used[1]
    consumer.do("fd = os.open(f'{slots}/slot.rank_0', os.O_RDWR)")
    child = int(consumer.do("answer = os.fork()\nif answer == 0:\n    time.sleep(300)"))
    consumer.kill()
    host.drop_guardians()
    host.reopen()
    [adopted] = host.recover().adopted
    assert look(host.node, adopted).in_use
    os.kill(child, signal.SIGKILL)
    assert watch(host, adopted)


def test_modes_that_the_consumer_set_do_not_hide_that_it_lives(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    child = int(
        consumer.do("""
            answer = os.fork()
            if answer == 0:
                os.open(f"{slots}/slot.rank_0", os.O_RDWR)
                time.sleep(300)
        """)
    )
    eventually("it has it", lambda: live.watch is not None and live.watch.holders() == 1)
    os.chmod(live.slots_path, 0o777)
    consumer.kill()
    host.drop_guardians()
    host.reopen()
    [adopted] = host.recover().adopted
    os.kill(child, signal.SIGKILL)
    assert watch(host, adopted)
