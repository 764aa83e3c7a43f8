"""Who may write what, on the real API server: each user is impersonated, so RBAC and the policies are those of a real one."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from api_client import Api, Refused, micro_now, tier, volume, volume_status
from controlplane import wait_until

pytestmark = pytest.mark.slow
Json = dict[str, Any]
Words = Callable[[Callable[[], Any]], str]
APPLY = {"Content-Type": "application/apply-patch+yaml"}


def apply(api: Api, plural: str, body: Json, *, sub: str = "") -> Json:
    """As the agent writes: server-side apply, by force."""
    path = api.path(plural, body["metadata"]["name"], sub=sub)
    return api.request("PATCH", f"{path}?fieldManager=kvtier-node&force=true", json=body, headers=APPLY)


def status_of(body: Json, status: Json) -> Json:
    return {key: body[key] for key in ("apiVersion", "kind")} | {
        "metadata": {"name": body["metadata"]["name"]},
        "status": status,
    }


@pytest.fixture
def chat(people: Any) -> Json:
    return people.admin().create("kvcachetiers", tier("chat"))


def of_node(chat: Json, node: str) -> Json:
    return volume(chat, node, finalizer=False)


def record(of: Json, node: str, **labels: str) -> Json:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {
            "name": f"receipt-{secrets.token_hex(6)}",
            "labels": {"kvtier.dev/volume": of["metadata"]["name"], "kvtier.dev/node": node, **labels},
        },
        "spec": {"tierRef": {"name": "chat"}, "reason": "Crash: a pod", "trigger": "Crash"},
    }


def result(of: Json, node: str) -> Json:
    one = {
        "volumeId": of["metadata"]["name"],
        "nodeName": node,
        "technique": "KeyDestroyed",
        "begin": micro_now(),
        "verified": True,
    }
    return {"state": "Complete", "begin": micro_now(), "end": micro_now(), "volumes": [one]}


def request(name: str = "please", **spec: Any) -> Json:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {"name": name},
        "spec": {"tierRef": {"name": "chat"}, "reason": "asked by the tenant", **spec},
    }


# -- the node agent


def test_an_agent_writes_volumes_and_records_of_its_own_node(people: Any, chat: Json) -> None:
    agent = people.agent("node-a")
    mine = of_node(chat, "node-a")
    apply(agent, "kvcachevolumes", mine)
    apply(agent, "kvcachevolumes", status_of(mine, volume_status("InUse")), sub="status")
    made = record(mine, "node-a")
    apply(agent, "kvcacheerasures", made)
    apply(agent, "kvcacheerasures", status_of(made, result(mine, "node-a")), sub="status")
    apply(agent, "kvcachevolumes", status_of(mine, volume_status("Erased")), sub="status")
    assert people.admin().get("kvcachevolumes", mine["metadata"]["name"])["status"]["state"] == "Erased"


def test_a_repeated_report_of_a_complete_record_is_taken(people: Any, chat: Json) -> None:
    """After a restart an agent tells again what it told: the same words change nothing."""
    agent, mine = people.agent("node-a"), of_node(chat, "node-a")
    made = record(mine, "node-a")
    said = status_of(made, result(mine, "node-a"))
    for _ in range(2):
        apply(agent, "kvcacheerasures", made)
        apply(agent, "kvcacheerasures", said, sub="status")


def test_the_agent_of_node_a_may_not_create_a_volume_of_node_b(people: Any, chat: Json, refused: Words) -> None:
    said = refused(lambda: apply(people.agent("node-a"), "kvcachevolumes", of_node(chat, "node-b")))
    assert "the agent of node node-a writes volumes of its own node only" in said


def test_the_agent_of_node_a_may_not_write_node_bs_volume(people: Any, chat: Json, refused: Words) -> None:
    others = of_node(chat, "node-b")
    apply(people.agent("node-b"), "kvcachevolumes", others)
    said = refused(
        lambda: apply(
            people.agent("node-a"), "kvcachevolumes", status_of(others, volume_status("Erased")), sub="status"
        )
    )
    assert "of its own node only" in said
    relabelled = others | {"metadata": {"name": others["metadata"]["name"], "labels": {"a": "b"}}}
    assert "of its own node only" in refused(lambda: apply(people.agent("node-a"), "kvcachevolumes", relabelled))


def test_an_agent_without_a_node_claim_writes_nothing(people: Any, chat: Json, refused: Words) -> None:
    said = refused(lambda: apply(people.agent(None), "kvcachevolumes", of_node(chat, "node-a")))
    assert "the agent's token names no node" in said


def test_an_agent_may_not_record_an_erasure_of_another_node(people: Any, chat: Json, refused: Words) -> None:
    agent, others = people.agent("node-a"), of_node(chat, "node-b")
    assert "of its own node only" in refused(lambda: apply(agent, "kvcacheerasures", record(others, "node-b")))
    made = record(others, "node-a")
    apply(agent, "kvcacheerasures", made)
    said = refused(lambda: apply(agent, "kvcacheerasures", status_of(made, result(others, "node-b")), sub="status"))
    assert "of another node or volume" in said


def test_an_agent_may_not_write_another_nodes_record(people: Any, chat: Json, refused: Words) -> None:
    others = of_node(chat, "node-b")
    made = record(others, "node-b")
    apply(people.agent("node-b"), "kvcacheerasures", made)
    forged = status_of(made, result(others, "node-b"))
    assert "of its own node only" in refused(
        lambda: apply(people.agent("node-a"), "kvcacheerasures", forged, sub="status")
    )


def test_an_agent_may_neither_request_nor_answer_a_request(people: Any, chat: Json, refused: Words) -> None:
    agent = people.agent("node-a")
    assert "requests to erase" in refused(lambda: apply(agent, "kvcacheerasures", request()))
    asked = people.admin().create("kvcacheerasures", request())
    said = refused(lambda: apply(agent, "kvcacheerasures", status_of(asked, {"state": "Complete"}), sub="status"))
    assert "requests to erase, and their status, are not its to write" in said


def test_an_agent_deletes_nothing(people: Any, chat: Json) -> None:
    mine = of_node(chat, "node-a")
    apply(people.agent("node-a"), "kvcachevolumes", mine)
    with pytest.raises(Refused, match="cannot delete"):
        people.agent("node-a").delete("kvcachevolumes", mine["metadata"]["name"])


def test_a_real_token_that_kubelet_would_project_carries_the_node(people: Any, chat: Json, cluster: Any) -> None:
    """Not impersonated: TokenRequest for the agent's account, bound to a pod on node-a, as kubelet asks for it."""
    admin = people.admin()
    spaces = "/api/v1/namespaces/kvtier-system"
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"agent-{secrets.token_hex(3)}"},
        "spec": {
            "nodeName": "node-a",
            "serviceAccountName": "kvtier-node",
            "containers": [{"name": "agent", "image": "example/agent"}],
        },
    }
    made = admin.request("POST", f"{spaces}/pods", json=body)
    bound = {"kind": "Pod", "apiVersion": "v1", "name": made["metadata"]["name"], "uid": made["metadata"]["uid"]}
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"boundObjectRef": bound}}
    token = admin.request("POST", f"{spaces}/serviceaccounts/kvtier-node/token", json=asked)["status"]["token"]
    context = ssl.create_default_context(cafile=str(cluster.plane.folder / "pki" / "ca.crt"))
    with httpx2.Client(
        base_url=cluster.plane.server, verify=context, trust_env=False, headers={"Authorization": f"Bearer {token}"}
    ) as client:
        agent = Api(client, people.namespace)
        apply(agent, "kvcachevolumes", of_node(chat, "node-a"))
        with pytest.raises(Refused, match="of its own node only"):
            apply(agent, "kvcachevolumes", of_node(chat, "node-b"))
    admin.request("DELETE", f"{spaces}/pods/{made['metadata']['name']}?gracePeriodSeconds=0")


