"""A wall clock that jumps: what is measured in time is measured by the monotonic clock, and what comes first is told by number.

The machine's own clock is never set: every module of the agent that asks for the time is given a clock that steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from kvtier_api.erasure import Trigger
from kvtier_api.volume import VolumeState
from kvtier_node.cluster.objects import erasure_object
from kvtier_node.erasing import erase
from kvtier_node.live import Death
from kvtier_node.pods.consumer import PodIdentity
from kvtier_node.receipts import export_chain, verify_chain
from node_host import Host

pytestmark = pytest.mark.root

Step = Callable[[timedelta], None]
DAY = timedelta(days=1)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """`step(DAY)`: from now on each look at the wall clock finds it that much further, or back."""
    looks = 0
    by = timedelta()

    def utc_now() -> str:
        nonlocal looks
        looks += 1
        return (datetime.now(UTC) + looks * by).isoformat(timespec="microseconds").replace("+00:00", "Z")

    def begin(each: timedelta) -> None:
        nonlocal by
        by = each
        for name, module in list(sys.modules.items()):
            if name.startswith("kvtier_node.") and hasattr(module, "utc_now"):
                monkeypatch.setattr(module, "utc_now", utc_now)

    return begin


@pytest.mark.parametrize("by", [DAY, -DAY], ids=["forward", "back"])
def test_a_jump_in_an_erasure_makes_it_neither_late_nor_early(host: Host, step: Step, by: timedelta) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    consumer.kill()
    step(by)
    receipt = erase(host.node, live, Trigger.CRASH, death=Death.now())
    assert (receipt.begin < receipt.end) == (by > timedelta()), "the clock did jump"
    assert receipt.deadline_met is True
    assert 0 <= float(receipt.duration_s or -1) < float(receipt.deadline_s or 0)


@pytest.mark.parametrize("by", [DAY, -DAY], ids=["forward", "back"])
def test_a_late_erasure_is_late_whatever_the_clock_says(host: Host, step: Step, by: timedelta) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    consumer.kill()
    step(by)
    died = Death(Death.now().at, time.monotonic() - 1000)
    assert erase(host.node, live, Trigger.CRASH, death=died).deadline_met is False


def test_a_clock_that_is_set_back_changes_no_order_and_breaks_no_chain(host: Host, step: Step) -> None:
    """Receipts and arrows have numbers. A start with a clock that is behind its own ledger finds all as it was."""
    first, second = (host.in_use(host.tier("Fscrypt", ranks=1)) for _ in range(2))
    first[1].kill()
    ends = [host.erase(first[0])]
    step(-DAY)
    second[1].kill()
    ends.append(host.erase(second[0]))
    third, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    assert ends[1].end < ends[0].end
    host.drop_guardians()
    host.reopen()
    (adopted,) = host.recover().adopted
    assert adopted.volume_id == third.volume_id
    consumer.kill()
    ends.append(host.erase(adopted))
    assert [receipt.id for receipt in host.node.ledger.receipts()] == [receipt.id for receipt in ends]
    assert verify_chain(export_chain(host.node.ledger, host.node.identity)).count >= len(ends)
    numbers = [arrow.seq for arrow in host.node.ledger.transitions()]
    assert numbers == sorted(set(numbers))


def test_a_record_of_an_erasure_whose_end_is_before_its_begin_can_be_told(host: Host, step: Step) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    consumer.kill()
    step(-DAY)
    receipt = host.erase(live)
    row = host.node.ledger.get(live.volume_id)
    assert row.state is VolumeState.ERASED
    pod = PodIdentity("0a1b", "default", "engine", "csi-0", "/var/lib/kubelet/pods/0a1b/volumes/x/mount")
    body, status = erasure_object(row, pod, receipt)
    assert body["metadata"]["name"] == receipt.id
    assert status.end is not None and status.begin is not None and status.end < status.begin
