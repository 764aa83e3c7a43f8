"""Documents: what people write becomes models or an error that names file, document, field, value and remedy."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtier_api.documents import load_documents, parse_object
from kvtier_api.errors import InvalidResource, NotFound
from kvtier_api.hostile_yaml import MAX_SIZE_BYTES, read_documents
from kvtier_api.meta import Resource
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import KVCacheVolume

HEAD = "apiVersion: kvtier.dev/v1alpha1\nkind: KVCacheTier\nmetadata: {name: prod}\n"
SPEC = "spec:\n  sizePerRank: 1.5Gi\n  ranks: 2\n  path: /var/lib/kv\n"
TIER = HEAD + SPEC


def refused(text: str | Path) -> InvalidResource:
    with pytest.raises(InvalidResource) as raised:
        load_documents(text, **({} if isinstance(text, Path) else {"source": "tier.yaml"}))
    assert raised.value.remedy
    return raised.value


def test_defaults_and_numbers_are_at_hand() -> None:
    (tier,) = load_documents(TIER)
    assert isinstance(tier, KVCacheTier)
    spec = tier.spec
    assert (spec.size_per_rank, spec.slot_size, spec.ranks) == (1610612736, 1 << 20, 2)
    assert (spec.retention.max_age, spec.scrub.deadline) == (86400.0, 30.0)
    assert (spec.encryption.backend, spec.salt.policy, spec.slot_prefix) == ("Auto", "Required", "slot")
    assert (spec.total_bytes, spec.slots_per_rank) == (2 * 1610612736, 1536)
    assert tier.key == "default/prod"


def test_an_object_is_written_back_as_its_author_wrote_it() -> None:
    (tier,) = load_documents(TIER)
    written = tier.to_manifest()
    assert written["spec"]["sizePerRank"] == "1.5Gi"
    assert written["spec"]["retention"]["maxAge"] == "24h"
    assert parse_object(yaml.safe_load(yaml.safe_dump(written))) == tier


@given(
    st.fixed_dictionaries(
        {
            "sizePerRank": st.sampled_from(["1Gi", "1.5Gi", 1 << 31, "3e9"]),
            "ranks": st.integers(1, 1024),
            "path": st.sampled_from(["/a", "/a/b.c/d"]),
        },
        optional={
            "slotSize": st.sampled_from(["4Ki", "1Mi", 65536]),
            "scrub": st.sampled_from([{}, {"deadline": "1s"}, {"verify": "None", "discard": False}]),
            "nodeSelector": st.dictionaries(st.sampled_from(["a", "b/c"]), st.text("xyz", max_size=5), max_size=2),
            "governance": st.fixed_dictionaries({"owner": st.text(min_size=1, max_size=20)}),
        },
    )
)
def test_round_trip(spec: dict[str, Any]) -> None:
    data = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheTier", "metadata": {"name": "a"}, "spec": spec}
    tier = parse_object(data, kind=KVCacheTier)
    again = parse_object(tier.to_manifest(), kind=KVCacheTier)
    assert again == tier
    assert again.to_manifest() == tier.to_manifest()
    assert {name: tier.to_manifest()["spec"][name] for name in ("sizePerRank", "ranks", "path")} == {
        name: spec[name] for name in ("sizePerRank", "ranks", "path")
    }


def test_what_an_api_server_adds_is_no_mistake() -> None:
    data = yaml.safe_load(TIER)
    data["metadata"] |= {
        "uid": "u", "resourceVersion": "7", "generation": 3, "creationTimestamp": "2026-01-31T12:00:00Z",
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}], "selfLink": None,
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}],
    }  # fmt: skip
    data["status"] = {"observedGeneration": 3, "newerField": 1, "conditions": []}
    tier = parse_object(data, kind=KVCacheTier)
    assert (tier.metadata.generation, tier.status is not None and tier.status.observed_generation) == (3, 3)


@pytest.mark.parametrize(
    ("text", "field", "meant"),
    [
        (TIER + "  encrypton: {}\n", "spec.encrypton", "encryption"),
        (TIER + "  size_per_rank: 1\n", "spec.size_per_rank", "sizePerRank"),
        (TIER + "  SLOTSIZE: 1Mi\n", "spec.SLOTSIZE", "slotSize"),
        (TIER + "  retention: {maxage: 1h}\n", "spec.retention.maxage", "maxAge"),
        (TIER + "  secondary: [{type: S3, endpoint: 'https://x', seald: true}]\n", "spec.secondary[0].seald", "sealed"),
        (HEAD.replace("name: prod", "name: prod, lables: {}") + SPEC, "metadata.lables", "labels"),
        (TIER + "stauts: {}\n", "stauts", "status"),
        (TIER + "  model: {name: m, digest: x}\n", "spec.model.digest", "weightsDigest"),
    ],
)
def test_an_unknown_field_is_named_with_the_nearest_known_one(text: str, field: str, meant: str) -> None:
    error = refused(text)
    assert f"tier.yaml: document 1, KVCacheTier prod: {field}" == error.obj
    assert meant in error.remedy


def test_an_unknown_field_unlike_any_other_lists_the_known_ones() -> None:
    error = refused(TIER + "  salt: {zzz: 1}\n")
    assert error.remedy == "known here: policy, hash"


@pytest.mark.parametrize(
    ("line", "field", "value", "remedy"),
    [
        ("  slotSize: 5000\n", "spec.slotSize", "5000", "64Ki"),
        ("  retention: {maxAge: 7d}\n", "spec.retention.maxAge", "'7d'", "168h"),
        ("  encryption: {backend: LUKS}\n", "spec.encryption.backend", "'LUKS'", "'DmCrypt'"),
        (
            "  salt: {policy: PerTenant}\n  encryption: {sealSlots: false}\n",
            "spec.encryption.sealSlots",
            "False",
            "true",
        ),
        ("  slotPrefix: ../x\n", "spec.slotPrefix", "'../x'", "match"),
        ("  nodeSelector: [a]\n", "spec.nodeSelector", "", "mapping"),
    ],
)
def test_a_bad_value_is_named_with_its_field_and_remedy(line: str, field: str, value: str, remedy: str) -> None:
    error = refused(TIER + line)
    assert f": {field}" in error.obj
    assert value in error.obj
    assert remedy in error.remedy


def test_the_second_document_is_named() -> None:
    assert "document 2" in refused(TIER + "---\n" + TIER.replace("ranks: 2", "ranks: 0").replace("prod", "b")).obj


def test_several_mistakes_are_told_at_once() -> None:
    text = str(refused(TIER.replace("ranks: 2", "ranks: 0").replace("/var", "var")))
    assert "spec.ranks" in text
    assert "spec.path" in text


@pytest.mark.parametrize(
    "line",
    [
        "  secondary: [{type: Redis, endpoint: 'redis://user:hunter2@host'}]\n",
        "  secondary: [{type: Redis, endpoint: 'redis://h', password: hunter2}]\n",
        "  secondary: [{type: Redis, endpoint: 'redis://h', credentialsSecretRef: hunter2}]\n",
        "  secondary: [{type: Redis, endpoint: 'redis://h', credentialsSecretRef: {name: a, key: 'hunter2 '}}]\n",
    ],
)
def test_a_secret_written_in_the_wrong_place_is_not_repeated(line: str) -> None:
    error = refused(TIER + line)
    cause: BaseException | None = error
    while cause is not None:
        assert "hunter2" not in str(cause) + repr(cause)
        cause = cause.__cause__


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TIER.replace("kvtier.dev/v1alpha1", "kvtier.dev/v1"), "apiVersion"),
        (TIER.replace("KVCacheTier", "KVCachTier"), "KVCacheTier"),
        ("- a\n", "mapping"),
        ("just text\n", "mapping"),
        ("kind: KVCacheTier\n", "apiVersion"),
        ("apiVersion: kvtier.dev/v1alpha1\n", "kind"),
        ("apiVersion: kvtier.dev/v1alpha1\nkind: [KVCacheTier]\n", "kind"),
        (HEAD, "spec"),
        (HEAD + "spec:\n", "without a value"),
        (TIER + "  device:\n", "without a value"),
        (TIER + "---\n" + TIER, "already in document 1"),
        (TIER.replace("{name: prod}", "{}"), "metadata.name"),
        (TIER.replace("{name: prod}", "{name: Prod_1}"), "metadata.name"),
    ],
)
def test_a_document_of_another_shape_is_refused(text: str, words: str) -> None:
    assert words in str(refused(text))


def test_empty_documents_are_passed_over() -> None:
    assert load_documents("") == load_documents("---\n---\n# nothing\n") == []
    assert len(load_documents("---\n" + TIER + "---\n...\n")) == 1


def test_a_kind_that_is_not_wanted_is_refused() -> None:
    with pytest.raises(InvalidResource, match="KVCacheVolume"):
        parse_object(yaml.safe_load(TIER), kind=KVCacheVolume)


LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 2000))
HOSTILE = {
    "billion laughs": LAUGHS,
    "billion laughs in maps": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{l: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, 40)),
    "chain of aliases": CHAIN,
    "alias of itself": "a: &a [*a]\n",
    "alias of its map": "--- &a\na: *a\n",
    "merge keys": "b: &b {x: 1}\nc:\n  <<: *b\n",
    "deep flow": "a: " + "[" * 100_000,
    "deep block": "- " * 5_000 + "x",
    "deep maps": "".join(" " * i + "a:\n" for i in range(500)),
    "many values": "a: [" + "1," * 100_000 + "]",
    "many documents": "--- a\n" * 1_001,
    "duplicate key": TIER + "  ranks: 3\n",
    "duplicate key at the top": TIER + "kind: KVCacheTier\n",
    "python tag": TIER + "  device: !!python/object/apply:os.system ['true']\n",
    "python name": "!!python/name:os.system\n",
    "binary tag": TIER + "  device: !!binary aGk=\n",
    "set tag": "!!set {a, b}\n",
    "own tag": "!mine {a: b}\n",
    "timestamp tag": "a: !!timestamp 2026-01-01\n",
    "number as key": "1: a\n",
    "null as key": "~: a\n",
    "list as key": "[a]: b\n",
    "huge integer": "a: " + "9" * 500_000 + "\n",
    "huge sexagesimal": "a: " + "1" + ":1" * 200_000 + "\n",
    "broken number": "a: !!int x\n",
    "broken bool": "a: !!bool x\n",
    "empty int": "a: !!int ''\n",
    "empty float": "a: !!float ''\n",
    "int of a list": "a: !!int [1]\n",
    "map of a list": "a: !!map [1]\n",
    "map of text": "a: !!map x\n",
    "list of a map": "a: !!seq {b: c}\n",
    "text of a list": "a: !!str [b]\n",
    "null of a map": "a: !!null {b: c}\n",
    "control characters": "a: \x00\x07\n",
    "surrogate": "a: \ud800\n",
    "tab as indent": "a:\n\t- b\n",
    "not closed": "a: [b\n",
    "unknown alias": "a: *b\n",
    "directive": "%YAML 9.9\n---\na\n",
    "too large": "# " + "x" * MAX_SIZE_BYTES,
}


REASON_OF = {
    "billion laughs": "aliases that expand to more than 50000 values",
    "billion laughs in maps": "aliases that expand to more than 50000 values",
    "chain of aliases": "aliases that expand to more than 40 levels",
    "alias of itself": "an alias of what contains it",
    "alias of its map": "an alias of what contains it",
    "merge keys": "a merge key",
    "deep flow": "more than 40 levels",
    "deep block": "more than 40 levels",
    "deep maps": "more than 40 levels",
    "many values": "more than 50000 values",
    "many documents": "more than 1000 documents",
    "duplicate key": "the key 'ranks' twice",
    "duplicate key at the top": "the key 'kind' twice",
    "python tag": "the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
    "python name": "the tag 'tag:yaml.org,2002:python/name:os.system'",
    "binary tag": "the tag 'tag:yaml.org,2002:binary'",
    "set tag": "the tag 'tag:yaml.org,2002:set'",
    "own tag": "the tag '!mine'",
    "timestamp tag": "the tag 'tag:yaml.org,2002:timestamp'",
    "huge integer": "a number that is too long",
    "huge sexagesimal": "a number that is too long",
    "too large": "more than 1048576 bytes",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml_is_refused_by_name_and_soon(name: str) -> None:
    text = HOSTILE[name]
    with pytest.raises(InvalidResource) as raised:
        list(read_documents(text, "tier.yaml"))
    assert raised.value.obj.startswith("tier.yaml")
    assert raised.value.remedy
    assert len(str(raised.value)) < 500
    assert REASON_OF.get(name, "not acceptable YAML") in raised.value.cause


def test_a_date_stays_text() -> None:
    (tier,) = load_documents(TIER + "  model: {name: m, revision: 2026-01-31}\n")
    assert isinstance(tier, KVCacheTier)
    assert tier.spec.model is not None
    assert tier.spec.model.revision == "2026-01-31"


def test_small_anchors_are_allowed() -> None:
    text = HEAD + SPEC + "  secondary:\n  - &s {type: S3, endpoint: 'https://x'}\n  - *s\n"
    (tier,) = load_documents(text)
    assert isinstance(tier, KVCacheTier)
    assert len(tier.spec.secondary or []) == 2


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert all(isinstance(found, Resource) for found in load_documents(text))
    except InvalidResource:
        pass


def test_files_are_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeff" + TIER)
    assert len(load_documents(path)) == 1
    path.write_text(TIER.replace("ranks: 2", "ranks: 0"))
    assert str(path) in refused(path).obj


def test_what_is_no_readable_text_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "regular" in str(refused(tmp_path / "fifo"))
    with pytest.raises(NotFound, match="does not exist"):
        load_documents(tmp_path / "missing")
    assert refused(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    assert "UTF-8" in str(refused(tmp_path / "binary"))
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    assert "bytes" in str(refused(tmp_path / "huge"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        assert refused(tmp_path / "socket")
    assert "regular" in str(refused(Path("/dev/zero")))
