"""A container that is started anew in its pod finds nothing of the old one, whatever engine it runs.

The "containers" are processes with a mount namespace of their own, in a cgroup that is called like the pod's: what the kernel shows
of a container, without a runtime.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from csi_agent import CANARY, Kubelet, Pod, waits_in_open
from kvtier_api.volume import VolumeState

pytestmark = pytest.mark.root

ENGINE = """
import os, sys, time
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
os.execvp("unshare", ["unshare", "-m", "--propagation", "private", sys.executable, "-c", '''
import os, sys, time
slots, canary = sys.argv[1], sys.argv[2].encode()
found = 0
for folder, _, names in os.walk(slots):
    for name in names:
        with open(folder + "/" + name, "rb") as file:
            found += file.read().count(canary)
fd = os.open(slots + "/slot.rank_0", os.O_RDWR)
os.pwrite(fd, canary * 2000, 0); os.fsync(fd)
os.makedirs(slots + "/cache", exist_ok=True)
with open(slots + "/cache/chunk", "wb") as file:
    file.write(canary)
os.close(fd)
print("found", found, flush=True)
sys.stdin.read()
''', sys.argv[2], sys.argv[3]])
"""


def start(kubelet: Kubelet, pod: Pod, procs: Path) -> subprocess.Popen[bytes]:
    slots = str(kubelet.target(pod) / "slots")
    return subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(procs), slots, CANARY.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def found_by(process: subprocess.Popen[bytes]) -> int:
    """How often it found the text of those before it. It has written its own by then."""
    assert process.stdout is not None
    word, count = process.stdout.readline().split()
    assert word == b"found"
    return int(count)


def container(kubelet: Kubelet, pod: Pod, procs: Path) -> subprocess.Popen[bytes]:
    process = start(kubelet, pod, procs)
    found_by(process)
    return process


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def waits(process: subprocess.Popen[bytes]) -> bool:
    try:
        return waits_in_open(Path(f"/proc/{process.pid}"))
    except OSError:
        return False


def emptied(kubelet: Kubelet, pod: Pod) -> int:
    return int(kubelet.row_of(pod).facts.get("between_containers", 0))


def test_what_a_dead_container_left_is_gone_before_the_next_one(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    slot = serving.target(pod) / "slots" / "slot.rank_0"
    first = container(serving, pod, cgroup(pod))
    serving.wait("it is seen", lambda: _seen(serving, first))
    end(first)
    serving.wait("its slots are empty", lambda: emptied(serving, pod) == 1)
    assert slot.read_bytes() == bytes(1 << 20)
    assert (slot.stat().st_uid, slot.stat().st_mode & 0o777, slot.stat().st_blocks * 512 >= 1 << 20) == (
        1000,
        0o600,
        True,
    )
    assert not (slot.parent / "cache" / "chunk").exists()
    assert serving.row_of(pod).state is VolumeState.IN_USE
    second = container(serving, pod, cgroup(pod))
    try:
        assert slot.read_bytes().startswith(CANARY), "the next one works with it"
        serving.wait("it is seen", lambda: _seen(serving, second))
    finally:
        end(second)
    serving.wait("again", lambda: emptied(serving, pod) == 2)
    serving.unpublish(pod)


def _seen(kubelet: Kubelet, process: subprocess.Popen[bytes]) -> bool:
    """The agent holds a pidfd of it."""
    assert kubelet.process is not None
    folder = Path(f"/proc/{kubelet.process.pid}/fdinfo")
    for path in folder.iterdir():
        try:
            if f"\nPid:\t{process.pid}\n" in path.read_text():
                return True
        except FileNotFoundError:
            continue
    return False


def test_nothing_is_emptied_while_another_container_of_the_pod_has_the_volume(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    one, other = container(serving, pod, cgroup(pod)), container(serving, pod, cgroup(pod))
    try:
        serving.wait("they are seen", lambda: _seen(serving, one) and _seen(serving, other))
        end(one)

        time.sleep(3)
        assert emptied(serving, pod) == 0
        assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)
    finally:
        end(other)
    serving.wait("then it is", lambda: emptied(serving, pod) == 1)


def test_a_pod_of_which_no_process_can_be_seen_keeps_what_it_wrote(
    serving: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """In a virtual machine, or without the host's PID namespace: to see nobody is no proof."""

    pod = new_pod()
    serving.publish(pod)
    serving.write_canary(pod)
    time.sleep(7)
    assert emptied(serving, pod) == 0
    assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)


