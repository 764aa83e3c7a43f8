"""The ledger's rows and receipts as API objects: valid, the same for the same row, and without anything secret."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvtier_api.documents import parse_object
from kvtier_api.erasure import KVCacheErasure, Trigger
from kvtier_api.volume import BackendName, KVCacheVolume, VolumeState
from kvtier_node.cluster.cursor import Cursor, CursorFile
from kvtier_node.cluster.objects import erasure_object, node_label, volume_object, volume_status
from kvtier_node.cluster.reporting import Due
from kvtier_node.cluster.volume_conditions import Seen, differ, volume_conditions
from kvtier_node.identity import NodeIdentity
from kvtier_node.pods.consumer import PodConsumer, PodIdentity, pod_of
from kvtier_node.receipts import Step
from kvtier_node.receipts.receipt import sign_receipt
from ledger_samples import draft, row

POD = PodIdentity(
    "uid-1", "default", "engine-0", "csi-1", "/var/lib/kubelet/pods/uid-1/volumes/kubernetes.io~csi/kv/mount"
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SPEC = {"sizePerRank": "512Mi", "ranks": 2, "path": "/srv/kv"}
ROW = replace(
    row(),
    facts={"uid": 1000, "gid": 1000, "pod": POD.record(), "nonce": "cd" * 16},
    spec=SPEC,
    created_at="2026-01-01T00:00:00Z",
    state_since="2026-01-01T00:00:01Z",
)


@pytest.mark.parametrize("state", list(VolumeState))
@pytest.mark.parametrize("backend", list(BackendName))
def test_every_row_makes_an_object_that_the_models_take(state: VolumeState, backend: BackendName) -> None:
    of = replace(ROW, state=state, backend=backend, key_id="ab" * 16)
    body = volume_object(of, POD, system_uuid="u")
    status = volume_status(of, None, volume_conditions(of, None, Seen(), (), NOW), "why")
    whole = {**body, "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    volume = parse_object(json.loads(json.dumps(whole)), kind=KVCacheVolume)
    assert volume.status is not None and volume.status.state is state
    assert (volume.spec.cipher is None) == (backend in (BackendName.HOST_ATTESTED, BackendName.SEAL_ONLY))
    assert "cd" * 16 not in json.dumps(whole), "the nonce is the consumer's"


def test_the_spec_does_not_change_over_a_volumes_life() -> None:
    """It is written once: what is learnt later is status."""
    later = replace(
        ROW, state=VolumeState.IN_USE, device="/dev/loop7", key_id="k", consumer=PodConsumer.of(POD).record()
    )
    assert volume_object(later, POD, system_uuid=None)["spec"] == volume_object(ROW, POD, system_uuid=None)["spec"]
    assert pod_of(later.consumer, {}) == POD


def test_an_erasures_record_says_what_the_receipt_says(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "state")
    of = replace(ROW, state=VolumeState.ERASED, facts={**ROW.facts, "request": "r-1"})
    receipt = sign_receipt(draft(of.volume_id, trigger=Trigger.REQUEST), seq=1, prev="0" * 64, signer=identity)
    body, status = erasure_object(of, POD, receipt)
    whole = {**body, "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}
    record = parse_object(json.loads(json.dumps(whole)), kind=KVCacheErasure)
    assert record.metadata.labels["kvtier.dev/request"] == "r-1"
    assert record.metadata.labels["kvtier.dev/volume"] == of.volume_id
    assert record.status is not None and record.status.volumes[0].verified is True
    assert erasure_object(of, POD, receipt) == (body, status), "told twice, it is the same"
    unproven = sign_receipt(
        draft(of.volume_id, steps=[Step("read-back", None, "not read")]), seq=1, prev="0" * 64, signer=identity
    )
    assert erasure_object(of, POD, unproven)[1].volumes[0].verified is False, "what was not measured is not verified"
    for last, verified in ((True, True), (None, False)):
        made_good = [Step("fence", True), Step("read-back", False, "x"), Step("read-back-after-overwrite", last, "y")]
        overwritten = sign_receipt(draft(of.volume_id, steps=made_good), seq=1, prev="0" * 64, signer=identity)
        assert erasure_object(of, POD, overwritten)[1].volumes[0].verified is verified, (
            "a failure is made good by measuring"
        )


def test_a_figure_in_a_message_is_no_change_of_a_condition() -> None:
    of = replace(ROW, state=VolumeState.IN_USE)
    one = volume_conditions(of, None, Seen(), (), NOW)
    other = [condition.model_copy(update={"message": "other figures"}) for condition in one]
    assert not differ(one, other)
    assert differ(one, [condition.model_copy(update={"reason": "Other"}) for condition in one])


def test_a_nodes_name_is_a_label_or_its_hash_is() -> None:
    assert node_label("worker-7.example.org") == "worker-7.example.org"
    assert len(node_label("n" * 253)) <= 63


def test_nothing_counts_as_told_before_what_came_first_is() -> None:
    due = Due()
    for arrow, volume_id in enumerate(("a", "b", "a", "c"), start=1):
        due.add(volume_id, arrow)
    assert due.in_order() == ["b", "a", "c"]
    due.take("b")
    due.take("c")
    assert due.told() == 0, "arrow 1 is a's, and is not told"
    due.take("a")
    assert due.told() == 4
    due.again("a")
    assert due.told() == 4, "a volume that is due again holds back no arrow"


def test_the_cursor_is_of_one_ledger_and_survives_damage(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    file = CursorFile(str(tmp_path / "state"))
    assert file.load("first") == Cursor("first")
    file.save(Cursor("first", 7, 3))
    assert CursorFile(str(tmp_path / "state")).load("first") == Cursor("first", 7, 3)
    assert CursorFile(str(tmp_path / "state")).load("rebuilt-later") == Cursor("rebuilt-later"), "numbers begin anew"
    for damage in (b"", b"{", b"[]", b'{"ledger": "first"}', b'{"ledger": "first", "arrow": "x", "event": 0}'):
        (tmp_path / "state" / "reported.json").write_bytes(damage)
        (tmp_path / "state" / "reported.json").chmod(0o600)
        assert CursorFile(str(tmp_path / "state")).load("first") == Cursor("first")


def test_erasures_are_told_in_the_order_in_which_they_ended() -> None:
    """Whatever was due of a volume before: an arrow that began sooner, or a condition that changed."""
    due = Due()
    due.add("first to begin", 1)
    due.again("looked at")
    due.add("first to end", 2)
    due.add("first to end", 3)
    due.add("first to begin", 4)
    due.add("looked at", 5)
    assert due.in_order() == ["first to end", "first to begin", "looked at"]
    assert due.told() == 0
    due.take("first to begin")
    assert due.told() == 1


def test_what_could_not_be_told_stays_due_with_what_came_meanwhile() -> None:
    due = Due()
    due.add("volume", 1)
    due.add("other", 2)
    taken = due.take("volume")
    due.add("volume", 3)
    due.put_back("volume", taken)
    assert due.in_order() == ["other", "volume"]
    assert due.told() == 0
