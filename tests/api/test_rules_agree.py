"""The CRD (schema and CEL, two libraries) and the models accept and refuse the same objects."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from kvtier_api.documents import parse_object
from kvtier_api.errors import InvalidResource
from kvtier_api.rules import check_update

HASH = "sha256:" + "0" * 64
REDIS = {"type": "Redis", "endpoint": "rediss://cache:6379"}
S3 = {"type": "S3", "endpoint": "https://s3.example/bucket/prefix"}


def obj(kind: str, spec: dict[str, Any], status: dict[str, Any] | None = None, name: str = "one") -> dict[str, Any]:
    found = {"apiVersion": "kvtier.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
    return found if status is None else found | {"status": status}


def tier(**spec: Any) -> dict[str, Any]:
    return obj("KVCacheTier", {"sizePerRank": "1Gi", "ranks": 2, "path": "/var/lib/kv"} | spec)


def without(spec: dict[str, Any], *names: str) -> dict[str, Any]:
    return spec | {"spec": {name: value for name, value in spec["spec"].items() if name not in names}}


def selector(operator: str, **more: Any) -> dict[str, Any]:
    return {"matchExpressions": [{"key": "app", "operator": operator} | more]}


VOLUME = {
    "tierRef": {"name": "prod", "uid": "u-1"},
    "nodeName": "node-1",
    "path": "/var/lib/kv/kvv-00000000000000000000",
    "backend": "DmCrypt",
    "sizePerRank": "1Gi",
    "ranks": 2,
    "consumer": {"pid": 17, "uid": 1000, "gid": 1000},
}
ERASURE = {"tierRef": {"name": "prod"}, "reason": "asked by the tenant"}
STORE = {"nodeName": "node-1", "backend": "vllm-disk", "path": "/mnt/kv"}


def volume(**spec: Any) -> dict[str, Any]:
    return obj("KVCacheVolume", VOLUME | spec)


def consumer(**fields: Any) -> dict[str, Any]:
    return volume(consumer={"uid": 1, "gid": 1} | fields)


def erasure(**spec: Any) -> dict[str, Any]:
    return obj("KVCacheErasure", ERASURE | spec)


def store(**spec: Any) -> dict[str, Any]:
    return obj("KVCacheStore", STORE | spec)


ACCEPTED = {
    "smallest": tier(),
    "all fields": tier(
        slotSize="64Ki",
        slotPrefix="kv",
        encryption={"backend": "DmCrypt", "cipher": "aes-xts-plain64", "sealSlots": True},
        device="/dev/vg0/kv",
        salt={"policy": "PerTenant", "hash": "sha256_cbor"},
        retention={"maxAge": "1h30m"},
        scrub={"deadline": "250ms", "discard": False, "verify": "None"},
        nodeSelector={"disk": "nvme"},
        workloadSelector={"matchLabels": {"app": "chat"}},
        model={"name": "m", "revision": "r", "weightsDigest": HASH},
        governance={"owner": "team", "purpose": "speed", "dataCategories": ["prompts"], "dataSubjects": ["users"]},
        secondary=[REDIS | {"maxAge": "1h"}, S3 | {"credentialsSecretRef": {"name": "s", "key": "k"}}],
        deletionPolicy="Erase",
    ),
    "size as integer": tier(sizePerRank=1 << 30),
    "size decimal": tier(sizePerRank="1.5Gi"),
    "size exponent": tier(sizePerRank="1e9"),
    "size 1Pi": tier(sizePerRank="1Pi"),
    "slot equals size": tier(sizePerRank="1Mi", slotSize="1024Ki"),
    "slot 4Ki": tier(slotSize="4Ki"),
    "slot 12Ki": tier(slotSize="12Ki"),
    "slot 100Ki": tier(slotSize="100Ki"),
    "slot integer": tier(slotSize=8192),
    "slot digits": tier(slotSize="8192"),
    "ranks most": tier(ranks=1024),
    "path one component": tier(path="/a"),
    "path dots in names": tier(path="/a/..b/c..d/.e"),
    "path 255": tier(path="/" + "a" * 255),
    "path with space": tier(path="/a b"),
    "device with Auto": tier(device="/dev/sdb1"),
    "unsealed with DmCrypt": tier(encryption={"backend": "DmCrypt", "sealSlots": False}),
    "SealOnly": tier(encryption={"backend": "SealOnly"}),
    "PerTenant": tier(salt={"policy": "PerTenant"}),
    "Shared unsealed": tier(salt={"policy": "Shared"}, encryption={"sealSlots": False}),
    "deadline 1h": tier(scrub={"deadline": "1h"}),
    "secondary age equal": tier(secondary=[REDIS | {"maxAge": "24h"}]),
    "secondary age equal in minutes": tier(secondary=[REDIS | {"maxAge": "1440m"}]),
    "selector In": tier(workloadSelector=selector("In", values=["a"])),
    "selector Exists": tier(workloadSelector=selector("Exists")),
    "selector Exists empty values": tier(workloadSelector=selector("Exists", values=[])),
    "empty selector": tier(workloadSelector={}),
    "volume": volume(),
    "volume of a pod": consumer(podUid="b7", podName="chat-0"),
    "erasure": erasure(),
    "erasure of a tenant": erasure(scope="Tenant", tenant="acme"),
    "erasure older": erasure(scope="OlderThan", olderThan="1h"),
    "erasure by an agent": erasure(trigger="PowerLoss"),
    "store": store(),
    "store remote": store(remoteHost="redis.example:6379"),
}

# name → (object, part of the path that both must blame)
REFUSED = {
    "no size": (without(tier(), "sizePerRank"), "sizePerRank"),
    "no path": (without(tier(), "path"), "path"),
    "ranks 0": (tier(ranks=0), "ranks"),
    "ranks negative": (tier(ranks=-1), "ranks"),
    "ranks too many": (tier(ranks=1025), "ranks"),
    "ranks text": (tier(ranks="8"), "ranks"),
    "ranks bool": (tier(ranks=True), "ranks"),
    "ranks float": (tier(ranks=1.5), "ranks"),
    "size negative": (tier(sizePerRank=-1), "sizePerRank"),
    "size negative text": (tier(sizePerRank="-1Gi"), "sizePerRank"),
    "size zero": (tier(sizePerRank=0), "slotSize"),
    "size unit": (tier(sizePerRank="100GB"), "sizePerRank"),
    "size milli": (tier(sizePerRank="100m"), "sizePerRank"),
    "size empty": (tier(sizePerRank=""), "sizePerRank"),
    "size newline": (tier(sizePerRank="1Gi\n"), "sizePerRank"),
    "size bool": (tier(sizePerRank=True), "sizePerRank"),
    "size list": (tier(sizePerRank=["1Gi"]), "sizePerRank"),
    "size 2Pi": (tier(sizePerRank="2Pi"), "sizePerRank"),
    "size over int64": (tier(sizePerRank="99999999999E"), "sizePerRank"),
    "slot over size": (tier(slotSize="2Gi"), "slotSize"),
    "slot over size by a decimal": (tier(sizePerRank="0.9Mi"), "slotSize"),
    "slot 6Ki": (tier(slotSize="6Ki"), "slotSize"),
    "slot 14Ki": (tier(slotSize="14Ki"), "slotSize"),
    "slot 2Ki": (tier(slotSize="2Ki"), "slotSize"),
    "slot 5000": (tier(slotSize=5000), "slotSize"),
    "slot 0": (tier(slotSize=0), "slotSize"),
    "slot text 5000": (tier(slotSize="5000"), "slotSize"),
    "slot 1.5Mi": (tier(slotSize="1.5Mi"), "slotSize"),
    "slot 1M": (tier(slotSize="1M"), "slotSize"),
    "path relative": (tier(path="var/kv"), "path"),
    "path empty": (tier(path=""), "path"),
    "path root": (tier(path="/"), "path"),
    "path last slash": (tier(path="/a/"), "path"),
    "path double slash": (tier(path="/a//b"), "path"),
    "path begins double": (tier(path="//a"), "path"),
    "path dot dot": (tier(path="/a/../b"), "path"),
    "path dot dot last": (tier(path="/a/.."), "path"),
    "path dot": (tier(path="/a/./b"), "path"),
    "path newline": (tier(path="/a\n"), "path"),
    "path newline dots": (tier(path="/a/..\n"), "path"),
    "path tab": (tier(path="/a\tb"), "path"),
    "path NUL": (tier(path="/a\0b"), "path"),
    "path not ASCII": (tier(path="/é"), "path"),
    "path delete": (tier(path="/a\x7f"), "path"),
    "path 256": (tier(path="/" + "a" * 256), "path"),
    "path too long": (tier(path="/a" * 513), "path"),
    "path number": (tier(path=7), "path"),
    "device relative": (tier(device="sdb"), "device"),
    "device dots": (tier(device="/dev/../etc"), "device"),
    "device with Fscrypt": (tier(device="/dev/sdb", encryption={"backend": "Fscrypt"}), "device"),
    "device with SealOnly": (tier(device="/dev/sdb", encryption={"backend": "SealOnly"}), "device"),
    "backend unknown": (tier(encryption={"backend": "Luks"}), "backend"),
    "backend case": (tier(encryption={"backend": "dmcrypt"}), "backend"),
    "cipher unknown": (tier(encryption={"cipher": "aes-cbc"}), "cipher"),
    "seal text": (tier(encryption={"sealSlots": "true"}), "sealSlots"),
    "seal number": (tier(encryption={"sealSlots": 1}), "sealSlots"),
    "SealOnly unsealed": (tier(encryption={"backend": "SealOnly", "sealSlots": False}), "sealSlots"),
    "PerTenant unsealed": (tier(salt={"policy": "PerTenant"}, encryption={"sealSlots": False}), "sealSlots"),
    "salt policy": (tier(salt={"policy": "Optional"}), "policy"),
    "salt hash": (tier(salt={"hash": "md5"}), "hash"),
    "age without unit": (tier(retention={"maxAge": "30"}), "maxAge"),
    "age number": (tier(retention={"maxAge": 30}), "maxAge"),
    "age days": (tier(retention={"maxAge": "7d"}), "maxAge"),
    "age empty": (tier(retention={"maxAge": ""}), "maxAge"),
    "age zero": (tier(retention={"maxAge": "0s"}), "maxAge"),
    "age negative": (tier(retention={"maxAge": "-1h"}), "maxAge"),
    "age decimal": (tier(retention={"maxAge": "1.5h"}), "maxAge"),
    "age order": (tier(retention={"maxAge": "1m1h"}), "maxAge"),
    "age newline": (tier(retention={"maxAge": "1h\n"}), "maxAge"),
    "age space": (tier(retention={"maxAge": "1 h"}), "maxAge"),
    "deadline over 1h": (tier(scrub={"deadline": "1h1ms"}), "deadline"),
    "verify": (tier(scrub={"verify": "Always"}), "verify"),
    "prefix upper": (tier(slotPrefix="Slot"), "slotPrefix"),
    "prefix slash": (tier(slotPrefix="a/b"), "slotPrefix"),
    "prefix dot": (tier(slotPrefix=".a"), "slotPrefix"),
    "prefix long": (tier(slotPrefix="a" * 64), "slotPrefix"),
    "prefix empty": (tier(slotPrefix=""), "slotPrefix"),
    "prefix newline": (tier(slotPrefix="a\n"), "slotPrefix"),
    "digest": (tier(model={"name": "m", "weightsDigest": "sha256:xyz"}), "weightsDigest"),
    "governance without owner": (tier(governance={"purpose": "p"}), "owner"),
    "redis with https": (tier(secondary=[REDIS | {"endpoint": "https://x"}]), "secondary[0]"),
    "s3 with redis": (tier(secondary=[S3 | {"endpoint": "redis://x"}]), "secondary[0]"),
    "endpoint without host": (tier(secondary=[S3 | {"endpoint": "https:///x"}]), "secondary[0]"),
    "endpoint password": (tier(secondary=[REDIS | {"endpoint": "redis://:pw@h"}]), "secondary[0]"),
    "endpoint query": (tier(secondary=[S3 | {"endpoint": "https://h?token=x"}]), "secondary[0]"),
    "endpoint space": (tier(secondary=[S3 | {"endpoint": "https://h x"}]), "secondary[0]"),
    "secondary too old": (tier(secondary=[REDIS | {"maxAge": "25h"}]), "secondary"),
    "secondary second too old": (
        tier(retention={"maxAge": "1h"}, secondary=[REDIS | {"maxAge": "1h"}, S3 | {"maxAge": "61m"}]),
        "secondary",
    ),
    "nine secondaries": (tier(secondary=[REDIS] * 9), "secondary"),
    "secret without key": (tier(secondary=[REDIS | {"credentialsSecretRef": {"name": "s"}}]), "key"),
    "deletion policy": (tier(deletionPolicy="Retain"), "deletionPolicy"),
    "selector In empty": (tier(workloadSelector=selector("In", values=[])), "values"),
    "selector In without": (tier(workloadSelector=selector("In")), "values"),
    "selector Exists with": (tier(workloadSelector=selector("Exists", values=["a"])), "values"),
    "selector operator": (tier(workloadSelector=selector("Gt", values=["1"])), "operator"),
    "unknown field": (tier(sizePerRanks="1Gi"), "sizePerRanks"),
    "unknown nested field": (tier(encryption={"backends": "Auto"}), "backends"),
    "snake case": (tier(slot_size="1Mi"), "slot_size"),
    "name too long": (tier() | {"metadata": {"name": "a" * 64}}, ""),
    "name with dot": (tier() | {"metadata": {"name": "a.b"}}, ""),
    "volume of nobody": (consumer(), "consumer"),
    "volume of two": (consumer(pid=1, podUid="b"), "consumer"),
    "volume Auto": (volume(backend="Auto"), "backend"),
    "volume path": (volume(path="/a/../b"), "path"),
    "volume without node": (without(volume(), "nodeName"), "nodeName"),
    "volume state": (obj("KVCacheVolume", VOLUME, {"state": "Gone"}), "state"),
    "erasure without reason": (without(erasure(), "reason"), "reason"),
    "tenant without name": (erasure(scope="Tenant"), "tenant"),
    "name without tenant": (erasure(tenant="acme"), "tenant"),
    "older without age": (erasure(scope="OlderThan"), "olderThan"),
    "age without older": (erasure(scope="All", olderThan="1h"), "olderThan"),
    "trigger": (erasure(trigger="Whim"), "trigger"),
    "store credentials": (store(remoteHost="u:p@h"), "remoteHost"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_by_schema_cel_and_model(server: Any, name: str) -> None:
    assert server.refusals(ACCEPTED[name]) == []
    parse_object(ACCEPTED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_schema_cel_and_model_for_the_same_field(server: Any, name: str) -> None:
    refused, blamed = REFUSED[name]
    found = server.refusals(refused)
    assert found
    assert any(blamed in refusal.partition(": ")[0] for refusal in found), found
    with pytest.raises(InvalidResource) as raised:
        parse_object(refused)
    assert blamed in raised.value.obj + raised.value.cause
    assert raised.value.remedy


def moved(before: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> tuple[dict[str, Any], dict[str, Any]]:
    after = copy.deepcopy(before)
    change(after)
    return before, after


COMPLETE = obj("KVCacheErasure", ERASURE, {"state": "Complete", "volumes": []})
ERASED = obj("KVCacheVolume", VOLUME, {"state": "Erased"})
WITH_DEVICE = tier(device="/dev/sdb")

UPDATES_ACCEPTED = {
    "ranks": moved(tier(), lambda it: it["spec"].update(ranks=4)),
    "size": moved(tier(), lambda it: it["spec"].update(sizePerRank="2Gi")),
    "seal": moved(tier(), lambda it: it["spec"].update(encryption={"sealSlots": False})),
    "device kept": moved(WITH_DEVICE, lambda it: it["spec"].update(ranks=4)),
    "volume state": moved(
        obj("KVCacheVolume", VOLUME, {"state": "Dying"}), lambda it: it["status"].update(state="Erasing")
    ),
    "volume first status": moved(volume(), lambda it: it.update(status={"state": "Planned"})),
    "erased volume, same state": moved(ERASED, lambda it: it["status"].update(residualBytes=0)),
    "erasure begins": moved(erasure(), lambda it: it.update(status={"state": "Complete"})),
    "complete unchanged": moved(COMPLETE, lambda it: it["metadata"].update(labels={"a": "b"})),
    "store seen": moved(store(), lambda it: it.update(status={"declaration": "Declared"})),
}
UPDATES_REFUSED = {
    "path": moved(tier(), lambda it: it["spec"].update(path="/var/lib/kv2")),
    "backend": moved(tier(), lambda it: it["spec"].update(encryption={"backend": "SealOnly"})),
    "backend back to default": moved(tier(encryption={"backend": "DmCrypt"}), lambda it: it["spec"].pop("encryption")),
    "device changed": moved(WITH_DEVICE, lambda it: it["spec"].update(device="/dev/sdc")),
    "device removed": moved(WITH_DEVICE, lambda it: it["spec"].pop("device")),
    "device added": moved(tier(), lambda it: it["spec"].update(device="/dev/sdb")),
    "volume path": moved(volume(), lambda it: it["spec"].update(path="/elsewhere")),
    "volume consumer": moved(volume(), lambda it: it["spec"]["consumer"].update(pid=18)),
    "volume size spelling": moved(volume(), lambda it: it["spec"].update(sizePerRank="1024Mi")),
    "erased volume comes back": moved(ERASED, lambda it: it["status"].update(state="Ready")),
    "erased volume forgets": moved(ERASED, lambda it: it.pop("status")),
    "erasure scope": moved(erasure(), lambda it: it["spec"].update(reason="another")),
    "complete changed": moved(COMPLETE, lambda it: it["status"].update(residualBytes=7)),
    "complete reopened": moved(COMPLETE, lambda it: it["status"].update(state="Pending")),
    "complete forgotten": moved(COMPLETE, lambda it: it.pop("status")),
    "store path": moved(store(), lambda it: it["spec"].update(path="/other")),
}


@pytest.mark.parametrize("name", UPDATES_ACCEPTED)
def test_update_accepted_by_cel_and_model(server: Any, name: str) -> None:
    before, after = UPDATES_ACCEPTED[name]
    assert server.refusals(after, before) == []
    check_update(parse_object(before), parse_object(after))


@pytest.mark.parametrize("name", UPDATES_REFUSED)
def test_update_refused_by_cel_and_model(server: Any, name: str) -> None:
    before, after = UPDATES_REFUSED[name]
    assert server.refusals(after) == [], "it is the transition that must be refused, not the object"
    assert server.refusals(after, before)
    with pytest.raises(InvalidResource):
        check_update(parse_object(before), parse_object(after))


def test_every_cel_rule_is_seen_to_hold_and_to_fail(server: Any) -> None:
    """A rule that no table breaks is a rule that nobody tested."""
    messages = {
        refusal.partition(": ")[2]
        for found in [
            *(server.refusals(refused) for refused, _ in REFUSED.values()),
            *(server.refusals(after, before) for before, after in UPDATES_REFUSED.values()),
        ]
        for refusal in found
    }
    for kind in server.crds:
        for message in _messages(server.schema(kind)):
            assert message in messages, f"no table breaks: {message}"


def _messages(schema: dict[str, Any]) -> set[str]:
    found = {rule["message"] for rule in schema.get("x-kubernetes-validations", [])}
    below = [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for part in [*schema.get("properties", {}).values(), *below]:
        found |= _messages(part)
    return found


def test_a_rule_that_is_removed_is_missed_by_the_tables(server: Any) -> None:
    """The tables themselves are tried: without its CEL rules, the CRD accepts what the models refuse."""
    refused, _ = REFUSED["PerTenant unsealed"]
    schema = server.schema("KVCacheTier")["properties"]["spec"]
    kept = schema.pop("x-kubernetes-validations")
    try:
        assert server.refusals(refused) == []
    finally:
        schema["x-kubernetes-validations"] = kept
    assert server.refusals(refused)
