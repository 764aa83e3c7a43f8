"""A ledger that another process writes to just while it is opened is not taken for a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_node.ledger import Ledger, database
from ledger_samples import row


def test_a_commit_of_another_process_while_the_ledger_is_opened_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.open(tmp_path / "state") as other:
        other.plan(row())
        read_mark = database._read_mark

        def and_meanwhile(state: object) -> int:
            monkeypatch.setattr(database, "_read_mark", read_mark)
            other.plan(row())
            return read_mark(state)

        monkeypatch.setattr(database, "_read_mark", and_meanwhile)
        with Ledger.open(tmp_path / "state", create=False) as ledger:
            assert len(ledger.volumes()) == 2
