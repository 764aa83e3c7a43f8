"""An erasure that fails after `kvtier run`'s command has ended: tried again less and less often, said, and given up in whole words."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier_api.errors import EraseIncomplete, KernelError
from kvtier_api.volume import VolumeState
from kvtier_node import run
from kvtier_node.guarding import Look
from kvtier_node.live import LiveVolume
from kvtier_node.run import RunResult, run_fenced
from node_host import Host, eventually

pytestmark = pytest.mark.root

HELD = (
    "mkdir $KVTIER_SLOT_DIR/in; (cd $KVTIER_SLOT_DIR/in && touch {0}.in && exec sleep 600) & echo $! > {0};"
    " while [ ! -e {0}.in ]; do sleep 0.05; done; exit 3"
)
"""A command that ends and leaves a process that stands in the volume: the kernel keeps its key, and no file is open."""


def run_held(host: Host, said: list[str] | None = None) -> RunResult:
    command = ["sh", "-c", HELD.format(holder(host))]
    return run_fenced(host.node, host.tier("Fscrypt"), command, say=(said if said is not None else []).append)


def holder(host: Host) -> Path:
    return host.base / "holder"


@pytest.fixture
def let_go(host: Host) -> Callable[[], None]:
    return lambda: os.kill(int(holder(host).read_text()), signal.SIGKILL)


def test_the_pause_between_two_tries_doubles_up_to_ten_seconds() -> None:
    assert [round(pause_s, 1) for pause_s in itertools.islice(run.pauses_s(), 8)] == [
        0.2,
        0.4,
        0.8,
        1.6,
        3.2,
        6.4,
        10,
        10,
    ]


def test_an_erasure_that_fails_is_tried_less_and_less_often_until_it_succeeds(
    host: Host, let_go: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def wait(pause_s: float, asked: object) -> None:
        waited.append(round(pause_s, 1))
        if len(waited) == 5:
            let_go()
        elif len(waited) > 5:  # it takes the kernel a moment to end the process
            threading.Event().wait(0.1)

    monkeypatch.setattr(run, "_wait", wait)
    result = run_held(host)
    assert (result.exit_code, result.error) == (3, None)
    assert result.receipt is not None
    assert waited[:5] == [0.2, 0.4, 0.8, 1.6, 3.2]
    host.assert_nothing_left()


def test_a_failure_that_follows_a_success_begins_with_short_pauses_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.look
    failed, held = Look(False, "ended", error=KernelError("a device hangs")), Look(True, "a fork has a file open")
    looks = iter([failed, failed, failed, held, held, failed, failed])
    waited: list[float] = []
    monkeypatch.setattr(run, "_wait", lambda pause_s, asked: waited.append(round(pause_s, 1)))
    monkeypatch.setattr(run, "look", lambda *a, **k: next(looks, None) or real(*a, **k))
    assert run_fenced(host.node, host.tier("SealOnly"), ["true"]).receipt is not None
    assert waited == [0.2, 0.4, 0.8, 0.2, 0.2, 0.2, 0.4]


def test_what_is_given_up_is_said_with_cause_object_and_remedy(
    host: Host, let_go: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_RETRY_FOR_S", -1.0)
    said: list[str] = []
    result = run_held(host, said)
    assert result.receipt is None and isinstance(result.error, EraseIncomplete)
    [row] = host.node.ledger.volumes({VolumeState.ERASING})
    assert result.error.cause and result.error.obj and result.error.remedy
    assert f"{row.volume_id} stays on record until it is erased: {result.error}" in said
    let_go()
    eventually("the next start erases it", lambda: (host.drop_guardians(), host.recover().erased)[1])
    host.assert_nothing_left()


def test_a_failure_without_object_and_remedy_gets_both(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_RETRY_FOR_S", -1.0)
    monkeypatch.setattr(run, "look", lambda *a, **k: Look(False, "ended", error=KernelError("a device hangs")))
    result = run_fenced(host.node, host.tier("SealOnly"), ["true"])
    [row] = host.node.ledger.volumes()
    assert str(result.error).startswith(f"{row.place}: a device hangs (")
    assert result.error is not None and "tries again" in result.error.remedy
    assert [receipt.volume_id for receipt in host.recover().erased] == [row.volume_id]


def test_an_erasure_that_takes_long_is_said_while_it_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.look
    said: list[str] = []
    before: list[str] = []

    def slow(node: object, live: LiveVolume, **known: object) -> Look:
        eventually("progress", lambda: said)
        before.extend(said)
        return real(node, live, **known)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "_SAY_AFTER_S", 0.05)
    monkeypatch.setattr(run, "look", slow)
    started: list[str] = []
    result = run_fenced(
        host.node,
        host.tier("SealOnly"),
        ["true"],
        say=lambda text: (started if "is ready" in text else said).append(text),
    )
    assert result.receipt is not None
    assert before == [f"erasing {result.volume_id}"]


def test_a_signal_ends_even_a_long_pause() -> None:
    asked = run._Asked()
    timer = threading.Timer(0.1, lambda: setattr(asked, "to_leave", True))
    timer.start()
    run._wait(1_000_000.0, asked)
    timer.join()
