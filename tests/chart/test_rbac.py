"""Each verb that the chart grants is used by the code, and each call of the code is granted. Read from the code itself.

Every request of the controller goes through `kube.Kube`, or is a watch of kopf's; every request of the node agent goes through
`self._client` in `kvtier_node.cluster`. A call that this module cannot read fails the test: then it is to be taught.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import ROOT, Json, Rendered

from kvtier_operator import kinds
from kvtier_operator.settings import parse_settings
from kvtier_operator.watching import registry

OPERATOR = ROOT / "operator" / "kvtier_operator"
NODE = ROOT / "operator" / "kvtier_node" / "cluster"
Right = tuple[str, str, str]
"""API group, resource (with its subresource), verb."""

OWN = {"TIERS": "kvcachetiers", "VOLUMES": "kvcachevolumes", "ERASURES": "kvcacheerasures"}
VERBS = {
    "list": "list",
    "pages": "list",
    "watch": "watch",
    "is_served": "list",
    "get": "get",
    "create": "create",
    "replace": "update",
    "merge": "patch",
}


def rules(rendered: Rendered, account: str) -> Iterator[Json]:
    """Of every role that is bound to the account."""
    for binding in (*rendered.all("ClusterRoleBinding"), *rendered.all("RoleBinding")):
        if any(it["name"] == account for it in binding["subjects"]):
            namespace = binding["metadata"].get("namespace") if binding["roleRef"]["kind"] == "Role" else None
            for role in rendered.all(binding["roleRef"]["kind"]):
                if (
                    role["metadata"]["name"] == binding["roleRef"]["name"]
                    and role["metadata"].get("namespace") == namespace
                ):
                    yield from role["rules"]


def granted(rendered: Rendered, account: str) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in rules(rendered, account)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def imported_kinds(path: Path) -> set[str]:
    return {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "kvtier_operator.kinds"
        for alias in node.names
        if alias.name.isupper()
    }


def controllers_calls(*modules: str) -> set[Right]:
    found: set[Right] = set()
    for module in modules:
        path = OPERATOR / f"{module}.py"
        for call in calls(path):
            assert isinstance(call.func, ast.Attribute)
            if name_of(call.func.value).lstrip("_") not in ("kube", "election_kube"):
                continue
            method = call.func.attr
            if method == "close":
                continue
            kind = name_of(call.args[0])
            source = ast.unparse(call.args[0]) == "source.kind"  # whatever the controller looks at
            where = OPERATOR / "sources.py" if source else path
            # a kind in a variable: any that the module names
            names = {kind} if kind.isupper() else imported_kinds(where) - {"EVERYWHERE"}
            if not kind.isupper() and method in ("list", "merge"):
                names -= {"LEASES", "EVENTS"}
            for name in names:
                resource = getattr(kinds, name)._api_info
                right = (resource.resource.group, resource.plural)
                if method == "apply_status":
                    found.add((right[0], f"{right[1]}/status", "patch"))
                elif method == "delete":
                    found.add((*right, "delete"))
                else:
                    found.add((*right, VERBS[method]))
    return found


def kopfs_watches() -> set[Right]:
    handlers = registry(
        None, parse_settings(["--all-namespaces", "--lease-namespace", "x"])
    )._watching.get_all_handlers()  # type: ignore[arg-type]
    return {(it.selector.group, it.selector.any_name, verb) for it in handlers for verb in ("list", "watch")}  # type: ignore[union-attr, misc]


def agents_calls() -> set[Right]:
    found: set[Right] = set()
    for path in sorted(NODE.glob("*.py")):
        for call in calls(path):
            found |= set(_agents_call(path, call))
        for call in (it for it in ast.walk(ast.parse(path.read_text())) if isinstance(it, ast.Call)):
            if name_of(call.func) == "Selection":
                found |= {("kvtier.dev", OWN[name_of(call.args[0])], verb) for verb in ("list", "watch")}
    return found


CORE = {"Node": "nodes", "NodeObject": "nodes", "Pod": "pods"}


def _agents_call(path: Path, call: ast.Call) -> Iterator[Right]:
    assert isinstance(call.func, ast.Attribute)
    method, owner = call.func.attr, name_of(call.func.value)
    if owner == "self" and method == "_apply":
        resource = OWN[name_of(call.args[0])]
        yield from (
            ("kvtier.dev", resource, verb) for verb in ("create", "patch")
        )  # an apply of a new object needs both
    elif owner == "self" and method == "_apply_status":
        yield "kvtier.dev", f"{OWN[name_of(call.args[0])]}/status", "patch"
    elif owner == "_client" and method != "close":
        about = name_of(call.args[0])
        if method in ("list", "watch"):
            assert path.name == "watching.py" and about == "kind", (
                f"{path.name}: {ast.unparse(call)}"
            )  # what Selection says
        elif method == "apply":
            assert path.name == "writing.py", f"{path.name}: {ast.unparse(call)}"  # `_apply` and `_apply_status`
        elif method == "create":
            assert about == "body" and path.name == "writing.py", f"{path.name}: {ast.unparse(call)}"
            yield "events.k8s.io", "events", "create"
        elif about in CORE:
            yield "", CORE[about], method
        else:
            yield "kvtier.dev", OWN[about], method


CONTROLLER = ("election", "event_poster", "reconciling", "relisting", "standing_by", "term")


def test_no_module_of_the_controller_asks_the_api_server_unseen() -> None:
    """The list above is whole: whoever has a Kube is in it."""
    users = {path.stem for path in OPERATOR.glob("*.py") if "kvtier_operator.kube import" in path.read_text()}
    assert users - {"application"} == {*CONTROLLER, "drain"}
    assert not controllers_calls("application")


def test_no_module_of_the_agent_asks_the_api_server_unseen() -> None:
    users = [path for path in NODE.parent.rglob("*.py") if "lightkube" in path.read_text()]
    assert users and all(path.parent == NODE for path in users)


def test_the_controller_has_what_it_uses_and_nothing_else(default: Rendered) -> None:
    assert granted(default, "kvtier-controller") == controllers_calls(*CONTROLLER) | kopfs_watches()


def test_the_node_agent_has_what_it_uses_and_nothing_else(default: Rendered) -> None:
    assert granted(default, "kvtier-node") == agents_calls()


def test_the_uninstall_jobs_have_what_they_use_and_nothing_else(default: Rendered) -> None:
    used = controllers_calls("drain") | {it for it in controllers_calls("election") if it[1] == "leases"}
    waits = {("kvtier.dev", resource, "list") for resource in ("kvcachetiers", "kvcachevolumes")}
    assert granted(default, "kvtier-drain") == waits
    assert granted(default, "kvtier-release") == used


def test_the_lease_is_one_by_name(default: Rendered) -> None:
    for account in ("kvtier-controller", "kvtier-release"):
        for rule in rules(default, account):
            if rule["resources"] == ["leases"] and rule["verbs"] != ["create"]:
                assert rule["resourceNames"] == ["kvtier-controller"]
    arguments = default.controller["args"]
    assert "--lease-name=kvtier-controller" in arguments


@pytest.mark.parametrize("values", [{}, {"controller": {"watchNamespaces": ["team-a", "team-b"]}}])
def test_nothing_is_granted_by_a_wildcard(values: Json, render: Callable[..., Rendered]) -> None:
    rendered = render(values)
    for role in (*rendered.all("ClusterRole"), *rendered.all("Role")):
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]], role["metadata"]["name"]
            assert not {"secrets", "configmaps"} & set(rule["resources"]), role["metadata"]["name"]


def test_with_watched_namespaces_the_controller_has_no_right_at_others_tiers(render: Callable[..., Rendered]) -> None:
    rendered = render({"controller": {"watchNamespaces": ["team-a"]}})
    cluster_wide = rendered.one("ClusterRole", "kvtier-controller")["rules"]
    assert [it["resources"] for it in cluster_wide] == [["nodes"]]
    roles = {
        it["metadata"]["namespace"] for it in rendered.all("Role") if it["metadata"]["name"] == "kvtier-controller"
    }
    assert roles == {"kvtier-system", "team-a"}
    assert granted(rendered, "kvtier-controller") == controllers_calls(*CONTROLLER) | kopfs_watches()


def test_users_roles_are_aggregated_and_giving_up_is_not(default: Rendered) -> None:
    labels: dict[str, Any] = {
        it["metadata"]["name"]: {key for key in it["metadata"]["labels"] if "aggregate-to" in key}
        for it in default.all("ClusterRole")
    }
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert labels["kvtier-view"] == {f"{prefix}{it}" for it in ("view", "edit", "admin")}
    assert labels["kvtier-edit"] == {f"{prefix}{it}" for it in ("edit", "admin")}
    assert labels["kvtier-abandon"] == set()
