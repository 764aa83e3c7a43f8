"""Manifests as kubelet reads static pods: declared, changed, broken, removed; and what that does to volumes in use."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import InvalidResource, NotFound
from kvtier_api.meta import Resource
from kvtier_node import manifests
from kvtier_node.manifests import ManifestDirectory, find_tier, load_tier_file
from standalone import Host, has_ended, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


def test_a_removed_manifest_ends_the_consumers_and_erases_with_trigger_deletion(host: Host) -> None:
    path = host.declare("chat", **SEALED)
    node = host.node()
    orphan, told_orphan, orphan_pid = host.run("chat", "sleep 600")
    orphan.sigkill()
    node.event("took-over", volume=told_orphan["KVTIER_VOLUME_ID"])
    guarded, told_guarded, _ = host.run("chat", "sleep 600")
    wait_for(host.status_file("chat").exists, "the status file")
    path.unlink()
    for told in (told_orphan, told_guarded):
        host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")
    assert {item["trigger"] for item in host.receipts()} == {"Deletion"}
    wait_for(lambda: has_ended(orphan_pid), "the orphan's end")
    assert guarded.popen.wait(60) != 0
    wait_for(lambda: not host.status_file("chat").exists(), "the end of the status file")
    assert host.json("status")["requests"] == []


def test_a_manifest_that_was_removed_while_the_node_was_down_is_seen_at_its_next_start(host: Host) -> None:
    path = host.declare("chat", **SEALED)
    first = host.node()
    process, told, _ = host.run("chat", "sleep 600")
    process.sigkill()
    first.event("took-over")
    wait_for(host.status_file("chat").exists, "the status file")
    first.terminate()
    path.unlink()
    host.node()
    host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")
    assert host.receipts()[-1]["trigger"] == "Deletion"


def test_a_tier_that_was_never_declared_here_is_never_taken_for_a_removed_one(host: Host) -> None:
    host.declare("other", **SEALED)
    path = host.declare("chat", **SEALED)
    elsewhere = host.base / "elsewhere.yaml"
    path.rename(elsewhere)
    node = host.node()
    process, told, _ = host.run("chat", "sleep 600", "--tier-file", str(elsewhere))
    process.sigkill()
    node.event("took-over")
    wait_for(host.status_file("other").exists, "a reconcile")
    seen = node_reconciles(host)
    wait_for(lambda: node_reconciles(host) > seen + 2, "more reconciles")
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"


def node_reconciles(host: Host) -> int:
    """Grows with each change that a reconcile wrote: a tier is declared for each call."""
    count = len(list(host.manifests.glob("extra-*.yaml")))
    done = len(list((host.state / "status").glob("default_extra-*.json")))
    if done == count:
        host.declare(f"extra-{count}", **SEALED)
    return done


@pytest.mark.parametrize("text", ["{", "apiVersion: kvtier.dev/v1alpha1\nkind: KVCacheTier\nspec: {}\n", "\0", "a: b"])
def test_a_file_that_is_broken_later_leaves_the_tier_and_its_volumes_as_they_were(host: Host, text: str) -> None:
    host.declare("chat", **SEALED)
    node = host.node()
    process, told, _ = host.run("chat", "sleep 600")
    process.sigkill()
    node.event("took-over")
    host.wait_condition("chat", "Provisioned", "True", "Provisioned")
    host.write("chat.yaml", text)
    said = host.wait_condition("chat", "Ready", "False", "InvalidSpec")
    assert "chat.yaml" in said["message"]
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"
    events = host.json("status")["events"]
    assert [item["object"] for item in events if item["reason"] == "InvalidManifest"] == [
        str(host.manifests / "chat.yaml")
    ]
    host.declare("chat", **SEALED)
    wait_for(lambda: host.condition("chat", "Ready").get("reason") != "InvalidSpec", "the mended manifest")


def test_a_bad_file_keeps_every_other_tier_from_being_called_removed(host: Host) -> None:
    path = host.declare("chat", **SEALED)
    node = host.node()
    process, told, _ = host.run("chat", "sleep 600")
    process.sigkill()
    node.event("took-over")
    wait_for(host.status_file("chat").exists, "the status file")
    host.write("broken.yaml", "{")
    wait_for(lambda: any(e["reason"] == "InvalidManifest" for e in host.json("status")["events"]), "the event")
    path.unlink()
    seen = node_reconciles(host)
    wait_for(lambda: node_reconciles(host) > seen + 2, "more reconciles")
    assert host.volume(told["KVTIER_VOLUME_ID"])["state"] == "InUse"
    (host.manifests / "broken.yaml").unlink()
    host.wait_state(told["KVTIER_VOLUME_ID"], "Erased")


def test_an_immutable_field_stays_as_it_was_and_the_status_says_why(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    wait_for(host.status_file("chat").exists, "the status file")
    host.declare("chat", path=str(host.root / "elsewhere"), **SEALED)
    said = host.wait_condition("chat", "Ready", "False", "InvalidSpec")
    assert "the path cannot be changed" in said["message"]
    assert json.loads(host.status_file("chat").read_text())["spec"]["path"] == str(host.root / "chat")


def test_a_status_file_is_written_only_when_something_changed(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.wait_condition("chat", "Provisioned", "Unknown", "NoVolumes")
    inode = host.status_file("chat").stat().st_ino
    seen = node_reconciles(host)
    wait_for(lambda: node_reconciles(host) > seen + 2, "more reconciles")
    assert host.status_file("chat").stat().st_ino == inode


# -- the reader alone


def manifest(name: str) -> str:
    return (
        f"apiVersion: kvtier.dev/v1alpha1\nkind: KVCacheTier\nmetadata: {{name: {name}}}\n"
        "spec: {path: /var/lib/kvtier/tiers/x, sizePerRank: 8Mi, ranks: 1}\n"
    )


def test_files_are_read_again_when_they_change_and_only_then(tmp_path: Path) -> None:
    directory = ManifestDirectory(str(tmp_path))
    path = tmp_path / "a.yaml"
    path.write_text(manifest("one"))
    first = directory.scan().tiers["default/one"]
    assert directory.scan().tiers["default/one"] is first
    path.write_text(manifest("two!"[:3]))
    os.utime(path, ns=(1, 1))
    assert list(directory.scan().tiers) == ["default/two"]


def test_hidden_files_and_other_suffixes_are_passed_over(tmp_path: Path) -> None:
    for name in (".a.yaml", "b.yaml~", "c.txt", "d.yaml.bak"):
        (tmp_path / name).write_text("{")
    (tmp_path / "e.yml").write_text(manifest("chat"))
    found = ManifestDirectory(str(tmp_path)).scan()
    assert (list(found.tiers), found.bad) == (["default/chat"], [])


def test_the_same_tier_in_two_files_is_an_error_of_the_second(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("chat"))
    (tmp_path / "b.yaml").write_text(manifest("chat"))
    found = ManifestDirectory(str(tmp_path)).scan()
    assert found.origin == {"default/chat": str(tmp_path / "a.yaml")}
    assert [bad.path for bad in found.bad] == [str(tmp_path / "b.yaml")]
    with pytest.raises(InvalidResource, match="already declared"):
        find_tier(str(tmp_path), "default", "chat")


@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling", "device", "other kind"])
def test_what_is_no_manifest_is_named_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yaml"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.write_text(
                "apiVersion: kvtier.dev/v1alpha1\nkind: KVCacheErasure\nmetadata: {name: x}\n"
                "spec: {tierRef: {name: chat}, reason: why}\n"
            )
    (tmp_path / "b.yaml").write_text(manifest("chat"))
    found = ManifestDirectory(str(tmp_path)).scan()
    assert list(found.tiers) == ["default/chat"]
    assert [bad.path for bad in found.bad] == [str(path)]
    assert find_tier(str(tmp_path), "default", "chat").metadata.name == "chat"


def test_a_missing_directory_is_said_and_nothing_counts_as_removed(tmp_path: Path) -> None:
    found = ManifestDirectory(str(tmp_path / "none")).scan()
    assert not found.complete
    assert "--manifests" in found.bad[0].error.remedy


def test_a_file_that_is_removed_after_it_was_listed_is_removed_and_not_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bad file would keep every tier of the directory from being called removed."""
    (tmp_path / "a.yaml").write_text(manifest("a"))
    going = tmp_path / "b.yaml"
    going.write_text(manifest("b"))
    read = manifests.load_documents

    def late(path: Path) -> list[Resource]:
        if path == going:
            going.unlink()
        return read(path)

    monkeypatch.setattr(manifests, "load_documents", late)
    found = ManifestDirectory(str(tmp_path)).scan()
    assert (list(found.tiers), found.bad) == (["default/a"], [])


def test_a_tier_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(manifest("chat"))
    (tmp_path / "b.yaml").write_text("{")
    with pytest.raises(NotFound) as caught:
        find_tier(str(tmp_path), "default", "chatt")
    assert "default/chat" in caught.value.remedy
    assert "b.yaml" in caught.value.cause


def test_one_file_with_several_tiers_needs_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"{manifest('one')}---\n{manifest('two')}")
    assert load_tier_file(str(path), "default", "two").metadata.name == "two"
    with pytest.raises(InvalidResource, match="default/one, default/two"):
        load_tier_file(str(path), "default", None)
    with pytest.raises(NotFound):
        load_tier_file(str(path), "default", "three")
