"""Fence: a tier below or above another tier's directory is refused, with both named; the one that was first keeps working."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier_api.clean_path import is_below
from kvtier_api.errors import InvalidResource
from kvtier_api.reasons import Reason
from kvtier_api.tier import KVCacheTier
from kvtier_api.volume import VolumeState
from kvtier_node import provisioning
from kvtier_node.backends.base import Backend
from kvtier_node.ledger import VolumeRow
from kvtier_node.paths import Directory
from kvtier_node.status_files import StatusFiles
from kvtier_node.tier_check import check_tier
from node_host import Host
from standalone import Host as Standalone
from standalone import standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}


@pytest.mark.parametrize(
    ("path", "other", "below"),
    [
        ("/a/b", "/a", True),
        ("/a/b/c", "/a", True),
        ("/a", "/a", False),
        ("/ab", "/a", False),
        ("/a-b/c", "/a", False),
        ("/a", "/a/b", False),
        ("/a", "/", True),
    ],
)
def test_below_is_a_matter_of_whole_names(path: str, other: str, below: bool) -> None:
    assert is_below(path, other) is below


def tiers(host: Host, below: str = "b") -> tuple[KVCacheTier, KVCacheTier]:
    """A tier, and one whose path lies below the first one's."""
    outer = host.tier("SealOnly", ranks=1, size="1Mi", name="outer", path=host.root / "kv")
    return outer, host.tier("SealOnly", ranks=1, size="1Mi", name="inner", path=host.root / "kv" / below)


def declare(host: Host, tier: KVCacheTier, year: int) -> None:
    """As the reconcile of `kvtier node` does."""
    at = datetime(year, 1, 1, tzinfo=UTC)
    metadata = tier.metadata.model_copy(update={"creation_timestamp": at})
    StatusFiles(host.state).write(tier.model_copy(update={"metadata": metadata}))


def assert_names_both(text: str, refused: KVCacheTier, first: KVCacheTier) -> None:
    for tier in (refused, first):
        assert f"default/{tier.metadata.name}" in text
        assert tier.spec.path in text
    assert "give one of them a directory that is neither below nor above" in text


@pytest.mark.root
@pytest.mark.parametrize("below", ["b", "deep/er"])
@pytest.mark.parametrize("first", ["outer", "inner"])
def test_the_tier_that_has_a_volume_first_keeps_working_and_the_other_is_refused(
    host: Host, first: str, below: str
) -> None:
    outer, inner = tiers(host, below)
    winner, loser = (outer, inner) if first == "outer" else (inner, outer)
    live = host.provision(winner)
    for _ in range(2):
        with pytest.raises(InvalidResource) as caught:
            host.provision(loser)
        assert_names_both(str(caught.value), loser, winner)
    assert check_tier(host.node, winner).reason is None
    seen = check_tier(host.node, loser)
    assert seen.reason is Reason.INVALID_SPEC
    assert_names_both(seen.message, loser, winner)
    if first == "outer":
        assert not os.path.exists(inner.spec.path), "not even its directory was made: it would be foreign data"
    host.provision(winner)
    assert [row.tier_name for row in host.node.ledger.volumes()] == [first, first]
    assert live.row.state is VolumeState.READY


@pytest.mark.root
@pytest.mark.parametrize("first", ["outer", "inner"])
def test_of_two_declared_tiers_the_earlier_one_is_in_force_whoever_asks_first(host: Host, first: str) -> None:
    outer, inner = tiers(host)
    winner, loser = (outer, inner) if first == "outer" else (inner, outer)
    declare(host, winner, 2021)
    declare(host, loser, 2022)
    with pytest.raises(InvalidResource) as caught:
        host.provision(loser)
    assert_names_both(str(caught.value), loser, winner)
    live = host.provision(winner)
    host.erase(live)
    assert check_tier(host.node, loser).reason is Reason.INVALID_SPEC, "declared still, with or without a volume"
    StatusFiles(host.state).remove(f"default/{first}")
    os.rmdir(winner.spec.path)
    host.provision(loser)


@pytest.mark.root
def test_exactly_one_of_two_tiers_that_were_declared_at_once_is_refused(host: Host) -> None:
    outer, inner = tiers(host)
    declare(host, inner, 2021)
    declare(host, outer, 2021)
    reasons = [check_tier(host.node, tier).reason for tier in (outer, inner)]
    assert sorted(reasons, key=str) == [Reason.INVALID_SPEC, None]


