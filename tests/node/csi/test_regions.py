"""vLLM's regions in a pod's own /dev/shm, whose engine died before anybody saw it: they keep the next container from starting."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi_agent import Kubelet, Pod
from kvtier_node.pods import regions as regions_module

pytestmark = pytest.mark.root

SANDBOX = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
os.execvp("unshare", ["unshare", "-m", "--propagation", "private", "sh", "-c",
    "mount -t tmpfs tmpfs /dev/shm && echo there && exec cat"])
"""
ENGINE = """
import os
os.setgid(1000)
os.setuid(1000)
fd = os.open("/dev/shm/vllm_offload_kvtier-test.mmap", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
os.write(fd, b"a prompt" * 1000)
"""


@pytest.fixture
def sandbox(
    serving: Kubelet, new_pod: Callable[..., Pod], cgroup: Callable[[Pod], Path]
) -> Iterator[subprocess.Popen[bytes]]:
    """The first process of a pod with a volume; its /dev/shm is the pod's."""
    pod = new_pod()
    serving.publish(pod)
    process = subprocess.Popen(
        [sys.executable, "-c", SANDBOX, str(cgroup(pod))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        yield process
    finally:
        process.kill()
        process.wait()


def run(sandbox: subprocess.Popen[bytes], *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["nsenter", "-t", str(sandbox.pid), "-m", *command], capture_output=True, check=False)


def regions(sandbox: subprocess.Popen[bytes]) -> list[str]:
    return [path.name for path in Path(f"/proc/{sandbox.pid}/root/dev/shm").iterdir()]


def engine(sandbox: subprocess.Popen[bytes]) -> int:
    """Starts, makes its region, and ends."""
    return run(sandbox, sys.executable, "-c", ENGINE).returncode


def test_a_region_whose_engine_nobody_saw_is_erased_and_the_next_one_starts(
    serving: Kubelet, sandbox: subprocess.Popen[bytes]
) -> None:
    assert engine(sandbox) == 0
    assert engine(sandbox) != 0, "the next one finds it, and gives up"
    serving.wait("it is erased", lambda: not regions(sandbox))
    assert engine(sandbox) == 0


def test_a_region_that_somebody_has_open_stays(serving: Kubelet, sandbox: subprocess.Popen[bytes]) -> None:
    assert engine(sandbox) == 0
    (name,) = regions(sandbox)
    with open(f"/proc/{sandbox.pid}/root/dev/shm/{name}", "rb"):  # by a process that is not of the pod
        serving.wait("it was tried", lambda: _looked_at(serving, name), limit_s=30)
        assert regions(sandbox) == [name]
    serving.wait("then it is erased", lambda: not regions(sandbox))


def _looked_at(kubelet: Kubelet, name: str) -> bool:
    """The agent keeps the folder from when it knows a region there."""
    assert kubelet.process is not None
    for link in Path(f"/proc/{kubelet.process.pid}/fd").iterdir():
        try:
            if (link / name).exists():
                return True
        except OSError:
            continue
    return False


def test_a_region_of_another_user_and_other_files_stay(serving: Kubelet, sandbox: subprocess.Popen[bytes]) -> None:
    assert engine(sandbox) == 0
    assert run(sandbox, "sh", "-c", "echo > /dev/shm/vllm_offload_of_root; echo > /dev/shm/other").returncode == 0
    assert run(sandbox, "chown", "1000", "/dev/shm/other").returncode == 0
    serving.wait("the engine's is erased", lambda: len(regions(sandbox)) == 2)
    assert set(regions(sandbox)) == {"vllm_offload_of_root", "other"}


def test_a_region_in_the_hosts_own_memory_that_was_not_seen_with_the_pod_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod with `hostIPC`: what lies there may be anybody's."""
    monkeypatch.setattr(regions_module, "_AGAIN_S", 0.0)
    path = Path("/dev/shm") / f"vllm_offload_kvtier-{secrets.token_hex(4)}"
    path.write_bytes(b"a prompt")
    try:
        os.chown(path, 1000, 1000)
        looked = regions_module.PodRegions(owner=1000)
        for _ in range(4):
            assert not looked.look([os.getpid()], lambda: [os.getpid()])
        looked.close()
        assert path.exists()
    finally:
        path.unlink()
