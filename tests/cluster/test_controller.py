"""The controller, a real process, on a real API server; the test writes volumes as node agents do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from api_client import Api, Json, Refused, micro_now, node, tier, volume, volume_status
from controllers import Controller
from controlplane import ControlPlane, wait_until

VOLUMES, TIERS, ERASURES = "kvcachevolumes", "kvcachetiers", "kvcacheerasures"


@pytest.fixture(scope="module")
def controller(plane: ControlPlane) -> Iterator[Controller]:
    """One replica for the whole cluster, which does not look at agents' pods."""
    with Controller(plane, "one", lease_namespace="default", arguments=("--agent-selector", "", "--resync", "5")) as it:
        it.wait_leads()
        yield it


@pytest.fixture
def on_node(api: Api) -> str:
    name = f"node-{api.namespace}"
    api.create("nodes", node(name))
    return name


def conditions(of: Json) -> dict[str, tuple[str, str]]:
    return {it["type"]: (it["status"], it["reason"]) for it in of.get("status", {}).get("conditions", [])}


def wait_condition(api: Api, name: str, type_: str, status: str, reason: str) -> Json:
    """The tier, once its condition is that."""
    found: list[Json] = []

    def holds() -> bool:
        found[:] = [api.get(TIERS, name)]
        return conditions(found[0]).get(type_) == (status, reason)

    try:
        wait_until(f"{name}: {type_}={status} {reason}", holds)
    except TimeoutError as error:
        raise TimeoutError(f"{error}; it is {conditions(found[0])}") from None
    return found[0]


def events(api: Api, reason: str) -> list[Json]:
    return [it for it in api.list("events") if it["reason"] == reason]


def wait_event(api: Api, reason: str) -> Json:
    wait_until(f"event {reason}", lambda: bool(events(api, reason)))
    return events(api, reason)[0]


def wait_gone(api: Api, plural: str, name: str) -> None:
    wait_until(f"{name} gone", lambda: api.find(plural, name) is None)


def make_volume(api: Api, of: Json, node_name: str, state: str = "InUse", **status: object) -> str:
    made = api.create(VOLUMES, volume(of, node_name) | {"status": volume_status(state) | status})
    return str(made["metadata"]["name"])


def erase(api: Api, name: str) -> None:
    api.set_status(VOLUMES, name, volume_status("Erased"))


def request_erasure(api: Api, name: str, of: str, **spec: object) -> None:
    api.create(
        ERASURES,
        {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheErasure",
            "metadata": {"name": name},
            "spec": {"tierRef": {"name": of}, "reason": "a test asks", **spec},
        },
    )


def test_a_new_tier_has_every_condition_a_finalizer_and_an_event(api: Api, controller: Controller) -> None:
    api.create(TIERS, tier("t", governance={"owner": "team-a"}))
    made = wait_condition(api, "t", "Ready", "Unknown", "NoVolumes")
    assert made["metadata"]["finalizers"] == ["kvtier.dev/erase"]
    assert set(conditions(made)) == {
        *("Ready", "Provisioned", "Encrypted", "SaltEnforced"),
        *("RetentionEnforced", "Scrubbed", "HostHardened", "Mapped"),
    }
    assert all(it["observedGeneration"] == 1 for it in made["status"]["conditions"])
    declared = wait_event(api, "TierDeclared")
    assert declared["type"] == "Normal"
    assert "team-a" in declared["note"]
    assert declared["regarding"]["uid"] == made["metadata"]["uid"]


