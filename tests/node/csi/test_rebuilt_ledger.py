"""A ledger that is lost while pods have volumes: they keep them, kubelet's calls find them again, and everybody is told."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from csi_agent import CANARY, Kubelet, Pod
from kvtier_api.volume import VolumeState

pytestmark = pytest.mark.root


def gone(state: Path) -> None:
    for path in state.glob("ledger.db*"):
        path.unlink()


def garbage(state: Path) -> None:
    for path in state.glob("ledger.db-*"):
        path.unlink()
    (state / "ledger.db").write_bytes(b"no ledger " * 1000)


@pytest.mark.parametrize("damage", [gone, garbage])
def test_pods_keep_their_volumes_over_a_rebuild_and_have_them_erased_at_their_end(
    serving: Kubelet, new_pod: Callable[..., Pod], damage: Callable[[Path], None]
) -> None:
    runs, ended = new_pod(), new_pod()
    for pod in (ended, runs):
        serving.publish(pod)
        serving.write_canary(pod)
    serving.unpublish_until_ok(ended)
    before = serving.row_of(runs).volume_id
    assert serving.figure("kvtier_node_ledger_rebuilt_timestamp_seconds") == 0
    serving.stop_agent(signal.SIGKILL)
    damage(serving.base / "state")
    serving.start_agent()
    assert list((serving.base / "state").glob("ledger.db.damaged-*")) or damage is gone
    assert (serving.figure("kvtier_node_ledger_rebuilt_timestamp_seconds") or 0) > 0, "what the alert asks for"
    assert [row.volume_id for row in serving.in_use()] == [before]
    assert CANARY in (serving.target(runs) / "slots" / "slot.rank_0").read_bytes(), "what runs was not touched"
    serving.publish(runs)  # kubelet asks again after the agent's restart
    assert [row.volume_id for row in serving.in_use()] == [before], "it is found, and no second one is made"
    serving.unpublish_until_ok(runs)
    assert all(row.state is VolumeState.ERASED for row in serving.rows())
    assert not serving.target(runs).exists()
    assert list(serving.images()) == []
    assert serving.left_over() == []
    assert len(serving.receipts()) == 2, "that of before the rebuild too"