@pytest.mark.root
def test_a_tier_that_was_declared_later_but_has_volumes_is_not_ended_by_the_other(host: Host) -> None:
    """As an earlier version left it."""
    outer, inner = tiers(host)
    live = host.provision(inner)
    declare(host, outer, 2021)
    declare(host, inner, 2022)
    assert check_tier(host.node, inner).reason is None
    with pytest.raises(InvalidResource, match="default/inner"):
        host.provision(outer)
    host.erase(live)
    assert check_tier(host.node, inner).reason is Reason.INVALID_SPEC


@pytest.mark.root
def test_a_volume_that_another_process_recorded_since_the_first_look_is_seen_before_anything_is_made(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = tiers(host)
    real = provisioning.choose_backend

    def slow(tier: KVCacheTier, directory: Directory, *, device: str | None) -> tuple[Backend, dict[str, str]]:
        if tier is outer:
            host.provision(inner)
        return real(tier, directory, device=device)

    monkeypatch.setattr(provisioning, "choose_backend", slow)
    with pytest.raises(InvalidResource) as caught:
        host.provision(outer)
    assert_names_both(str(caught.value), outer, inner)
    [left] = host.node.ledger.volumes(frozenset(VolumeState) - {VolumeState.ERASED})
    assert (left.state, left.tier_name) == (VolumeState.READY, "inner")
    assert os.listdir(outer.spec.path) == ["b"]


@pytest.mark.root
def test_two_tiers_with_the_same_path_leave_each_others_volumes_alone(host: Host) -> None:
    one = host.tier("SealOnly", ranks=1, size="1Mi", name="one", path=host.root / "kv")
    two = host.tier("Fscrypt", ranks=1, size="1Mi", name="two", path=host.root / "kv")
    declare(host, one, 2021)
    declare(host, two, 2022)
    first, consumer = host.in_use(one)
    second, other = host.in_use(two)
    assert [check_tier(host.node, tier).reason for tier in (one, two)] == [None, None]
    other.kill()
    host.erase(second)
    assert not os.path.exists(second.row.place)
    host.write_canary(consumer)
    rows: list[VolumeRow] = host.node.ledger.volumes(frozenset({VolumeState.IN_USE}))
    assert [row.volume_id for row in rows] == [first.volume_id]
    host.reopen()
    assert [live.volume_id for live in host.recover().adopted] == [first.volume_id]


# kvtier node and kvtier run


@pytest.fixture
def machine() -> Iterator[Standalone]:
    with standalone_host() as it:
        yield it


def test_a_manifest_below_another_ones_path_is_said_in_its_status_and_ends_nothing(machine: Standalone) -> None:
    machine.declare("first", path=str(machine.root / "kv"), **SEALED)
    node = machine.node()
    wait_for(machine.status_file("first").exists, "the status file")
    since = json.loads(machine.status_file("first").read_text())["metadata"]["creationTimestamp"]
    wait_for(lambda: datetime.now(UTC).isoformat(timespec="seconds")[:19] > since[:19], "the next second")
    machine.declare("a-second", path=str(machine.root / "kv" / "b"), **SEALED)
    said = machine.wait_condition("a-second", "Provisioned", "False", "InvalidSpec")
    assert "default/first" in said["message"] and str(machine.root / "kv") in said["message"]
    refused = machine.kvtier("run", "--tier", "a-second", "--", "true")
    assert refused.returncode == InvalidResource.exit_code
    assert "default/first" in refused.stderr and "neither below nor above" in refused.stderr
    machine.run("first", "sleep 600")
    machine.wait_condition("first", "Provisioned", "True", "Provisioned")
    node.terminate()
    again = machine.node()  # who was first is remembered
    machine.wait_condition("a-second", "Provisioned", "False", "InvalidSpec")
    machine.wait_condition("first", "Provisioned", "True", "Provisioned")
    assert json.loads(machine.status_file("first").read_text())["metadata"]["creationTimestamp"] == since
    assert not Path(machine.root / "kv" / "b").exists()
    Path(machine.manifests / "first.yaml").unlink()
    again.event("tier", tier="default/first", change="deleted")
    assert machine.kvtier("run", "--tier", "a-second", "--", "true").returncode == 0
