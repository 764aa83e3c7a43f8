"""Tiers whose paths lie one below the other: exactly one of two is refused, and it is looked at when the other changes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvtier_api.clean_path import is_below
from kvtier_api.meta import find_condition
from kvtier_operator import path_claims
from kvtier_operator.event_reasons import EventReason
from kvtier_operator.facts import Key, TierFacts
from kvtier_operator.path_claims import PathClaim, PathClaims
from kvtier_operator.planning import plan
from kvtier_operator.view import View
from operator_facts import NOW, a_snapshot, a_tier, a_volume

VERSIONS = itertools.count(100)


def declared(name: str, path: str, minute: int = 0, **spec: Any) -> TierFacts:
    tier = a_tier(path=path, **spec)
    changes = {
        "name": name,
        "uid": f"uid-{name}",
        "creation_timestamp": NOW + timedelta(minutes=minute),
        "resource_version": str(next(VERSIONS)),
    }
    return replace(tier, meta=tier.meta.model_copy(update=changes))


def view_of(*tiers: TierFacts) -> View:
    view = View(look_at_agents=False)
    for tier in tiers:
        view.take(tier)
    return view


def refused(*tiers: TierFacts) -> dict[str, str]:
    """Names of refused tiers, each with that of the tier that was there first."""
    view = view_of(*tiers)
    taken = {tier.meta.name: view.path_taken_by(tier.key) for tier in tiers}
    return {name: claim.key[1] for name, claim in taken.items() if claim is not None}


@pytest.mark.parametrize(("first", "second"), [("/kv", "/kv/b"), ("/kv/b", "/kv"), ("/kv", "/kv/b/c/d")])
def test_the_later_one_is_refused_whether_it_lies_above_or_below(first: str, second: str) -> None:
    assert refused(declared("x", second, 1), declared("y", first, 0)) == {"x": "y"}


def test_of_two_that_came_in_one_second_the_name_decides() -> None:
    assert refused(declared("b", "/kv"), declared("a", "/kv/b")) == {"b": "a"}


@pytest.mark.parametrize("path", ["/kv", "/kv-b/c", "/kv.b", "/kvb", "/k", "/other/kv/b"])
def test_the_same_path_and_a_path_beside_it_are_allowed(path: str) -> None:
    assert refused(declared("x", "/kv"), declared("y", path, 1)) == {}


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        ({"pool": "a"}, {"pool": "b"}, False),
        ({"pool": "a", "zone": "1"}, {"zone": "2"}, False),
        ({"pool": "a"}, {"pool": "a"}, True),
        ({"pool": "a"}, {"zone": "1"}, True),
        ({"pool": "a"}, {}, True),
    ],
)
def test_tiers_that_no_node_can_hold_both_of_do_not_meet(one: Any, other: Any, meet: bool) -> None:
    tiers = declared("x", "/kv", nodeSelector=one), declared("y", "/kv/b", 1, nodeSelector=other)
    assert refused(*tiers) == ({"y": "x"} if meet else {})


def test_a_tier_in_conflict_with_several_names_the_first_one() -> None:
    tiers = [declared("last", "/kv", 9), declared("second", "/kv/b", 2), declared("first", "/kv/c/d", 1)]
    assert refused(*tiers) == {"last": "first"}


def test_a_refused_tier_refuses_later_ones_all_the_same() -> None:
    """As on a node: what it may have made already is foreign data to another."""
    tiers = [declared("a", "/kv/a", 0), declared("b", "/kv", 1), declared("c", "/kv/c", 2)]
    assert refused(*tiers) == {"b": "a", "c": "b"}


def test_a_spec_that_cannot_be_read_claims_no_path() -> None:
    unreadable = replace(declared("x", "/kv"), spec=None, problem="?")
    assert refused(unreadable, declared("y", "/kv/b", 1)) == {}


def test_the_later_one_is_looked_at_when_the_earlier_one_comes_changes_and_goes() -> None:
    earlier, later = declared("earlier", "/kv"), declared("later", "/kv/b", 1)
    apart = declared("apart", "/else", 2)
    view = view_of(later, apart)
    assert view.take(earlier) == {earlier.key, later.key}
    same = replace(earlier, meta=earlier.meta.model_copy(update={"resource_version": str(next(VERSIONS))}))
    assert view.take(same) == {earlier.key}, "a new status of it concerns nobody else"
    elsewhere = declared("earlier", "/kv", nodeSelector={"pool": "a"})
    assert view.take(elsewhere) == {earlier.key, later.key}
    assert view.drop(TierFacts, earlier.key, 2**63) == {earlier.key, later.key}
    assert view.path_taken_by(later.key) is None


def test_the_earlier_one_is_not_looked_at_for_the_later_one() -> None:
    earlier, later = declared("earlier", "/kv"), declared("later", "/kv/b", 1)
    view = view_of(earlier)
    assert view.take(later) == {later.key}
    assert view.drop(TierFacts, later.key, 2**63) == {later.key}


def test_a_tier_made_anew_under_its_name_is_later_than_it_was() -> None:
    other = declared("other", "/kv/b", 5)
    view = view_of(declared("t", "/kv", 0), other)
    assert view.path_taken_by(other.key) is not None
    again = declared("t", "/kv", 9)
    assert view.take(again) == {again.key, other.key}
    assert view.path_taken_by(other.key) is None
    assert view.path_taken_by(again.key) is not None


def test_a_full_list_that_has_an_earlier_tier_no_more_frees_the_later_one() -> None:
    earlier, later = declared("earlier", "/kv"), declared("later", "/kv/b", 1)
    view = view_of(earlier, later)
    view.begin_relist()
    concerned, _ = view.relist([later])
    assert later.key in concerned
    assert view.path_taken_by(later.key) is None


def test_the_index_says_what_looking_at_all_of_them_says() -> None:
    chance = random.Random(7)
    claims, known = PathClaims(), dict[Key, PathClaim]()

    def truth(key: Key) -> Key | None:
        own = known.get(key)
        if own is None:
            return None
        found = [
            it
            for it in known.values()
            if it.rank < own.rank and it.meets(own) and (is_below(it.path, own.path) or is_below(own.path, it.path))
        ]
        return min(found, key=lambda it: it.rank).key if found else None

    def answers() -> dict[Key, Key | None]:
        return {key: claim.key if (claim := claims.before(key)) is not None else None for key in keys}

    keys = [("n", f"t{number}") for number in range(25)]
    for _ in range(1500):
        key = chance.choice(keys)
        before = answers()
        if chance.random() < 0.3:
            known.pop(key, None)
            concerned = claims.put(key, None)
        else:
            parts = [chance.choice(("a", "a-b", "b")) for _ in range(chance.randint(1, 4))]
            at = NOW + timedelta(minutes=chance.randint(0, 5))
            nodes = chance.choice(({}, {}, {"pool": "x"}, {"pool": "y"}))
            known[key] = PathClaim(key, "/" + "/".join(parts), at, nodes)
            concerned = claims.put(key, known[key])
        after = answers()
        assert after == {each: truth(each) for each in keys}
        changed = {each for each in keys if before[each] != after[each]} - {key}
        assert changed <= concerned, "whoever has another answer is looked at"


def test_a_thousand_tiers_side_by_side_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(
        path_claims, "is_below", lambda path, other: bool(compared.append(path)) or is_below(path, other)
    )
    claims = PathClaims()
    for number in range(1000):
        claims.put(("n", f"t{number}"), PathClaim(("n", f"t{number}"), f"/kv/team-{number % 20}/t{number}", NOW, {}))
    for number in range(1000):
        claims.before(("n", f"t{number}"))
    assert compared == []


def test_the_condition_names_field_value_other_tier_and_remedy_and_measured_conditions_stay() -> None:
    first = declared("first", "/var/lib")
    view = view_of(first, a_tier())
    tier = replace(a_tier(), meta=a_tier().meta.model_copy(update={"creation_timestamp": NOW + timedelta(minutes=1)}))
    view.take(replace(tier, meta=tier.meta.model_copy(update={"resource_version": "11"})))
    before = a_snapshot(tier, [a_volume()])
    well = plan(before).tier_status
    todo = plan(replace(before, path_taken_by=view.path_taken_by(tier.key)))
    assert todo.tier_status is not None
    assert well is not None
    ready = find_condition(todo.tier_status.conditions, "Ready")
    assert ready is not None
    assert (ready.status.value, ready.reason) == ("False", "InvalidSpec")
    for part in ("spec.path=/var/lib/kvtier", "below /var/lib,", "tier n/first", "nodeSelector"):
        assert part in ready.message
    assert EventReason.INVALID_SPEC in [it.reason for it in todo.announcements]
    assert todo.tier_status.conditions[1:] == well.conditions[1:], "running volumes are what they were"
    assert todo.tier_status.volumes == well.volumes
    free = plan(replace(before, tier=replace(tier, status=todo.tier_status))).tier_status
    assert free is not None
    ready = find_condition(free.conditions, "Ready")
    assert ready is not None
    assert ready.reason != "InvalidSpec", "the condition goes by itself"


def test_a_tier_that_is_being_deleted_says_that_and_is_no_less_in_the_way() -> None:
    earlier = declared("earlier", "/var/lib")
    leaving = replace(
        earlier, meta=earlier.meta.model_copy(update={"deletion_timestamp": NOW, "resource_version": "999"})
    )
    later = declared("later", "/var/lib/kvtier", 1)
    view = view_of(leaving, later)
    taken = view.path_taken_by(later.key)
    assert taken is not None, "its volumes are there until they are erased"
    status = plan(a_snapshot(a_tier(deleting=True), [a_volume()], path_taken_by=taken)).tier_status
    assert status is not None
    ready = find_condition(status.conditions, "Ready")
    assert ready is not None
    assert ready.reason == "Deleting"
