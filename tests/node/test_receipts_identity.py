"""The node's key is made once, is private, and is never made anew in silence."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import threading
from pathlib import Path

import pytest

from kvtier_api.errors import NotFound, VerificationFailed
from kvtier_node.identity import NodeIdentity, node_id_of, signature_holds
from kvtier_node.ledger import Ledger
from ledger_samples import live


def test_the_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    first = NodeIdentity.load_or_create(tmp_path / "s")
    assert NodeIdentity.load_or_create(tmp_path / "s").public_key == first.public_key
    assert NodeIdentity.load(tmp_path / "s").node_id == first.node_id == node_id_of(first.public_key)
    assert stat.S_IMODE((tmp_path / "s" / "node.key").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "s") == ["node.key"]


def test_signatures_hold_for_exactly_what_was_signed(tmp_path: Path) -> None:
    node, other = NodeIdentity.load_or_create(tmp_path / "a"), NodeIdentity.load_or_create(tmp_path / "b")
    signature = node.sign(b"message")
    assert signature_holds(node.public_key, signature, b"message")
    assert not signature_holds(node.public_key, signature, b"massage")
    assert not signature_holds(other.public_key, signature, b"message")
    assert not signature_holds(b"short", signature, b"message")
    assert not signature_holds(node.public_key, b"", b"message")


@pytest.mark.parametrize("damage", ["empty", "short", "long", "flipped key", "flipped check", "text"])
def test_a_damaged_key_is_an_error_and_stays_as_it_is(tmp_path: Path, damage: str) -> None:
    NodeIdentity.load_or_create(tmp_path / "s")
    path = tmp_path / "s" / "node.key"
    content = path.read_bytes()
    bad = {
        "empty": b"",
        "short": content[:-1],
        "long": content + b"\n",
        "flipped key": bytes([content[0] ^ 1]) + content[1:],
        "flipped check": content[:-1] + bytes([content[-1] ^ 1]),
        "text": b"-----BEGIN PRIVATE KEY-----\n",
    }[damage]
    path.write_bytes(bad)
    for load in (NodeIdentity.load_or_create, NodeIdentity.load):
        with pytest.raises(VerificationFailed, match="damaged") as caught:
            load(tmp_path / "s")
        assert content.hex()[:16] not in str(caught.value)
    assert path.read_bytes() == bad


def test_a_key_that_is_gone_is_not_made_anew_while_its_receipts_are_here(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    with Ledger.open(tmp_path / "s") as ledger:
        live(ledger, identity)
    (tmp_path / "s" / "node.key").unlink()
    with pytest.raises(VerificationFailed, match="key is gone"):
        NodeIdentity.load_or_create(tmp_path / "s")
    assert not (tmp_path / "s" / "node.key").exists()


def test_a_creation_that_was_cut_short_leaves_no_half_key(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    (tmp_path / "s" / "node.key.new").write_bytes(b"half")
    (tmp_path / "s" / "node.key.new").chmod(0o600)
    NodeIdentity.load_or_create(tmp_path / "s")
    assert os.listdir(tmp_path / "s") == ["node.key"]


def test_many_at_once_get_one_key(tmp_path: Path) -> None:
    found: list[bytes] = []
    gate = threading.Barrier(8)

    def load() -> None:
        gate.wait()
        found.append(NodeIdentity.load_or_create(tmp_path / "s").public_key)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_loading_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        NodeIdentity.load(tmp_path / "s")
    assert not (tmp_path / "s").exists()
    (tmp_path / "s").mkdir(mode=0o700)
    with pytest.raises(VerificationFailed, match="no key yet"):
        NodeIdentity.load(tmp_path / "s")


def test_the_key_is_not_shown_copied_or_pickled(tmp_path: Path) -> None:
    identity = NodeIdentity.load_or_create(tmp_path / "s")
    assert repr(identity) == f"NodeIdentity({identity.node_id})"
    for work in (lambda: pickle.dumps(identity), lambda: copy.copy(identity)):
        with pytest.raises(TypeError):
            work()
