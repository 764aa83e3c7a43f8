"""Metrics have one meaning for each name, the document lists what is exported, and alerts and dashboard ask for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
import pytest
from exported import Exported, of_the_agent, of_the_controller
from rendering import ROOT, Json, Rendered

from kvtier_api.meta import ConditionType

EVERYTHING: Json = {
    "metrics": {it: {"enabled": True} for it in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")}
}
ASKED_FOR = {
    "KVTierResidualBytes",
    "KVTierNotEncrypted",
    "KVTierAgentAbsent",
    "KVTierLedgerRebuilt",
}


@pytest.fixture
def rendered(render: Callable[..., Rendered]) -> Rendered:
    return render(EVERYTHING)


# -- names


def test_no_name_is_exported_by_both_processes() -> None:
    """One name with two meanings, or with two sets of labels, makes every sum over both of them wrong."""
    agent, controller = of_the_agent(), of_the_controller()
    assert not {name for it in agent.values() for name in it.series} & {
        name for it in controller.values() for name in it.series
    }
    assert all(name.startswith("kvtier_node_") for name in agent)
    assert not any(name.startswith("kvtier_node_") for name in controller)


def _documented(section: str) -> dict[str, Exported]:
    text = (ROOT / "docs" / "metrics.md").read_text()
    (part,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    rows = re.findall(r"^\| `(kvtier_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", part, re.M)
    return {
        name: Exported(name, kind, frozenset(re.findall(r"`(\w+)`", labels)), help_, frozenset())
        for name, kind, labels, help_ in rows
    }


@pytest.mark.parametrize(("section", "exported"), [("Controller", of_the_controller), ("Node agent", of_the_agent)])
def test_the_document_lists_what_is_exported_and_nothing_else(
    section: str, exported: Callable[[], dict[str, Exported]]
) -> None:
    found = {
        name: Exported(name, it.type, it.labels, it.help.rstrip("."), frozenset()) for name, it in exported().items()
    }
    assert _documented(section) == found


def test_no_document_names_a_metric_that_is_not_exported() -> None:
    exported = {
        name for it in (*of_the_agent().values(), *of_the_controller().values()) for name in (it.name, *it.series)
    }
    modules = {path.name for path in ROOT.glob("*/kvtier_*")}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        named = set(re.findall(r"\bkvtier_[a-z_]*[a-z]\b", path.read_text())) - modules
        assert named <= exported, f"{path.name} names {sorted(named - exported)}"


# -- queries


@dataclass(frozen=True)
class Query:
    where: str
    text: str
    labels_used: frozenset[str] = frozenset()
    """By the texts of the alert or the legend of the panel."""


def _rules(rendered: Rendered) -> list[Json]:
    return [rule for group in rendered.one("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]


def _queries(rendered: Rendered) -> Iterator[Query]:
    for rule in _rules(rendered):
        texts = " ".join(rule["annotations"].values())
        yield Query(rule["alert"], rule["expr"], frozenset(re.findall(r"\$labels\.(\w+)", texts)))
    dashboard = json.loads(rendered.one("ConfigMap", "kvtier-dashboard")["data"]["kvtier.json"])
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            used = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
            yield Query(panel["title"], target["expr"], frozenset(used))
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()  # type: ignore[union-attr]
            yield Query(f"variable {variable['name']}", metric, frozenset({label}))


def _series(rendered: Rendered) -> dict[str, frozenset[str]]:
    """Every series that Prometheus has of kvtier, with its labels: those of the metric, and those that a monitor adds."""
    (endpoint,) = rendered.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    added = {it["targetLabel"] for it in endpoint["relabelings"]}
    found = {}
    for exported, more in ((of_the_agent(), added), (of_the_controller(), set())):
        for it in exported.values():
            for name in it.series:
                found[name] = it.labels | more | ({"le"} if name.endswith("_bucket") else set())
    return found


class _Labels:
    """Which labels the result of an expression has; on the way, what it asks for that is not there."""

    def __init__(self, series: dict[str, frozenset[str]]) -> None:
        self._series = series
        self.problems: list[str] = []
        self.metrics: set[str] = set()

    def of(self, node: Any) -> frozenset[str]:
        match node:
            case promql.VectorSelector():
                return self._selector(node)
            case promql.MatrixSelector():
                return self._selector(node.vector_selector)
            case promql.AggregateExpr():
                inner = self.of(node.expr)
                by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset()
                self._need(by, inner, str(node))
                return by
            case promql.Call():
                results = [self.of(argument) for argument in node.args]
                return frozenset().union(*results) - ({"le"} if node.func.name == "histogram_quantile" else set())
            case promql.BinaryExpr():
                return self.of(node.lhs) | self.of(node.rhs)
            case promql.ParenExpr() | promql.UnaryExpr():
                return self.of(node.expr)
            case promql.NumberLiteral() | promql.StringLiteral():
                return frozenset()
        raise AssertionError(f"{type(node).__name__} is not known here")

    def _selector(self, node: Any) -> frozenset[str]:
        if node.name not in self._series:
            self.problems.append(f"no process exports {node.name}")
            return frozenset()
        self.metrics.add(node.name)
        labels = self._series[node.name]
        self._need({matcher.name for matcher in node.matchers.matchers}, labels, node.name)
        self.problems += [
            f"no condition is called {matcher.value}"
            for matcher in node.matchers.matchers
            if matcher.name == "type" and matcher.op == promql.MatchOp.Equal and matcher.value not in set(ConditionType)
        ]
        return labels

    def _need(self, wanted: Any, there: frozenset[str], what: str) -> None:
        self.problems += [f"{what} has no label {label}" for label in sorted(set(wanted) - there)]


def test_each_query_parses_and_names_only_metrics_and_labels_that_exist(rendered: Rendered) -> None:
    series = _series(rendered)
    for query in _queries(rendered):
        found = _Labels(series)
        labels = found.of(promql.parse(query.text))
        assert found.metrics, f"{query.where}: asks for nothing"
        assert not found.problems, f"{query.where}: {found.problems}"
        assert query.labels_used <= labels, f"{query.where}: its text names {set(query.labels_used - labels)}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sum by (pod) (kvtier_tier_bytes)", "has no label pod"),
        ('kvtier_tier_condition{condition="Encrypted"}', "has no label condition"),
        ('kvtier_tier_condition{type="Encryption"}', "no condition is called Encryption"),
        ("rate(kvtier_erase_seconds_bucket[5m])", "no process exports kvtier_erase_seconds_bucket"),
    ],
)
def test_a_query_for_what_is_not_there_is_found(text: str, problem: str, rendered: Rendered) -> None:
    found = _Labels(_series(rendered))
    found.of(promql.parse(text))
    assert [it for it in found.problems if problem in it]


def test_the_alerts_that_are_asked_for_exist_and_each_is_explained(rendered: Rendered) -> None:
    names = [rule["alert"] for rule in _rules(rendered)]
    assert set(names) >= ASKED_FOR
    explained = re.findall(r"^### (KVTier\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert explained == names


# -- what the Prometheus operator's kinds ask for
# From the Go types of github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring v0.95.2: the fields that may be there
# (of those that this chart could use), and those that must. The kinds themselves are not installed here.

_DURATION = r"(0|([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)"
_ENDPOINT = {"port", "interval", "path", "honorLabels", "relabelings"}


def _only(found: Json, may: set[str], must: set[str]) -> None:
    assert must <= set(found) <= may, f"{set(found)} is not between {must} and {may}"


def test_monitors_have_the_fields_of_their_kinds(rendered: Rendered) -> None:
    for kind, list_ in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        monitor = rendered.one(kind)
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        _only(monitor["spec"], {"selector", list_, "namespaceSelector", "jobLabel"}, {"selector", list_})
        (endpoint,) = monitor["spec"][list_]
        _only(endpoint, _ENDPOINT, {"port"})
        assert re.fullmatch(_DURATION, endpoint["interval"])
        for relabeling in endpoint.get("relabelings", []):
            _only(relabeling, {"sourceLabels", "targetLabel", "action", "regex", "replacement", "separator"}, set())
            assert isinstance(relabeling["sourceLabels"], list)


def test_monitors_leave_the_tiers_namespace_as_it_is(rendered: Rendered) -> None:
    """Otherwise the target's namespace, kvtier's own, takes its place, and all tiers of one name are one."""
    for kind, list_ in (("ServiceMonitor", "endpoints"), ("PodMonitor", "podMetricsEndpoints")):
        assert all(endpoint["honorLabels"] is True for endpoint in rendered.one(kind)["spec"][list_])


def test_monitors_select_ports_that_are_there(rendered: Rendered) -> None:
    monitor = rendered.one("ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    (service,) = [it for it in rendered.all("Service") if wanted <= it["metadata"]["labels"].items()]
    assert monitor["endpoints"][0]["port"] in [it["name"] for it in service["spec"]["ports"]]
    pods = rendered.one("PodMonitor")["spec"]
    template = rendered.one("DaemonSet")["spec"]["template"]
    assert pods["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert pods["podMetricsEndpoints"][0]["port"] in [it["name"] for it in rendered.agent["ports"]]


def test_rules_have_the_fields_of_their_kind(rendered: Rendered) -> None:
    rule_object = rendered.one("PrometheusRule")
    assert rule_object["apiVersion"] == "monitoring.coreos.com/v1"
    _only(rule_object["spec"], {"groups"}, {"groups"})
    for group in rule_object["spec"]["groups"]:
        _only(group, {"name", "interval", "rules"}, {"name", "rules"})
        for rule in group["rules"]:
            _only(rule, {"alert", "expr", "for", "labels", "annotations"}, {"alert", "expr"})
            assert isinstance(rule["expr"], str)
            assert re.fullmatch(_DURATION, rule.get("for", "0"))
            texts = {**rule["labels"], **rule["annotations"]}
            assert all(isinstance(text, str) for text in texts.values())
            assert {"summary", "description"} <= set(rule["annotations"])
            assert rule["labels"]["severity"] in ("critical", "warning")
