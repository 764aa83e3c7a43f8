"""One agent with its CSI service for every test, in a process of its own, and kubelet's calls by hand (`csi_agent`)."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from csi_agent import Kubelet, Pod
from leftovers import remove_cgroup
from requirements import missing, need_root


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    """No agent yet. Whatever a test leaves mounted or attached is taken away, and fails it."""
    need_root()
    base = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    base.chmod(0o755)
    made = Kubelet(base)
    try:
        yield made
    finally:
        made.clean_up()


@pytest.fixture
def serving(kubelet: Kubelet) -> Kubelet:
    """With an agent that serves, and a tier `chat`."""
    kubelet.declare_tier()
    kubelet.start_agent()
    return kubelet


@pytest.fixture
def new_pod(kubelet: Kubelet) -> Callable[..., Pod]:
    """A new pod that the API server knows."""

    def make(**fields: str) -> Pod:
        uid = f"{secrets.token_hex(4)}-0000-4000-8000-{secrets.token_hex(6)}"
        pod = Pod(uid=uid, **({"name": f"engine-{secrets.token_hex(3)}"} | fields))
        kubelet.declare_pod(pod)
        return pod

    return make


@pytest.fixture(scope="module")
def argument_kubelet() -> Iterator[Kubelet]:
    """One agent for all tests of a module that make no volume."""
    need_root()
    base = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    base.chmod(0o755)
    made = Kubelet(base)
    try:
        made.start_agent()
        yield made
    finally:
        made.clean_up()


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
        for path in [*made, *{path.parent for path in made}, *([base] if base.exists() else [])]:
            remove_cgroup(path)
