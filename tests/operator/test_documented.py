"""The documents name what the code has, and nothing else: reasons of events, metrics, flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtier_api.errors import UsageError
from kvtier_node.cluster.announcing import NODE_EVENTS
from kvtier_operator.event_reasons import EVENT_REASONS, EventReason
from kvtier_operator.fence import Fence
from kvtier_operator.metrics import Metrics
from kvtier_operator.problems import NotLeading
from kvtier_operator.settings import parse_settings

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_each_reason_of_an_event_is_explained_in_code_and_document() -> None:
    assert set(EVENT_REASONS) == set(EventReason)
    _, of_nodes, of_controllers = (DOCS / "events.md").read_text().split("\n## ")
    assert rows(of_controllers) == [(reason.value, it.type, it.on, it.text) for reason, it in EVENT_REASONS.items()]
    assert rows(of_nodes) == [(reason, *it) for reason, it in NODE_EVENTS.items()]


def rows(of: str) -> list[tuple[str, ...]]:
    return re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, ]+) \| (.+) \|$", of, re.M)


def test_each_reason_has_one_poster() -> None:
    assert {reason.value for reason in EVENT_REASONS}.isdisjoint(NODE_EVENTS)


def test_each_metric_is_documented() -> None:
    families = {family.name for family in Metrics().registry.collect()}
    named = set(re.findall(r"^\| `(kvtier_\w+?)(?:_total)?`", (DOCS / "metrics.md").read_text(), re.M))
    assert named >= families


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--all-namespaces", "--lease-namespace", "Bad_Name"], "Bad_Name"),
        (["--namespace", "a/b", "--lease-namespace", "k"], "a/b"),
        (["--all-namespaces", "--lease-namespace", "k", "--listen", "8080"], "--listen=8080"),
        (["--all-namespaces", "--lease-namespace", "k", "--history-limit", "0"], "--history-limit=0"),
        (["--all-namespaces", "--lease-namespace", "k", "--resync", "1"], "--resync=1"),
    ],
)
def test_a_flag_that_does_not_hold_is_named_with_its_value(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        parse_settings(arguments)


def test_two_processes_of_one_pod_are_two_candidates() -> None:
    same = ["--all-namespaces", "--lease-namespace", "k", "--identity", "pod-a"]
    assert parse_settings(same).identity != parse_settings(same).identity


def test_the_agents_namespace_is_watched_too() -> None:
    found = parse_settings(["--namespace", "a", "--lease-namespace", "kvtier-system"])
    assert found.watched_namespaces == ("a", "kvtier-system")
    without = parse_settings(["--namespace", "a", "--lease-namespace", "kvtier-system", "--agent-selector", ""])
    assert without.watched_namespaces == ("a",)


def test_a_fence_is_closed_until_it_is_opened_and_closed_for_ever_after() -> None:
    fence = Fence()
    with pytest.raises(NotLeading):
        fence.check()
    fence.open_until(10**12)
    fence.check()
    fence.close()
    fence.open_until(10**13)
    with pytest.raises(NotLeading):
        fence.check()
