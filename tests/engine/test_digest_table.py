"""The hash table against a dict, and its memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_engine.digest_table import DigestTable

NODES = 24


def _digest(number: int) -> bytes:
    # Few distinct leading bytes: long runs of neighbours and equal fingerprints, wrapping round the table's end.
    return bytes([255, 255, 255, 200 + number % 3 * 27]) + number.to_bytes(12, "big")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=200))
def test_table_answers_as_a_dict_does_after_any_inserts_and_removals(steps: list[tuple[bool, int]]) -> None:
    table, model, free = DigestTable(NODES), dict[bytes, int](), list(range(NODES))
    for insert, number in steps:
        digest = _digest(number)
        if insert and digest not in model and free:
            model[digest] = free.pop()
            table.insert(digest, model[digest])
        elif not insert:
            table.remove(digest)
            if digest in model:
                free.append(model.pop(digest))
    for number in range(61):
        assert table.find(_digest(number)) == model.get(_digest(number), -1)
    for digest, node in model.items():
        assert table.digest(node) == digest
