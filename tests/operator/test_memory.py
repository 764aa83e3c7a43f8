"""The view and the queue: old news changes nothing, a full list corrects everything, a key is in one hand only."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtier_api.volume import VolumeState
from kvtier_operator import term
from kvtier_operator.facts import AgentFacts, TierFacts, VolumeFacts
from kvtier_operator.view import View
from kvtier_operator.work_queue import WorkQueue
from operator_facts import a_node, a_record, a_tier, a_volume

KEY = ("n", "t")


def test_an_older_version_never_overwrites_a_newer_one() -> None:
    view = View(look_at_agents=False)
    assert view.take(a_volume(version="9", state=VolumeState.ERASED)) == {KEY}
    assert view.take(a_volume(version="10", state=VolumeState.ERASED)) == {KEY}, "versions are numbers, not text"
    assert view.take(a_volume(version="9")) == set()
    assert view.drop(VolumeFacts, a_volume().key, 9) == set()
    assert [it.state for it in view.volumes(KEY)] == [VolumeState.ERASED]
    assert view.drop(VolumeFacts, a_volume().key, 11) == {KEY}
    assert view.volumes(KEY) == []


def test_a_volume_that_changes_its_tier_concerns_both() -> None:
    view = View(look_at_agents=False)
    view.take(a_volume())
    assert view.take(a_volume(version="2", tier_name="other")) == {KEY, ("n", "other")}


def test_a_nodes_status_concerns_tiers_only_when_it_matters() -> None:
    view = View(look_at_agents=False)
    view.take(a_volume())
    assert view.take(a_node()) == {KEY}
    assert view.take(a_node(version="2")) == set()
    assert view.take(a_node(version="3", boot_id="boot-2")) == {KEY}
    assert view.take(a_node("elsewhere")) == set()


def test_agents_count_only_where_they_are_looked_at() -> None:
    agent = AgentFacts("kvtier-system", "agent-x", "1", "node-a", False)
    view = View(look_at_agents=True)
    view.take(a_volume())
    view.take(a_node())
    assert view.take(agent) == {KEY}
    assert view.surroundings(view.volumes(KEY)).agents == {"node-a": False}
    view.take(replace(agent, name="agent-y", ready=True))
    assert view.surroundings(view.volumes(KEY)).agents == {"node-a": True}, "a roll-out has two for a moment"
    assert view.drop(AgentFacts, ("kvtier-system", "agent-y"), 99) == {KEY}
    assert view.surroundings(view.volumes(KEY)).agents == {"node-a": False}
    view.drop(AgentFacts, agent.key, 99)
    assert view.surroundings(view.volumes(KEY)).agents == {}
    assert View(look_at_agents=False).surroundings([a_volume()]).agents is None


def test_a_full_list_takes_away_what_vanished_in_a_gap() -> None:
    view = View(look_at_agents=False)
    for fact in (a_tier(), a_volume(1), a_volume(2), a_record(a_volume(3)), a_node()):
        view.take(fact)
    view.begin_relist()
    concerned, differing = view.relist([a_tier(), a_volume(2), a_node()])
    assert (concerned, differing) == ({KEY}, 2)
    assert [it.name for it in view.volumes(KEY)] == [a_volume(2).name]
    assert view.erasures(KEY) == []


def test_what_an_event_changed_during_a_list_stays() -> None:
    view = View(look_at_agents=False)
    view.take(a_tier())
    view.take(a_volume(1))
    view.begin_relist()
    view.take(a_volume(2))  # made after the list was read
    view.drop(VolumeFacts, a_volume(1).key, 99)  # deleted after the list was read
    view.relist([a_tier(), a_volume(1)])
    assert [it.name for it in view.volumes(KEY)] == [a_volume(2).name]


def test_an_object_made_anew_under_its_name_is_another_one() -> None:
    view = View(look_at_agents=False)
    tier = a_tier()
    view.take(tier)
    again = replace(tier, meta=tier.meta.model_copy(update={"uid": "second", "resource_version": "3"}))
    assert view.take(again) == {KEY}
    found = view.tier(KEY)
    assert isinstance(found, TierFacts)
    assert found.meta.uid == "second"


def test_a_key_is_queued_once_and_never_in_two_hands() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        queue.add("a")
        assert await queue.take() == "a"
        queue.add("a")  # while it is worked on
        assert len(queue) == 1
        assert queue._ready.empty(), "not before the first hand is done with it"
        queue.done("a")
        assert await queue.take() == "a"
        queue.done("a")
        assert len(queue) == 0

    asyncio.run(scenario())


def test_what_changed_goes_before_what_is_only_looked_at_again() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        for key in "abc":
            queue.add(key, can_wait=True)
        queue.add("x")
        queue.add("b")  # it changed meanwhile
        queue.add("b", can_wait=True)
        assert len(queue) == 4
        assert [await queue.take() for _ in range(4)] == ["x", "b", "a", "c"]
        assert queue._ready.empty(), "each once"

    asyncio.run(scenario())


def test_what_can_wait_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("patient", can_wait=True)
        taken = []
        for number in range(20):  # something changes all the time
            queue.add(f"busy-{number}")
            queue.add(f"more-{number}")
            taken.append(await queue.take())
        assert "patient" in taken

    asyncio.run(scenario())


def test_a_failure_comes_back_after_a_pause_that_grows_and_is_bounded() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        pauses = []
        for _ in range(14):
            queue.add("a")
            await queue.take()
            pauses.append(queue.failed("a"))
            queue.close()
        assert pauses[0] < 0.3 < pauses[4]
        assert max(pauses) <= 72
        queue.add("a")
        await queue.take()
        assert queue.failed("a", at_least_s=500) == 500, "what the server asks for (Retry-After) is kept"
        queue.close()

    asyncio.run(scenario())


def test_what_changes_while_a_key_rests_is_one_look_afterwards() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        queue.add("b")
        assert await queue.take() == "a"
        queue.done("a", rest_s=0.05)
        for _ in range(3):
            queue.add("a")
        queue.add("c")
        taken = [await asyncio.wait_for(queue.take(), 10) for _ in range(3)]
        assert taken == ["b", "c", "a"], "others have their turn"
        assert queue._ready.empty(), "once for all that came"
        queue.done("a", rest_s=0.05)
        assert not queue._again
        queue.close()

    asyncio.run(scenario())


def test_a_key_at_rest_for_which_nothing_came_is_not_taken_again() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        queue.done(await queue.take(), rest_s=0.01)
        while queue._resting:
            await asyncio.sleep(0.01)
        assert len(queue) == 0
        queue.add("a")
        assert await asyncio.wait_for(queue.take(), 10) == "a", "it may be asked for again"
        queue.close()

    asyncio.run(scenario())


def test_events_give_way_to_statuses_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        queue: WorkQueue[tuple[str, str]] = WorkQueue()
        queue.add(KEY)
        key = await queue.take()
        monkeypatch.setattr(term, "_WAY_S", 5.0)
        waiting = asyncio.create_task(term._until_idle(queue))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        queue.done(key)
        await asyncio.wait_for(waiting, 60)
        monkeypatch.setattr(term, "_WAY_S", 0.01)
        queue.add(KEY)
        await asyncio.wait_for(term._until_idle(queue), 60)

    asyncio.run(scenario())


def test_an_earlier_time_wins() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add_after("a", 0.05)
        queue.add_after("a", 1000)
        assert await asyncio.wait_for(queue.take(), 10) == "a"
        queue.close()

    asyncio.run(scenario())
