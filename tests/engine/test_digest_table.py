"""The hash table against a dict, and its memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_engine.digest_table import DigestTable

NODES = 24


def _digest(number: int) -> bytes:
    # Few distinct leading bytes: long runs of neighbours and equal fingerprints, wrapping round the table's end.
    return bytes([255, 255, 255, 200 + number % 3 * 27]) + number.to_bytes(12, "big")


@settings(max_examples=300)
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
    digests = [_digest(number) for number in range(61)]
    assert [table.find(digest) for digest in digests] == [model.get(digest, -1) for digest in digests]
    assert table.find_each(digests) == [model.get(digest, -1) for digest in digests]
    for digest, node in model.items():
        assert table.digest(node) == digest


@settings(max_examples=200)
@given(st.sets(st.integers(0, 60), max_size=10), st.sets(st.integers(0, 60), max_size=14), st.sets(st.integers(0, 60)))
def test_a_batch_is_inserted_as_its_digests_one_by_one(before: set[int], batch: set[int], gone: set[int]) -> None:
    table, batch = DigestTable(NODES), batch - before
    for node, number in enumerate(before):
        table.insert(_digest(number), 14 + node)
    table.insert_each([_digest(number) for number in batch], 3 if len(batch) < 11 else 0)
    for number in gone:
        table.remove(_digest(number))
    for first, numbers in ((14, before), (3 if len(batch) < 11 else 0, batch)):
        for node, number in enumerate(numbers, first):
            assert table.find(_digest(number)) == (-1 if number in gone else node)
            assert table.digest(node) == _digest(number)
    assert table.find_each([]) == []
