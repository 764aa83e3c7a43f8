"""Names of the probe's devices, where no device mapper is at hand. What it makes is tried in a virtual machine (tests/vm)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_api.errors import KernelError
from kvtier_node.backends import dmcrypt
from kvtier_node.kernel.processes import start_time


@contextmanager
def no_device(fd: int) -> Iterator[Any]:
    yield SimpleNamespace(path="/dev/loop-of-a-test")


def test_two_probes_of_one_process_never_share_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers are checked in threads: the one would find the other's device, fail, and remove it."""
    there: list[str] = []
    used: list[str] = []

    def make(path: str, name: str, cipher: str) -> None:
        assert name not in there, "cryptsetup refuses a name that is taken"
        there.append(name)
        used.append(name)
        if len(used) == 1:
            assert dmcrypt.DmCrypt._probe_cipher().ok  # as another thread, right now

    monkeypatch.setattr(dmcrypt, "_open", make)
    monkeypatch.setattr(dmcrypt, "_remove", there.remove)
    monkeypatch.setattr(dmcrypt.loop, "transient", no_device)
    monkeypatch.setattr(dmcrypt.device_mapper, "names", lambda: list(there))
    assert dmcrypt.DmCrypt._probe_cipher().ok
    assert (len(set(used)), there) == (2, [])


def test_only_what_a_dead_agent_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = f"kvtier-probe-{os.getpid()}-{start_time(os.getpid())}-00ff00ff"
    reused = f"kvtier-probe-{os.getpid()}-1-00ff00ff"
    dead = "kvtier-probe-4194304-77-00ff00ff"
    removed: list[str] = []
    monkeypatch.setattr(dmcrypt.device_mapper, "names", lambda: [mine, reused, dead, "kvv-0123456789abcdefabcd"])
    monkeypatch.setattr(dmcrypt, "_remove", removed.append)
    dmcrypt._remove_lost_probes()
    assert removed == [reused, dead]


@pytest.mark.parametrize("there", [True, False])
def test_a_device_that_another_process_removed_is_removed(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KernelError("no such device", obj="dmsetup")

    monkeypatch.setattr(dmcrypt.bounded, "run_tool", fails)
    monkeypatch.setattr(dmcrypt.device_mapper, "names", lambda: ["x"] if there else [])
    if there:
        with pytest.raises(KernelError):
            dmcrypt._remove("x")
    else:
        dmcrypt._remove("x")