def test_a_container_that_starts_at_once_reads_nothing_of_the_old_one(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    """However soon the old one died after its first write, and however soon the next one opens a file."""
    pod = new_pod()
    serving.publish(pod)
    procs = cgroup(pod)
    found = []
    for _ in range(8):
        process = start(serving, pod, procs)
        found.append(found_by(process))
        end(process)
    assert found == [0] * 8


def test_the_second_container_is_held_back_however_late_the_first_look_comes(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    """The gate is there before kubelet has its answer."""
    pod = new_pod()
    (serving.cluster / "late").touch()
    serving.publish(pod)
    procs = cgroup(pod)
    first = start(serving, pod, procs)
    assert found_by(first) == 0
    end(first)
    second = start(serving, pod, procs)
    try:
        serving.wait("it waits", lambda: waits(second))
        (serving.cluster / "late").unlink()
        assert found_by(second) == 0
    finally:
        end(second)


def test_a_container_beside_another_one_finds_what_that_one_wrote(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    one = start(serving, pod, cgroup(pod))
    assert found_by(one) == 0
    other = start(serving, pod, cgroup(pod))
    try:
        assert found_by(other) > 0, "they share the volume"
    finally:
        end(one, other)


def test_a_new_container_waits_while_the_agent_stands_still(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    procs = cgroup(pod)
    end(container(serving, pod, procs))
    assert serving.process is not None
    serving.process.send_signal(signal.SIGSTOP)
    killed, second = start(serving, pod, procs), start(serving, pod, procs)
    try:
        serving.wait("they wait", lambda: waits(killed) and waits(second))
        end(killed)
        assert second.poll() is None
        serving.process.send_signal(signal.SIGCONT)
        assert found_by(second) == 0
    finally:
        serving.process.send_signal(signal.SIGCONT)
        end(killed, second)


def test_who_sets_the_times_of_its_files_back_leaves_nothing_either(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    """Nor who wrote within the kernel's tick: a file's time is no proof that nothing was written."""
    pod = new_pod()
    serving.publish(pod)
    slot, chunk = (serving.target(pod) / "slots" / name for name in ("slot.rank_0", "cache/chunk"))
    before = slot.stat().st_mtime_ns
    first = container(serving, pod, cgroup(pod))
    chunk.unlink()
    os.utime(slot, ns=(before, before))
    end(first)
    second = start(serving, pod, cgroup(pod))
    try:
        assert found_by(second) == 0
    finally:
        end(second)


def test_what_cannot_be_emptied_is_not_read(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    procs = cgroup(pod)
    first = container(serving, pod, procs)
    slot = serving.target(pod) / "slots" / "slot.rank_0"
    subprocess.run(["chattr", "+i", str(slot)], check=True)
    end(first)
    second = start(serving, pod, procs)
    try:
        serving.wait("the failure is told", lambda: "cannot-erase-yet" in (serving.base / "agent.log").read_text())
        serving.wait("it waits", lambda: waits(second))
        subprocess.run(["chattr", "-i", str(slot)], check=True)
        assert found_by(second) == 0
    finally:
        end(second)


def test_what_a_container_left_before_the_agent_died_is_not_read_by_the_one_after(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    pod = new_pod()
    serving.publish(pod)
    procs = cgroup(pod)
    first = container(serving, pod, procs)
    serving.stop_agent(signal.SIGKILL)
    end(first)
    serving.start_agent()
    serving.wait("the gate is there", lambda: _holds_back(serving))
    second = start(serving, pod, procs)
    try:
        assert found_by(second) == 0
    finally:
        end(second)


def _holds_back(kubelet: Kubelet) -> bool:
    """The agent has a mark on a file system: from then on the kernel asks."""
    assert kubelet.process is not None
    for path in Path(f"/proc/{kubelet.process.pid}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it opens and closes others meanwhile
            if "\nfanotify sdev:" in path.read_text():
                return True
    return False


def test_those_who_wait_go_on_when_the_agent_ends(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> None:
    """No agent, no gate: an engine must not hang for ever because of it."""
    pod = new_pod()
    serving.publish(pod)
    procs = cgroup(pod)
    end(container(serving, pod, procs))
    assert serving.process is not None
    serving.process.send_signal(signal.SIGSTOP)
    second = start(serving, pod, procs)
    try:
        serving.wait("it waits", lambda: waits(second))
        serving.stop_agent(signal.SIGKILL)
        found_by(second)
    finally:
        end(second)
    serving.start_agent()