# -- records


def test_nobody_but_the_agent_says_erased(people: Any, chat: Json, refused: Words) -> None:
    mine = of_node(chat, "node-a")
    apply(people.agent("node-a"), "kvcachevolumes", mine)
    for api in (people.admin(), people.controller()):
        said = refused(
            lambda api=api: apply(api, "kvcachevolumes", status_of(mine, volume_status("Erased")), sub="status")
        )
        assert "only the node agent that signed the receipt says Erased" in said


def test_the_controller_writes_abandoned(people: Any, chat: Json) -> None:
    mine = of_node(chat, "node-a")
    apply(people.agent("node-a"), "kvcachevolumes", mine)
    apply(
        people.controller(),
        "kvcachevolumes",
        status_of(mine, {"state": "Abandoned", "reason": "disk lost"}),
        sub="status",
    )


def test_a_complete_erasure_cannot_be_changed(people: Any, chat: Json, refused: Words) -> None:
    admin, mine = people.admin(), of_node(chat, "node-a")
    made = record(mine, "node-a")
    apply(people.agent("node-a"), "kvcacheerasures", made)
    apply(people.agent("node-a"), "kvcacheerasures", status_of(made, result(mine, "node-a")), sub="status")
    name = made["metadata"]["name"]
    change = {"status": {"volumes": []}}
    assert "cannot be changed" in refused(lambda: admin.merge("kvcacheerasures", name, change, sub="status"))
    labels = {"metadata": {"labels": {"kvtier.dev/volume": "kvv-00000000000000000000"}}}
    assert "they stay" in refused(lambda: admin.merge("kvcacheerasures", name, labels))
    admin.merge("kvcacheerasures", name, {"metadata": {"labels": {"audited": "yes"}}})


