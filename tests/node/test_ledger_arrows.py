"""The life of a volume as the ledger allows it, and what an observer may rely on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtier_api.errors import InvalidResource, LedgerError, NotFound
from kvtier_api.volume import VolumeState
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import ARROWS, TERMINAL, ArrowRefused, Ledger, Transition
from ledger_samples import S, draft, live, row

LIVING = [state for state in S if state not in TERMINAL]


def in_state(ledger: Ledger, identity: NodeIdentity, state: VolumeState) -> str:
    """A volume in `state`, wherever it is in its life."""
    if state is S.PLANNED:
        return ledger.plan(row()).volume_id
    if state not in TERMINAL:
        return ledger.adopt(row(state=state, reason="found")).volume_id
    volume_id = ledger.adopt(row(state=S.ERASING, reason="found")).volume_id
    ledger.finish(volume_id, draft(volume_id), identity, to=state, reason="given up")
    return volume_id


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_exactly_the_arrows_of_the_table_can_be_taken(tmp_path: Path, before: VolumeState, after: VolumeState) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        volume_id = in_state(ledger, identity, before)

        def take() -> None:
            if after in TERMINAL:
                ledger.finish(volume_id, draft(volume_id), identity, to=after, reason="given up")
            else:
                ledger.advance(volume_id, after)

        receipts = len(ledger.receipts())
        arrows = len(ledger.transitions(volume_id))
        if after in ARROWS[before]:
            take()
            assert ledger.get(volume_id).state is after
            assert len(ledger.transitions(volume_id)) == arrows + 1
        else:
            with pytest.raises(ArrowRefused, match=f"no arrow from {before} to {after}"):
                take()
            assert ledger.get(volume_id).state is before
            assert len(ledger.transitions(volume_id)) == arrows
            assert len(ledger.receipts()) == receipts


@pytest.mark.parametrize("state", LIVING)
def test_every_living_state_leads_to_erasing_and_can_be_abandoned(state: VolumeState) -> None:
    assert {S.ERASING, S.ABANDONED} <= ARROWS[state]


@pytest.mark.parametrize("end", sorted(TERMINAL))
def test_a_volume_ends_with_a_receipt_only(tmp_path: Path, end: VolumeState) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        volume_id = in_state(ledger, identity, S.ERASING)
        with pytest.raises(ArrowRefused, match="with a receipt only"):
            ledger.advance(volume_id, end)
        with pytest.raises(ArrowRefused, match="with a receipt only"):
            ledger.adopt(row(state=end, reason="found"))
        assert ledger.get(volume_id).state is S.ERASING


def test_another_volumes_receipt_ends_nothing(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        volume_id = in_state(ledger, identity, S.ERASING)
        with pytest.raises(InvalidResource, match="the receipt is of kvv-"):
            ledger.finish(volume_id, draft(row().volume_id), identity)
        with pytest.raises(InvalidResource, match="needs a reason"):
            ledger.finish(volume_id, draft(volume_id), identity, to=S.ABANDONED)
        with pytest.raises(InvalidResource, match="finish"):
            ledger.append_receipt(draft(volume_id), identity)
        assert ledger.head().count == 0


def test_a_place_belongs_to_one_volume_until_it_ended(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        first = ledger.plan(row(place="/srv/kv/one"))
        with pytest.raises(LedgerError, match=f"the place belongs to {first.volume_id}"):
            ledger.plan(row(place="/srv/kv/one"))
        with pytest.raises(LedgerError, match="on record already"):
            ledger.plan(row(first.volume_id))
        ledger.advance(first.volume_id, S.ERASING)
        ledger.finish(first.volume_id, draft(first.volume_id), identity)
        assert ledger.plan(row(place="/srv/kv/one")).state is S.PLANNED


def test_fields_are_kept_and_facts_are_merged(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "s") as ledger:
        planned = ledger.plan(row(consumer={"kind": "process", "pid": 7, "start_time": 99}))
        assert ledger.get(planned.volume_id) == planned
        ledger.advance(planned.volume_id, S.PROVISIONING, key_id="k1", device="/dev/loop0", facts={"a": 1, "b": 2})
        ledger.note(planned.volume_id, facts={"b": 3}, cipher="other")
        ledger.advance(planned.volume_id, S.READY, reason="measured")
    with Ledger.open(tmp_path / "s", create=False) as ledger:
        kept = ledger.get(planned.volume_id)
    assert (kept.key_id, kept.device, kept.facts, kept.cipher) == ("k1", "/dev/loop0", {"a": 1, "b": 3}, "other")
    assert (kept.consumer, kept.spec, kept.reason) == (planned.consumer, planned.spec, "measured")
    assert planned.created_at == kept.created_at < kept.state_since == kept.updated_at


def test_a_note_takes_no_arrow_and_changes_no_identity(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        volume_id = live(ledger, identity)
        with pytest.raises(ArrowRefused, match="has ended"):
            ledger.note(volume_id, facts={"late": True})
        for field in ("state", "place", "tier_uid", "nonsense"):
            with pytest.raises(InvalidResource, match=field):
                ledger.note(volume_id, **{field: "x"})
        with pytest.raises(NotFound):
            ledger.note(row().volume_id, facts={})


def test_volumes_are_found_by_state_and_tier(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        ended = live(ledger, identity)
        other = ledger.plan(row(tier_uid="tier-2")).volume_id
        assert [item.volume_id for item in ledger.volumes()] == [ended, other]
        assert [item.volume_id for item in ledger.volumes(states=LIVING)] == [other]
        assert [item.volume_id for item in ledger.volumes(tier_uid="tier-1")] == [ended]
        assert ledger.volumes(states=[]) == []
        with pytest.raises(NotFound):
            ledger.get(row().volume_id)


def test_an_observer_sees_the_arrow_already_durable_and_before_the_call_returns(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    seen: list[Transition] = []

    def observe(transition: Transition) -> None:
        # Another connection, as another process would have: only what is committed is visible to it.
        with Ledger.open(tmp_path / "s", create=False) as other:
            assert other.transitions(transition.volume_id)[-1] == transition
            assert other.get(transition.volume_id).state is transition.after
            assert bool(other.receipts()) == (transition.after is S.ERASED)
        seen.append(transition)

    with Ledger.open(tmp_path / "s", observers=[observe]) as ledger:
        live(ledger, identity)
    assert [item.after for item in seen] == [
        *(S.PLANNED, S.PROVISIONING, S.READY, S.IN_USE, S.DYING, S.ERASING, S.ERASED)
    ]


def test_an_observer_that_raises_stops_the_caller_but_not_the_record(tmp_path: Path) -> None:
    def observe(_transition: Transition) -> None:
        raise RuntimeError("stop here")

    with Ledger.open(tmp_path / "s", observers=[observe]) as ledger:
        sample = row()
        with pytest.raises(RuntimeError, match="stop here"):
            ledger.plan(sample)
        assert ledger.get(sample.volume_id).state is S.PLANNED


def test_requests_are_open_until_closed_once(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "s") as ledger:
        first = ledger.add_request("default/chat", "All", "customer left")
        second = ledger.add_request("default/chat", "Tenant", "asked to", argument="ab12")
        assert ledger.open_requests() == [first, second]
        closed = ledger.close_request(first.id, "kvr-1")
        assert (closed.state, closed.result) == ("Complete", "kvr-1")
        assert ledger.close_request(second.id, "no such tenant", done=False).state == "Failed"
        assert ledger.open_requests() == []
        with pytest.raises(ArrowRefused):
            ledger.close_request(first.id, "again")
        with pytest.raises(NotFound):
            ledger.close_request("kvq-none", "")
        for scope, argument in (("Some", None), ("All", "x"), ("Tenant", None), ("OlderThan", None)):
            with pytest.raises(InvalidResource, match="scope"):
                ledger.add_request("t", scope, "r", argument=argument)


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier_node.ledger.book.EVENT_LIMIT", 20)
    with Ledger.open(tmp_path / "s") as ledger:
        for number in range(30):
            ledger.add_event("Warning", "Missed", "kvv-x", f"message {number}")
        assert [event.message for event in ledger.events(1000)] == [f"message {number}" for number in range(10, 30)]
        assert [event.message for event in ledger.events(1)] == ["message 29"]
