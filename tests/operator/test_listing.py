"""What is known already is not read again: pages of a list, and events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvtier_operator.facts import Body, VolumeFacts, identity, volume_facts
from kvtier_operator.feed import Feed
from kvtier_operator.listing import page
from kvtier_operator.view import View
from operator_facts import a_volume

KEY = ("n", "t")


def an_object(name: str, version: str = "7", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": version}, **more}


def a_page(*items: dict[str, Any], following: str = "") -> bytes:
    metadata = {"resourceVersion": "9", **({"continue": following} if following else {})}
    return json.dumps({"kind": "ThingList", "apiVersion": "v1", "metadata": metadata, "items": items}).encode()


def test_an_object_of_a_list_says_who_it_is_and_is_whole_when_asked_for() -> None:
    answer = page(a_page(an_object("a", spec={"x": [1, None, "é"]}), an_object("b"), following="more"))
    found = answer.items
    assert [it.identity for it in found] == [(("n", "a"), "uid-a", "7"), (("n", "b"), "uid-b", "7")]
    assert found[0].body() == {"apiVersion": "v1", "kind": "Thing", **an_object("a", spec={"x": [1, None, "é"]})}
    assert [it.identity for it in found] == [identity(it.body()) for it in found]
    assert (answer.following, answer.version) == ("more", "9")


def test_the_last_page_names_no_next_one() -> None:
    for text in (a_page(), b'{"kind":"ThingList","apiVersion":"v1","metadata":{"continue":""},"items":null}'):
        assert (page(text).items, page(text).following) == ([], "")


@pytest.mark.parametrize("text", [b"", b"upstream connect error", b'{"items": [{"metadata": 1}]}', b'{"items": [1]}'])
def test_what_is_no_list_is_an_error_at_once(text: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        page(text)


def test_an_event_of_what_is_known_is_not_read_again() -> None:
    """A controller's own writes come back as events, and kopf lists everything once more when it begins."""
    view, read, queued = View(look_at_agents=False), [], []
    known = a_volume(version="7")
    view.take(known)

    def parse(body: Body) -> VolumeFacts:
        read.append(body["metadata"]["resourceVersion"])
        return a_volume(version=body["metadata"]["resourceVersion"])

    feed = Feed(view, queued.append, lambda _: None)
    for version, uid in (("7", known.uid), ("8", known.uid), ("8", known.uid)):
        body = {"metadata": {"name": known.name, "namespace": "n", "uid": uid, "resourceVersion": version}}
        feed.event(VolumeFacts, parse, "MODIFIED", body)
    assert read == ["8"]
    assert queued == [KEY]


def test_only_this_very_object_in_this_very_version_is_known() -> None:
    view, fact = View(look_at_agents=False), a_volume(version="7")
    view.take(fact)
    assert view.known(VolumeFacts, fact.key, fact.uid, "7") is fact
    for uid, version in ((fact.uid, "8"), (fact.uid, "6"), (fact.uid, ""), ("another", "7")):
        assert view.known(VolumeFacts, fact.key, uid, version) is None
    assert view.known(VolumeFacts, ("n", "other"), fact.uid, "7") is None


def test_volumes_that_say_the_same_share_it() -> None:
    def body(number: int) -> dict[str, Any]:
        condition = {
            **{"type": "Encrypted", "status": "True", "reason": "KernelKeyMeasured", "message": "as measured"},
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        text = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheVolume",
            **an_object(f"kvv-{number:020x}"),
            "spec": {
                "tierRef": {"name": "a-tier", "uid": "the-uid-of-a-tier"},
                "nodeName": "node-a",
                "path": "/var/lib/kvtier/tiers/a",
                "backend": "Fscrypt",
                "sizePerRank": "1Gi",
                "ranks": 1,
                "consumer": {"podUid": "0a1b", "podName": "pod", "uid": 1, "gid": 1},
            },
            "status": {"state": "InUse", "bootId": "a-boot", "conditions": [condition]},
        }
        decoded: dict[str, Any] = json.loads(json.dumps(text))
        return decoded

    one, other = volume_facts(body(1)), volume_facts(body(2))
    assert one.problem == ""
    assert one.conditions["Encrypted"] is other.conditions["Encrypted"]
    for name in ("tier_name", "tier_uid", "node_name", "boot_id"):
        assert getattr(one, name) is getattr(other, name), name