def test_people_make_requests_not_records(people: Any, chat: Json, refused: Words) -> None:
    admin = people.admin()
    forged = record(of_node(chat, "node-a"), "node-a")
    assert "records of erasures" in refused(lambda: admin.create("kvcacheerasures", forged))
    assert "records of erasures" in refused(lambda: admin.create("kvcacheerasures", request(trigger="Crash")))
    admin.create("kvcacheerasures", request())


# -- giving up


@pytest.fixture
def bound(people: Any) -> Callable[[str, str], Api]:
    """A person with a ClusterRole in the namespace."""

    def bind(person: str, role: str) -> Api:
        body = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": f"{person}-{role}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": person}],
        }
        path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{people.namespace}/rolebindings"
        people.admin().request("POST", path, json=body)
        return people.user(person)

    return bind


def test_a_place_is_given_up_by_who_has_the_verb_abandon(
    people: Any, chat: Json, bound: Callable[[str, str], Api], refused: Words, cluster: Any
) -> None:
    mine = of_node(chat, "node-a")
    name = mine["metadata"]["name"]
    apply(people.agent("node-a"), "kvcachevolumes", mine)
    given_up = {"metadata": {"annotations": {"kvtier.dev/abandon": "disk shredded, certificate 4711"}}}
    for other in (people.controller(), people.agent("node-a")):
        assert 'needs the verb "abandon"' in refused(lambda api=other: api.merge("kvcachevolumes", name, given_up))
    officer = bound("officer", "kvtier-abandon")
    wait_until("the role acts", lambda: _succeeds(lambda: officer.get("kvcachevolumes", name)))
    for empty in ("", "   ", "ok"):
        nothing = {"metadata": {"annotations": {"kvtier.dev/abandon": empty}}}
        if empty:
            assert "has no reason" in refused(lambda body=nothing: officer.merge("kvcachevolumes", name, body))
    officer.merge("kvcachevolumes", name, given_up)
    without = {"metadata": {"annotations": {"kvtier.dev/abandon": None}}}
    assert "stays on record" in refused(lambda: people.admin().merge("kvcachevolumes", name, without))


