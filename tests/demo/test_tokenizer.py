"""The tokeniser represents every text exactly: what the attack reads back is what was typed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier_demo.tokenizer import BEGIN, END_OF_PROMPT, Tokenizer

TOKENIZER = Tokenizer()


@given(st.text())
def test_every_text_comes_back_exactly(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.text())
def test_the_prompt_ends_at_its_mark(text: str) -> None:
    tokens = TOKENIZER.prompt_tokens(text)
    assert (tokens[0], tokens[-1]) == (BEGIN, END_OF_PROMPT)
    assert TOKENIZER.decode(TOKENIZER.prompt_part([*tokens, 300, 400])) == text


def test_frequent_words_are_one_token_each() -> None:
    assert len(TOKENIZER.encode("the patient should never tell")) == 5


def test_no_two_tokens_stand_for_the_same_bytes() -> None:
    pieces = [TOKENIZER.piece(token) for token in range(TOKENIZER.vocabulary_size)]
    spoken = [piece for piece in pieces if piece]
    assert len(spoken) == len(set(spoken)) == len(pieces) - 3
