"""Two controllers, one Lease; an API server that goes away; CRDs that are not there yet. Real processes, real signals."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_client import Api, Json, micro_now, node, tier, volume, volume_status
from controllers import Controller
from controlplane import TOOLS, ControlPlane, install_crds, need_tools, wait_until

TIERS, VOLUMES = "kvcachetiers", "kvcachevolumes"


@pytest.fixture
def pair(plane: ControlPlane, api: Api) -> Iterator[tuple[Controller, Controller]]:
    """Two replicas for the test's namespace. The first one leads."""
    unique = secrets.token_hex(3)
    where = {"lease_namespace": api.namespace, "namespaces": (api.namespace,)}
    with Controller(plane, f"a{unique}", **where) as first:  # type: ignore[arg-type]
        first.wait_leads()
        with Controller(plane, f"b{unique}", **where) as second:  # type: ignore[arg-type]
            yield first, second


def counted(api: Api, total: int) -> bool:
    return (api.get(TIERS, "t").get("status") or {}).get("volumes", {}).get("total") == total


def told(api: Api, reason: str) -> list[Json]:
    """Events come after the status that they tell of."""
    return [it for it in api.list("events") if it["reason"] == reason]


def with_volume(api: Api) -> tuple[Json, str]:
    name = f"node-{api.namespace}"
    if api.find("nodes", name) is None:
        api.create("nodes", node(name))
    of = api.find(TIERS, "t") or api.create(TIERS, tier("t"))
    made = api.create(VOLUMES, volume(of, name) | {"status": volume_status("InUse")})
    return of, made["metadata"]["name"]


def test_the_standby_is_alive_and_writes_nothing(api: Api, pair: tuple[Controller, Controller]) -> None:
    first, second = pair
    with_volume(api)
    wait_until("counted", lambda: counted(api, 1))
    assert second.is_alive()
    assert not second.leads()
    assert first.writes(), "the leader does all the work"
    assert second.writes() == []


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "SIGKILL"])
def test_a_leader_that_ends_is_followed_and_nothing_is_lost(
    api: Api, pair: tuple[Controller, Controller], kill: bool
) -> None:
    first, second = pair
    with_volume(api)
    wait_until("counted", lambda: counted(api, 1))
    code = first.stop(kill=kill)
    assert code == (-9 if kill else 0)
    with_volume(api)  # while nobody leads
    second.wait_leads()
    wait_until("counted by the second", lambda: counted(api, 2))
    lease = api.get("leases", "kvtier-controller")["spec"]
    assert lease["holderIdentity"].startswith(second.name)
    wait_until("told", lambda: bool(told(api, "TierDeclared")))
    (declared,) = told(api, "TierDeclared")
    assert "series" not in declared, "told once, whoever tells"


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes(api: Api, pair: tuple[Controller, Controller]) -> None:
    first, second = pair
    with_volume(api)
    wait_until("counted", lambda: counted(api, 1))
    wait_until("it told of it", lambda: bool(told(api, "TierReady")))
    first.pause()
    second.wait_leads()
    with_volume(api)
    wait_until("counted by the second", lambda: counted(api, 2))
    before = len(first.writes())  # what it had sent before it was frozen has arrived
    first.go_on()
    wait_until("the first stands by", lambda: not first.leads())
    with_volume(api)
    wait_until("counted by the second", lambda: counted(api, 3))
    made = [write for write in first.writes()[before:] if write[2] < 400]
    assert made == [], "what it had in hand was refused by its fence or by the version of the object"
    assert second.leads()


def test_a_lease_that_another_takes_ends_the_term_at_once(api: Api, pair: tuple[Controller, Controller]) -> None:
    first, _ = pair
    taken = {"holderIdentity": "somebody", "renewTime": micro_now(), "leaseDurationSeconds": 3}
    api.merge("leases", "kvtier-controller", {"spec": taken})
    wait_until("the first stands by", lambda: bool(first.said("lease lost")))
    with_volume(api)
    wait_until("somebody's lease ran out", lambda: counted(api, 1))


@pytest.fixture
def own_plane(tmp_path: Path) -> Iterator[ControlPlane]:
    need_tools(*TOOLS)
    with ControlPlane(tmp_path / "run") as plane:
        yield plane


def test_it_waits_for_crds_and_outlives_a_restart_of_the_api_server(own_plane: ControlPlane) -> None:
    with Controller(own_plane, "one", lease_namespace="default") as controller, own_plane.http() as client:
        wait_until("waits for a CRD", lambda: bool(controller.said("waiting for a CRD")))
        install_crds(own_plane)
        api = Api(client, "default")
        with_volume(api)
        wait_until("counted", lambda: counted(api, 1))
        own_plane.stop("kube-apiserver", kill=True)
        wait_until("the term ended", lambda: not controller.leads())
        own_plane.start_apiserver()
        with_volume(api)
        wait_until("counted again", lambda: counted(api, 2))
        assert controller.process is not None
        assert controller.process.poll() is None, "the same process, a new term"


def test_a_node_is_heard_only_with_its_agents_pod_ready(plane: ControlPlane, api: Api) -> None:
    """kubelet probes the agent; the controller reads the pod's condition, and needs no heartbeat of kvtier's own."""
    name = f"c{secrets.token_hex(3)}"
    api.request(
        "POST",
        f"/api/v1/namespaces/{api.namespace}/serviceaccounts",
        json={"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}},
    )
    agent = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "agent",
            "labels": {"app.kubernetes.io/name": "kvtier", "app.kubernetes.io/component": "node"},
        },
        "spec": {"nodeName": f"node-{api.namespace}", "containers": [{"name": "agent", "image": "agent"}]},
    }

    def scrubbed() -> tuple[str, str]:
        found = {it["type"]: it for it in (api.get(TIERS, "t").get("status") or {}).get("conditions", [])}
        return (found["Scrubbed"]["status"], found["Scrubbed"]["reason"]) if found else ("", "")

    where = {"lease_namespace": api.namespace, "namespaces": (api.namespace,), "arguments": ()}
    with Controller(plane, name, **where) as controller:  # type: ignore[arg-type]
        controller.wait_leads()
        with_volume(api)
        wait_until("no agent", lambda: scrubbed() == ("Unknown", "NodeUnreachable"))
        api.create("pods", agent)
        api.set_status("pods", "agent", {"conditions": [{"type": "Ready", "status": "True"}]})
        wait_until("heard", lambda: scrubbed() == ("True", "NothingLeft"))
        api.set_status("pods", "agent", {"conditions": [{"type": "Ready", "status": "False"}]})
        wait_until("silent", lambda: scrubbed() == ("Unknown", "NodeUnreachable"))
