"""A container that is started anew in its pod finds nothing of the old one, whatever engine it runs.

The "containers" are processes with a mount namespace of their own, in a cgroup that is called like the pod's: what the kernel shows
of a container, without a runtime.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi_agent import CANARY, Kubelet, Pod
from kvtier_api.volume import VolumeState
from requirements import missing

pytestmark = pytest.mark.root

ENGINE = """
import os, sys, time
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
os.execvp("unshare", ["unshare", "-m", "--propagation", "private", sys.executable, "-c", '''
import os, sys, time
slots = sys.argv[1]
fd = os.open(slots + "/slot.rank_0", os.O_RDWR)
os.pwrite(fd, sys.argv[2].encode() * 2000, 0); os.fsync(fd)
os.makedirs(slots + "/cache", exist_ok=True)
with open(slots + "/cache/chunk", "wb") as file:
    file.write(sys.argv[2].encode())
os.close(fd)
print("written", flush=True)
sys.stdin.read()
''', sys.argv[2], sys.argv[3]])
"""


@pytest.fixture
def cgroup() -> Iterator[Callable[[Pod], Path]]:
    """Makes a pod's cgroup; the file that takes process ids."""
    top = next(
        (path for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if (path / "cgroup.procs").exists()),
        None,
    )
    if top is None:
        missing("a cgroup file system that can be written")
    base = top / f"kvt-test-{secrets.token_hex(4)}"
    made: list[Path] = []

    def make(pod: Pod) -> Path:
        path = base / f"pod{pod.uid}" / secrets.token_hex(4)
        path.mkdir(parents=True)
        made.append(path)
        return path / "cgroup.procs"

    try:
        yield make
    finally:
        for path in made:
            path.rmdir()
        for path in {path.parent for path in made}:
            path.rmdir()
        if base.exists():
            base.rmdir()


def container(kubelet: Kubelet, pod: Pod, procs: Path) -> subprocess.Popen[bytes]:
    slots = str(kubelet.target(pod) / "slots")
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(procs), slots, CANARY.decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    return process


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
    first.kill()
    first.wait()
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
        second.kill()
        second.wait()
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
        one.kill()
        one.wait()

        time.sleep(3)
        assert emptied(serving, pod) == 0
        assert (serving.target(pod) / "slots" / "slot.rank_0").read_bytes().startswith(CANARY)
    finally:
        other.kill()
        other.wait()
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
