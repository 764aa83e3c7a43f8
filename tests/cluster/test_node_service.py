"""`kvtier node --csi` against a real API server, as the user that the chart gives it; kubelet's calls by hand.

What the node did is in the API, in order and with its receipt; what people ask through the API is done; what the API server
does not answer changes nothing on the node.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from agents import AGENT, RULES, ClusterKubelet, allow_agent, running_kubelet
from api_client import Api, Json, Refused, volume
from controlplane import ControlPlane, wait_until

from csi_agent import CANARY, NODE, Kubelet, Pod
from kvtier_api.volume import VolumeState
from requirements import need_root

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def agent_config(plane: ControlPlane) -> Path:
    need_root()
    return allow_agent(plane)


@pytest.fixture
def kubelet(api: Api, agent_config: Path) -> Iterator[ClusterKubelet]:
    with running_kubelet(api, agent_config) as made:
        yield made


def refused(kubelet: Kubelet, pod: Pod) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        kubelet.publish(pod)
    return caught.value.code(), str(caught.value.details())


def holder(kubelet: Kubelet, pod: Pod) -> subprocess.Popen[bytes]:
    """An engine: a process that has a slot of the pod's volume open, and would have it for ever."""
    code = (
        "import sys; f = open(sys.argv[1], 'r+b'); print('open', flush=True)\nwhile True: __import__('time').sleep(1)"
    )
    slot = kubelet.target(pod) / "slots" / "slot.rank_0"
    process = subprocess.Popen([sys.executable, "-c", code, str(slot)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"open\n"
    return process


def condition(body: Json, type_: str) -> str:
    return str(next(it["status"] for it in body["status"]["conditions"] if it["type"] == type_))


def test_a_volume_is_in_the_api_from_its_first_record_to_its_receipt(kubelet: ClusterKubelet) -> None:
    tier = kubelet.make_tier(nodeSelector={"disk": "nvme"}, workloadSelector={"matchLabels": {"app": "vllm"}})
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    row = kubelet.row_of(pod)
    found = kubelet.volume_of(pod)
    assert found is not None, "on record before it was shown"
    assert found["metadata"]["labels"] == {"kvtier.dev/node": NODE}
    assert found["metadata"]["annotations"] == {"kvtier.dev/system-uuid": "EC2A1B2C-0000"}
    assert [owner["uid"] for owner in found["metadata"]["ownerReferences"]] == [tier["metadata"]["uid"]]
    assert found["spec"] == {
        "tierRef": {"name": "chat", "uid": tier["metadata"]["uid"]},
        "nodeName": NODE,
        "path": row.place,
        "backend": "Fscrypt",
        "cipher": "fscrypt-v2-aes-256-xts",
        "sizePerRank": "1048576",
        "ranks": 2,
        "consumer": {"podUid": pod.uid, "podName": pod.name, "uid": 1000, "gid": 1000},
    }
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    wait_until("it is measured", lambda: condition(kubelet.volume_of(pod) or {}, "Encrypted") == "True")
    status = (kubelet.volume_of(pod) or {})["status"]
    assert status["keyId"] == row.key_id
    assert [file["path"] for file in status["rankFiles"]] == [f"{row.place}/mnt/slots/slot.rank_{n}" for n in (0, 1)]
    assert status["bytesTotal"] == 2 << 20
    kubelet.unpublish(pod)
    wait_until("it is Erased", lambda: kubelet.state_of(pod) == "Erased")
    (receipt,) = kubelet.receipts()
    status = (kubelet.volume_of(pod) or {})["status"]
    assert (status["lastReceipt"]["id"], status["lastReceipt"]["hash"]) == (receipt.id, receipt.hash())
    assert "rankFiles" not in status or status["rankFiles"] == []
    (record,) = kubelet.records()
    assert record["metadata"]["name"] == receipt.id
    assert record["metadata"]["labels"]["kvtier.dev/volume"] == row.volume_id
    assert record["spec"]["trigger"] == receipt.trigger.value
    assert record["status"]["state"] == "Complete"
    (result,) = record["status"]["volumes"]
    assert (result["verified"], result["receiptHash"], result["technique"]) == (True, receipt.hash(), "KeyDestroyed")


def test_a_volume_at_rest_costs_no_writes(kubelet: ClusterKubelet, plane: ControlPlane) -> None:
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    wait_until("it is measured", lambda: condition(kubelet.volume_of(pod) or {}, "Encrypted") == "True")
    told: list[object] = []

    def has_told_all() -> bool:
        before, told[:] = list(told), plane.writes(AGENT)
        time.sleep(3)
        return told == before

    wait_until("all is told", has_told_all)
    before = len(plane.writes(AGENT))
    time.sleep(8)
    assert plane.writes(AGENT)[before:] == []
    assert kubelet.process is not None
    status = Path(f"/proc/{kubelet.process.pid}/status").read_text()
    (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak_kib < 100 * 1024, "the agent's memory, with its CSI service and its connection to the API server"


def test_a_volume_that_the_api_server_does_not_take_is_never_shown(
    kubelet: ClusterKubelet, plane: ControlPlane
) -> None:
    """Record-before-write: here an admission policy refuses the record."""
    tier = kubelet.make_tier()
    pod = kubelet.make_pod()
    admission = "/apis/admissionregistration.k8s.io/v1"
    name = f"no-{kubelet.api.namespace}"
    rule = {
        "apiGroups": ["kvtier.dev"],
        "apiVersions": ["*"],
        "operations": ["CREATE"],
        "resources": ["kvcachevolumes"],
    }
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [
                {"expression": f"object.metadata.namespace != '{kubelet.api.namespace}'", "message": "not today"}
            ],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    kubelet.api.request("POST", f"{admission}/validatingadmissionpolicies", json=policy)
    kubelet.api.request("POST", f"{admission}/validatingadmissionpolicybindings", json=binding)
    try:

        def in_force() -> bool:
            body = volume(tier)
            try:
                kubelet.api.request("POST", kubelet.api.path("kvcachevolumes"), json=body, params={"dryRun": "All"})
            except Refused as error:
                return "not today" in error.message
            return False

        wait_until("the policy acts", in_force)
        code, text = refused(kubelet, pod)
        assert "not today" in text
        assert code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED)
        assert kubelet.left_over() == []
        assert [row.state for row in kubelet.rows()] == [VolumeState.ERASED]
    finally:
        for plural in ("validatingadmissionpolicybindings", "validatingadmissionpolicies"):
            kubelet.api.request("DELETE", f"{admission}/{plural}/{name}")


def test_who_may_not_use_a_tier_reads_why(kubelet: ClusterKubelet) -> None:
    kubelet.make_tier("picky", workloadSelector={"matchLabels": {"team": "search"}})
    kubelet.make_tier("tape", nodeSelector={"disk": "tape"})
    assert refused(kubelet, kubelet.make_pod(tier="nothing"))[0] is grpc.StatusCode.NOT_FOUND
    assert "spec.workloadSelector" in refused(kubelet, kubelet.make_pod(tier="picky"))[1]
    assert "disk=tape" in refused(kubelet, kubelet.make_pod(tier="tape"))[1]
    pod = kubelet.make_pod(tier="picky", labels={"team": "search"}, runAsNonRoot=True, runAsUser=None)
    assert "set securityContext.runAsUser" in refused(kubelet, pod)[1]
    gone = kubelet.make_pod(tier="picky")
    kubelet.api.request("DELETE", kubelet.api.path("pods", gone.name), params={"gracePeriodSeconds": "0"})
    assert refused(kubelet, gone)[0] is grpc.StatusCode.NOT_FOUND


def test_an_outage_changes_nothing_on_the_node_and_everything_is_told_afterwards(
    kubelet: ClusterKubelet, plane: ControlPlane
) -> None:
    """Erases first, reports later, in order; also over a restart of the agent."""
    kubelet.make_tier()
    first, second, third = kubelet.make_pod(), kubelet.make_pod(), kubelet.make_pod()
    kubelet.publish(first)
    kubelet.publish(second)
    wait_until("both are InUse", lambda: kubelet.state_of(first) == kubelet.state_of(second) == "InUse")
    plane.stop("kube-apiserver")
    try:
        kubelet.unpublish(first)
        assert kubelet.row_of(first).state is VolumeState.ERASED
        assert refused(kubelet, third)[0] is grpc.StatusCode.UNAVAILABLE
        kubelet.stop_agent(signal.SIGKILL)
        kubelet.start_agent()
        assert kubelet.row_of(second).state is VolumeState.IN_USE
        kubelet.unpublish(second)
        assert [receipt.deadline_met for receipt in kubelet.receipts()] == [True, True]
    finally:
        plane.start_apiserver()
    wait_until("all is told", lambda: kubelet.state_of(first) == kubelet.state_of(second) == "Erased")
    receipts = [it.id for it in kubelet.receipts()]
    assert {it["metadata"]["name"] for it in kubelet.records()} == set(receipts)
    done = plane.writes(AGENT, resources=("kvcacheerasures",))
    made = [path.rsplit("/", 1)[1] for _, path, code in done if code == 201]
    assert [name for name in made if name in receipts] == receipts, "the first that was erased is told first"
    kubelet.publish(third)


def test_an_api_server_that_does_not_know_the_agents_rights_yet_is_waited_for_and_told_in_order(
    kubelet: ClusterKubelet, plane: ControlPlane
) -> None:
    """One that starts answers before it has read the roles. The first to be told must not come a minute after the second."""
    kubelet.make_tier()
    first, second = kubelet.make_pod(), kubelet.make_pod()
    for pod in (first, second):
        kubelet.publish(pod)
    wait_until("both are InUse", lambda: kubelet.state_of(first) == kubelet.state_of(second) == "InUse")
    binding = f"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/{AGENT}"
    body = kubelet.api.request("GET", binding)
    kubelet.api.request("DELETE", binding)
    try:
        wait_until("it has no right", lambda: not may_list_volumes(plane))
        for pod in (first, second):
            kubelet.unpublish(pod)
        kubelet.wait("it was told nothing", lambda: '"api-away"' in (kubelet.base / "agent.log").read_text())
    finally:
        metadata = {"name": AGENT}
        kubelet.api.request("POST", binding.removesuffix(f"/{AGENT}"), json=body | {"metadata": metadata})
    wait_until("all is told", lambda: kubelet.state_of(first) == kubelet.state_of(second) == "Erased")
    receipts = [it.id for it in kubelet.receipts()]
    done = plane.writes(AGENT, resources=("kvcacheerasures",))
    made = [path.rsplit("/", 1)[1] for _, path, code in done if code == 201]
    assert [name for name in made if name in receipts] == receipts
    assert '"report-refused"' not in (kubelet.base / "agent.log").read_text()


def test_an_event_waits_for_a_right_that_comes(kubelet: ClusterKubelet, plane: ControlPlane) -> None:
    """Roles are read one after another: that of volumes and records may be known before that of events."""
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    try:
        give_rules(kubelet, [rule for rule in RULES if rule["resources"] != ["events"]])
        wait_until("it may tell no event", lambda: not may_tell_events(plane))
        kubelet.unpublish(pod)
        kubelet.wait("it was told none", lambda: '"api-away"' in (kubelet.base / "agent.log").read_text())
        assert kubelet.api.list("events") == []
    finally:
        give_rules(kubelet, RULES)
    wait_until("its end is told", lambda: [it["reason"] for it in kubelet.api.list("events")] == ["Erased"])


def give_rules(kubelet: ClusterKubelet, rules: list[Json]) -> None:
    path = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{AGENT}"
    headers = {"Content-Type": "application/merge-patch+json"}
    kubelet.api.request("PATCH", path, json={"rules": rules}, headers=headers)


def may_tell_events(plane: ControlPlane) -> bool:
    """A body that does not hold: what comes first is whether it may."""
    with plane.http(AGENT) as client:
        return client.post("/apis/events.k8s.io/v1/namespaces/default/events", json={}).status_code != 403


def may_list_volumes(plane: ControlPlane) -> bool:
    with plane.http(AGENT) as client:
        return client.get("/apis/kvtier.dev/v1alpha1/kvcachevolumes").status_code == 200


def test_a_deleted_tier_ends_its_pods_processes_and_shuts_the_target(kubelet: ClusterKubelet) -> None:
    """deletionPolicy Erase: those in use included. The pod's next container finds a read-only directory, not the node's disk."""
    kubelet.make_tier()
    kubelet.make_tier("other")
    pod, spared = kubelet.make_pod(), kubelet.make_pod(tier="other")
    kubelet.publish(pod)
    kubelet.publish(spared)
    kubelet.write_canary(pod)
    engine, bystander = holder(kubelet, pod), holder(kubelet, spared)
    try:
        kubelet.api.delete("kvcachetiers", "chat")
        wait_until("it is Erased", lambda: kubelet.state_of(pod) == "Erased")
        assert engine.wait(60) == -signal.SIGTERM
        assert bystander.poll() is None
        assert kubelet.state_of(spared) == "InUse"
        assert kubelet.receipts()[0].trigger == "Deletion"
        with pytest.raises(OSError, match="Read-only file system"):
            (kubelet.target(pod) / "x").write_bytes(CANARY)
        code, text = refused(kubelet, pod)
        assert "is being deleted" in text
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        kubelet.unpublish(pod)
        assert not kubelet.target(pod).exists()
    finally:
        for process in (engine, bystander):
            process.kill()
            process.wait()
        kubelet.api.merge("kvcachetiers", "chat", {"metadata": {"finalizers": None}})


def test_a_request_erases_what_was_there_before_it_and_nothing_later(kubelet: ClusterKubelet) -> None:
    kubelet.make_tier()
    before = kubelet.make_pod()
    kubelet.publish(before)
    time.sleep(1.1)  # creation timestamps are whole seconds
    body = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {"name": "please"},
        "spec": {"tierRef": {"name": "chat"}, "reason": "a person asked"},
    }
    request = kubelet.api.create("kvcacheerasures", body)
    wait_until("it is Erased", lambda: kubelet.state_of(before) == "Erased")
    (record,) = kubelet.records()
    assert record["metadata"]["labels"]["kvtier.dev/request"] == request["metadata"]["uid"]
    assert record["spec"]["trigger"] == "Request"
    assert "status" not in kubelet.api.get("kvcacheerasures", "please"), "the request's status is the controller's"
    time.sleep(1.1)
    later = kubelet.make_pod()
    kubelet.publish(later)
    kubelet.stop_agent()
    kubelet.start_agent()  # it meets the request again
    time.sleep(4)
    assert kubelet.row_of(later).state is VolumeState.IN_USE
    tenants = {**body, "metadata": {"name": "tenant"}, "spec": {**body["spec"], "scope": "Tenant", "tenant": "acme"}}
    kubelet.api.create("kvcacheerasures", tenants)
    time.sleep(4)
    assert kubelet.row_of(later).state is VolumeState.IN_USE, "a tenant's keys are the engine's to drop"


def test_a_record_that_somebody_deletes_comes_back(kubelet: ClusterKubelet) -> None:
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    first = (kubelet.volume_of(pod) or {})["metadata"]["uid"]
    kubelet.api.delete("kvcachevolumes", kubelet.row_of(pod).volume_id)
    wait_until(
        "it is back", lambda: (kubelet.volume_of(pod) or {"metadata": {"uid": first}})["metadata"]["uid"] != first
    )
    wait_until("with its state", lambda: kubelet.state_of(pod) == "InUse")


def test_the_record_of_an_erased_volume_may_be_forgotten(kubelet: ClusterKubelet) -> None:
    """The controller deletes the oldest ones: they do not come back."""
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    kubelet.unpublish(pod)
    wait_until("it is Erased", lambda: kubelet.state_of(pod) == "Erased")
    kubelet.api.delete("kvcachevolumes", kubelet.row_of(pod).volume_id)
    time.sleep(4)
    assert kubelet.volume_of(pod) is None


def test_a_place_whose_tier_was_removed_by_force_stays_on_record(kubelet: ClusterKubelet, plane: ControlPlane) -> None:
    """Without its owner the garbage collector would take the object: it is made anew without one. Nobody asked to erase."""
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    kubelet.stop_agent()
    kubelet.api.delete("kvcachetiers", "chat")
    kubelet.api.merge("kvcachetiers", "chat", {"metadata": {"finalizers": None}})
    kubelet.api.delete("kvcachevolumes", kubelet.row_of(pod).volume_id)  # as the garbage collector does
    kubelet.start_agent()
    wait_until("it is back, once the tier is known to be gone", lambda: kubelet.state_of(pod) == "InUse")
    wait_until("it is back without an owner", lambda: not collected(kubelet, pod) and kubelet.state_of(pod) == "InUse")
    kubelet.api.delete("kvcachevolumes", kubelet.row_of(pod).volume_id)
    wait_until("it is back", lambda: kubelet.state_of(pod) == "InUse")
    assert "ownerReferences" not in (kubelet.volume_of(pod) or {})["metadata"]
    assert kubelet.row_of(pod).state is VolumeState.IN_USE
    kubelet.unpublish(pod)
    wait_until("it is Erased", lambda: kubelet.state_of(pod) == "Erased")


def collected(kubelet: ClusterKubelet, pod: Pod) -> bool:
    """What the garbage collector does with an object whose owner is gone: it is deleted."""
    found = kubelet.volume_of(pod)
    if found is None or "ownerReferences" not in found["metadata"]:
        return False
    kubelet.api.delete("kvcachevolumes", found["metadata"]["name"])
    return True


def test_an_api_that_was_set_back_learns_what_the_node_knows(kubelet: ClusterKubelet) -> None:
    """etcd restored from an older snapshot: an erased volume is there again, as InUse."""
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    wait_until("it is InUse", lambda: kubelet.state_of(pod) == "InUse")
    older = kubelet.volume_of(pod) or {}
    kubelet.unpublish(pod)
    wait_until("it is Erased", lambda: kubelet.state_of(pod) == "Erased")
    kubelet.stop_agent()
    name = older["metadata"]["name"]
    kubelet.api.delete("kvcachevolumes", name)
    kept = {key: older["metadata"][key] for key in ("name", "labels", "ownerReferences")}
    kubelet.api.create("kvcachevolumes", {**older, "metadata": kept})
    assert kubelet.state_of(pod) == "InUse"
    kubelet.start_agent()
    wait_until("the node's word stands", lambda: kubelet.state_of(pod) == "Erased")


def test_an_administrators_word_ends_a_volume_that_cannot_be_erased(kubelet: ClusterKubelet) -> None:
    """The annotation kvtier.dev/abandon; while the volume is in use it is not followed."""
    kubelet.make_tier()
    pod = kubelet.make_pod()
    kubelet.publish(pod)
    name = kubelet.row_of(pod).volume_id
    kubelet.api.merge("kvcachevolumes", name, {"metadata": {"annotations": {"kvtier.dev/abandon": "disk is broken"}}})
    time.sleep(3)
    assert kubelet.row_of(pod).state is VolumeState.IN_USE
    with (kubelet.target(pod) / "slots" / "slot.rank_0").open("rb"):
        kubelet.unpublish(pod)
        assert kubelet.row_of(pod).state is VolumeState.ABANDONED
        wait_until("it is told", lambda: kubelet.state_of(pod) == "Abandoned")
        assert (kubelet.volume_of(pod) or {})["status"]["reason"] == "disk is broken"
        assert kubelet.records() == [], "nothing is claimed"


def test_foreign_data_is_an_event_of_the_tier(kubelet: ClusterKubelet) -> None:
    tier = kubelet.make_tier()
    folder = kubelet.base / "tiers" / "chat"
    folder.mkdir(mode=0o755)
    (folder / "somebodys.bin").write_bytes(CANARY)
    pod = kubelet.make_pod()
    assert "'somebodys.bin'" in refused(kubelet, pod)[1]

    def events() -> list[Json]:
        return [event for event in kubelet.api.list("events") if event["reason"] == "ForeignData"]

    wait_until("the event", lambda: bool(events()))
    (event,) = events()
    assert event["regarding"]["uid"] == tier["metadata"]["uid"]
    assert event["reportingInstance"] == NODE
    assert "somebodys.bin" in event["note"]


def test_rules_hold_no_wildcard_and_every_one_is_used(plane: ControlPlane) -> None:
    """The other tests of this module run with these rules and no others."""
    assert "*" not in yaml.safe_dump(RULES)
    used = {(verb, path.split("/")[0]) for verb, path, code in plane.writes(AGENT) if code < 400}
    assert {resource for _, resource in used} >= {"kvcachevolumes", "kvcacheerasures", "events"}