def test_an_editor_of_the_namespace_declares_tiers_and_asks_for_erasures_and_no_more(
    people: Any, chat: Json, bound: Callable[[str, str], Api]
) -> None:
    mine = of_node(chat, "node-a")
    apply(people.agent("node-a"), "kvcachevolumes", mine)
    editor = bound("editor", "kvtier-edit")
    wait_until("the role acts", lambda: _succeeds(lambda: editor.create("kvcacheerasures", request("first"))))
    editor.create("kvcachetiers", tier("own"))
    for act in (
        lambda: editor.merge("kvcachevolumes", mine["metadata"]["name"], {"metadata": {"labels": {"a": "b"}}}),
        lambda: editor.delete("kvcacheerasures", "first"),
        lambda: editor.set_status("kvcacheerasures", "first", {"state": "Complete"}),
        lambda: editor.set_status("kvcachetiers", "own", {"nodes": 0}),
    ):
        with pytest.raises(Refused, match="cannot"):
            act()


def _succeeds(act: Callable[[], Any]) -> bool:
    try:
        act()
    except Refused:
        return False
    return True


def test_a_record_is_not_let_go_of_silently(people: Any, refused: Words, bound: Callable[[str, str], Api]) -> None:
    admin = people.admin()
    body = tier("held")
    body["metadata"]["finalizers"] = ["kvtier.dev/erase"]
    held = admin.create("kvcachetiers", body)
    editor = bound("editor", "kvtier-edit")
    wait_until(
        "the role acts",
        lambda: _succeeds(lambda: editor.merge("kvcachetiers", "held", {"metadata": {"labels": {"a": "b"}}})),
    )
    said = refused(lambda: editor.merge("kvcachetiers", "held", {"metadata": {"finalizers": []}}))
    assert "holds the tier until all of its places are erased" in said
    mine = volume(held, "node-a")
    admin.create("kvcachevolumes", mine)
    name = mine["metadata"]["name"]
    agent = people.agent("node-a")
    said = refused(lambda: agent.merge("kvcachevolumes", name, {"metadata": {"finalizers": []}}))
    assert "is the record that bytes may be readable" in said
    people.controller().merge("kvcachevolumes", name, {"metadata": {"finalizers": []}})
    people.controller().merge("kvcachetiers", "held", {"metadata": {"finalizers": []}})


# -- what of a node a tier may name


@pytest.mark.parametrize(
    "path", ["/elsewhere/a", "/var/lib/kvtier/tiers", "/var/lib/kvtier/tiersx/a", "/var/lib/kvtier/state"]
)
def test_a_tier_lies_under_an_allowed_root(people: Any, path: str, refused: Words) -> None:
    said = refused(lambda: people.admin().create("kvcachetiers", tier("bad", path=path)))
    assert "choose a directory below /var/lib/kvtier/tiers" in said


def test_a_device_is_the_administrators_to_allow(people: Any, refused: Words) -> None:
    said = refused(lambda: people.admin().create("kvcachetiers", tier("bad", device="/dev/sda")))
    assert "what is on it would be lost" in said


# -- the policies themselves


def test_the_api_server_finds_no_type_error_in_any_expression(cluster: Any) -> None:
    """kube-controller-manager checks the types of each policy against the schemas, the CRDs' too."""
    cluster.plane.start_controller_manager()
    try:
        with cluster.plane.http() as client:
            url = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"

            def ours() -> list[Json]:
                return [it for it in client.get(url).json()["items"] if it["metadata"]["name"].startswith("kvtier-")]

            wait_until("checked", lambda: all("typeChecking" in it.get("status", {}) for it in ours()))
            assert len(ours()) == 5
            warnings = {it["metadata"]["name"]: it["status"]["typeChecking"].get("expressionWarnings") for it in ours()}
            assert not any(warnings.values()), warnings
    finally:
        cluster.plane.stop("kube-controller-manager")