def test_measured_volumes_turn_the_conditions_and_are_counted(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    make_volume(api, of, on_node)
    other = make_volume(api, of, on_node, "Ready")
    counts = {"total": 2, "ready": 1, "inUse": 1, "erasing": 0, "failed": 0, "abandoned": 0}
    wait_until("both counted", lambda: api.get(TIERS, "t").get("status", {}).get("volumes") == counts)
    status = api.get(TIERS, "t")["status"]
    assert conditions({"status": status})["Ready"] == ("True", "AllGuaranteesHold")
    assert (status["nodes"], status["bytesTotal"], status["backend"]) == (1, 4 * 1024**3, "Fscrypt")
    api.set_status(VOLUMES, other, volume_status("Ready", conditions={"Encrypted": ("False", "NotEncrypted")}))
    status = wait_condition(api, "t", "Encrypted", "False", "NotEncrypted")["status"]
    assert conditions({"status": status})["Ready"] == ("False", "GuaranteeNotMet")
    assert wait_event(api, "NotEncrypted")["type"] == "Warning"


def test_a_condition_keeps_its_time_while_its_status_stays(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    make_volume(api, of, on_node)
    before = wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    time.sleep(1.1)  # times have whole seconds
    api.merge(TIERS, "t", {"spec": {"retention": {"maxAge": "12h"}}})
    wait_until("generation 2 observed", lambda: api.get(TIERS, "t")["status"].get("observedGeneration") == 2)
    after = api.get(TIERS, "t")

    def times(of: Json) -> dict[str, str]:
        return {it["type"]: it["lastTransitionTime"] for it in of["status"]["conditions"]}

    assert times(after) == times(before)
    assert all(it["observedGeneration"] == 2 for it in after["status"]["conditions"])


def test_at_rest_nothing_is_written(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    wait_at_rest(controller)
    before = controller.writes()
    # What a kubelet and an agent do all day: a Node's status, an annotation. And two full lists.
    api.set_status("nodes", on_node, {"conditions": [{"type": "Ready", "status": "True", "message": "again"}]})
    api.merge("nodes", on_node, {"metadata": {"annotations": {"a": "b"}}})
    wait_full_lists(controller)
    assert controller.writes() == before


def test_one_changed_volume_costs_one_status_write(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    names = [make_volume(api, of, on_node, "Ready") for _ in range(20)]
    wait_until("20 counted", lambda: api.get(TIERS, "t").get("status", {}).get("volumes", {}).get("ready") == 20)
    wait_at_rest(controller)
    before = len(controller.writes(TIERS))
    api.set_status(VOLUMES, names[0], volume_status("InUse"))
    wait_until("1 in use", lambda: api.get(TIERS, "t")["status"]["volumes"]["inUse"] == 1)
    wait_at_rest(controller)
    assert len(controller.writes(TIERS)) - before <= 2


def wait_full_lists(controller: Controller) -> None:
    """Until everything was read after this call, and every tier looked at since: a look follows its list."""
    name = 'kvtier_resyncs_total{result="done"}'
    before = controller.metric(name)
    wait_until("full lists", lambda: controller.metric(name) >= before + 2)


def wait_at_rest(controller: Controller) -> None:
    """Until nothing is written, of any tier, from one full list to another: events come after the statuses that they tell of."""

    def is_quiet() -> bool:
        before = controller.writes()
        wait_full_lists(controller)
        return controller.writes() == before

    wait_until("at rest", is_quiet)


def test_a_deleted_tier_stays_until_its_last_volume_is_erased(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    first, second = make_volume(api, of, on_node), make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    api.delete(TIERS, "t")
    wait_condition(api, "t", "Ready", "False", "Deleting")
    assert first in wait_event(api, "DeletionWaits")["note"]
    erase(api, first)
    wait_until("one left", lambda: api.get(TIERS, "t")["status"]["volumes"]["total"] == 1)
    assert api.find(TIERS, "t") is not None
    erase(api, second)
    wait_gone(api, TIERS, "t")
    wait_event(api, "DeletionDone")


def test_a_volume_that_is_deleted_by_hand_stays_on_record_until_it_is_erased(
    api: Api, controller: Controller, on_node: str
) -> None:
    of = api.create(TIERS, tier("t"))
    made = api.create(VOLUMES, volume(of, on_node, finalizer=False) | {"status": volume_status("InUse")})
    name = made["metadata"]["name"]
    wait_until("held", lambda: "kvtier.dev/erase" in api.get(VOLUMES, name)["metadata"].get("finalizers", []))
    api.delete(VOLUMES, name)
    api.delete(TIERS, "t")
    wait_condition(api, "t", "Ready", "False", "Deleting")
    assert api.find(VOLUMES, name) is not None
    erase(api, name)
    wait_gone(api, VOLUMES, name)
    wait_gone(api, TIERS, "t")


def test_a_silent_node_makes_scrubbed_unknown_and_holds_the_tier(
    api: Api, controller: Controller, on_node: str
) -> None:
    of = api.create(TIERS, tier("t"))
    name = make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    api.set_status("nodes", on_node, {"conditions": [{"type": "Ready", "status": "Unknown"}]})
    wait_condition(api, "t", "Scrubbed", "Unknown", "NodeUnreachable")
    api.delete("nodes", on_node)
    api.delete(TIERS, "t")
    wait_condition(api, "t", "Ready", "False", "Deleting")
    found = wait_event(api, "NodeUnreachable")
    assert on_node in found["note"]
    assert name in found["note"]
    assert api.get(TIERS, "t")["metadata"]["finalizers"] == ["kvtier.dev/erase"]


def test_another_boot_id_of_the_same_machine_proves_the_keys_lost(
    api: Api, controller: Controller, on_node: str
) -> None:
    of = api.create(TIERS, tier("t"))
    name = make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    api.set_status("nodes", on_node, {"conditions": [{"type": "Ready", "status": "False"}]})
    wait_condition(api, "t", "Scrubbed", "Unknown", "NodeUnreachable")
    api.delete(TIERS, "t")
    wait_condition(api, "t", "Ready", "False", "Deleting")
    api.set_status("nodes", on_node, {"nodeInfo": {"bootID": "boot-2"}})
    wait_gone(api, TIERS, "t")
    record = api.get(ERASURES, f"{name}-keys-lost")
    assert record["status"]["state"] == "Complete"
    (result,) = record["status"]["volumes"]
    assert (result["technique"], result["verified"]) == ("KeyLost", False)
    assert "boot-2" in wait_event(api, "KeysLost")["note"]
    assert api.get(VOLUMES, name)["status"]["state"] == "InUse", "only a node says Erased"


def test_abandon_needs_a_reason_and_a_silent_node(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    name = make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    api.merge(VOLUMES, name, {"metadata": {"annotations": {"kvtier.dev/abandon": " "}}})
    wait_event(api, "AbandonRefused")
    api.merge(VOLUMES, name, {"metadata": {"annotations": {"kvtier.dev/abandon": "disk was shredded, ticket 7"}}})
    wait_full_lists(controller)
    assert api.get(VOLUMES, name)["status"]["state"] == "InUse", "its node is heard: the agent does it, with a receipt"
    api.delete("nodes", on_node)
    wait_until("abandoned", lambda: api.get(VOLUMES, name)["status"]["state"] == "Abandoned")
    assert "ticket 7" in api.get(VOLUMES, name)["status"]["reason"]
    wait_condition(api, "t", "Scrubbed", "False", "Abandoned")
    assert "ticket 7" in wait_event(api, "Abandoned")["note"]
    api.delete(TIERS, "t")
    wait_gone(api, TIERS, "t")


def test_a_request_collects_what_each_node_did_and_is_then_a_record(
    api: Api, controller: Controller, on_node: str
) -> None:
    of = api.create(TIERS, tier("t"))
    first, second = make_volume(api, of, on_node), make_volume(api, of, on_node)
    request_erasure(api, "e", "t")
    wait_until("pending", lambda: conditions(api.get(ERASURES, "e")).get("Complete") == ("Unknown", "Pending"))
    time.sleep(1.1)  # creation times have whole seconds
    later = make_volume(api, of, on_node)
    uid = api.get(ERASURES, "e")["metadata"]["uid"]
    result = {
        "volumeId": first,
        "nodeName": on_node,
        "technique": "KeyDestroyed",
        "begin": micro_now(),
        "end": micro_now(),
        "verified": True,
        "receiptId": "r1",
        "receiptHash": "h1",
    }
    record = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheErasure",
        "metadata": {"name": first, "labels": {"kvtier.dev/volume": first, "kvtier.dev/request": uid}},
        "spec": {"tierRef": {"name": "t"}, "reason": "e", "trigger": "Request"},
        "status": {"state": "Complete", "volumes": [result], "end": micro_now()},
    }
    api.create(ERASURES, record)
    wait_until("erasing", lambda: api.get(ERASURES, "e")["status"]["state"] == "Erasing")
    erase(api, second)
    wait_until("complete", lambda: api.get(ERASURES, "e")["status"]["state"] == "Complete")
    done = api.get(ERASURES, "e")["status"]
    assert {it["volumeId"]: it["receiptId"] for it in done["volumes"]}[first] == "r1"
    assert {it["volumeId"] for it in done["volumes"]} == {first, second}
    assert later not in {it["volumeId"] for it in done["volumes"]}
    wait_event(api, "ErasureComplete")
    with pytest.raises(Refused, match="complete erasure"):
        api.set_status(ERASURES, "e", {"residualBytes": 1})
    wait_until("last erasure", lambda: "lastErasure" in api.get(TIERS, "t")["status"])
    assert api.get(TIERS, "t")["status"]["lastErasure"]["receiptId"] == "r1"


def test_a_request_for_a_tier_that_is_not_there_fails_and_says_so(api: Api, controller: Controller) -> None:
    request_erasure(api, "e", "nowhere")
    wait_until("failed", lambda: api.get(ERASURES, "e").get("status", {}).get("state") == "Failed")
    assert "nowhere" in wait_event(api, "ErasureFailed")["note"]


def test_somebody_elses_write_in_between_is_a_conflict_and_loses_nothing(
    api: Api, controller: Controller, on_node: str
) -> None:
    of = api.create(TIERS, tier("t"))
    name = make_volume(api, of, on_node)
    wait_condition(api, "t", "Ready", "True", "AllGuaranteesHold")
    for number in range(30):
        api.merge(TIERS, "t", {"metadata": {"annotations": {"n": str(number)}}})
        api.set_status(VOLUMES, name, volume_status("InUse" if number % 2 else "Ready"))
    wait_until("last state counted", lambda: api.get(TIERS, "t")["status"]["volumes"]["inUse"] == 1)
    wait_at_rest(controller)
    assert api.get(TIERS, "t")["metadata"]["annotations"]["n"] == "29"
    assert api.get(TIERS, "t")["metadata"]["finalizers"] == ["kvtier.dev/erase"]


def test_a_memory_that_is_wrong_is_corrected_by_the_next_resync(api: Api, controller: Controller) -> None:
    """What a watch gap looks like: the tier's status is taken away and nothing tells the controller but the list."""
    api.create(TIERS, tier("t"))
    wait_condition(api, "t", "Ready", "Unknown", "NoVolumes")
    api.set_status(TIERS, "t", {"conditions": [], "volumes": None})
    wait_condition(api, "t", "Ready", "Unknown", "NoVolumes")


def test_a_tier_below_another_ones_path_is_invalid_until_the_other_one_goes(
    api: Api, controller: Controller, on_node: str
) -> None:
    root = f"/srv/{api.namespace}"
    first = api.create(TIERS, tier("a-first", path=root))
    wait_condition(api, "a-first", "Ready", "Unknown", "NoVolumes")
    second = api.create(TIERS, tier("b-second", path=f"{root}/below"))
    api.create(TIERS, tier("c-elsewhere", path=f"{root}/else", nodeSelector={"pool": "b"}))
    api.merge(TIERS, "a-first", {"spec": {"nodeSelector": {"pool": "a"}}})
    message = ready_message(wait_condition(api, "b-second", "Ready", "False", "InvalidSpec"))
    for part in (f"spec.path={root}/below", f"below {root},", f"tier {api.namespace}/a-first", "delete the tier"):
        assert part in message
    make_volume(api, second, on_node)
    measured = conditions(wait_condition(api, "b-second", "Encrypted", "True", "KernelKeyMeasured"))
    assert measured["Ready"] == ("False", "InvalidSpec")
    assert measured["Provisioned"][0] == "True", "what runs stays as it was"
    wait_until("told", lambda: "b-second" in {it["regarding"]["name"] for it in events(api, "InvalidSpec")})
    wait_condition(api, "c-elsewhere", "Ready", "Unknown", "NoVolumes")
    kept = make_volume(api, first, on_node)
    wait_until("counted", lambda: api.get(TIERS, "a-first")["status"]["volumes"]["total"] == 1)
    api.delete(TIERS, "a-first")
    wait_condition(api, "a-first", "Ready", "False", "Deleting")
    assert conditions(api.get(TIERS, "b-second"))["Ready"] == ("False", "InvalidSpec"), "its volume is there still"
    erase(api, kept)
    wait_gone(api, TIERS, "a-first")
    wait_condition(api, "b-second", "Ready", "True", "AllGuaranteesHold")


def ready_message(of: Json) -> str:
    return next(str(it["message"]) for it in of["status"]["conditions"] if it["type"] == "Ready")


def test_the_metrics_name_tiers_and_no_tenants(api: Api, controller: Controller, on_node: str) -> None:
    of = api.create(TIERS, tier("t"))
    make_volume(api, of, on_node, "Erasing", residualBytes=4096)
    labels = f'{{namespace="{api.namespace}",tier="t"}}'
    wait_until("residual", lambda: controller.metric(f"kvtier_tier_residual_bytes{labels}") == 4096)
    text = controller.metrics_text()
    labels_used = {name for part in re.findall(r"{(.*?)}", text) for name in re.findall(r"(\w+)=", part)}
    assert labels_used <= {
        *("namespace", "tier", "state", "type", "reason", "result", "verb", "kind", "code", "trigger", "le"),
    }
