"""A tokeniser that represents every byte string: frequent words and syllables, with single bytes for the rest.

Greedy longest match over UTF-8. `decode(encode(text)) == text` for every text, since pieces are substrings of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvtier_demo.words import WORDS, syllables

__all__ = ["BEGIN", "END_OF_PROMPT", "PAD", "Tokenizer"]

BEGIN: Final = 0
END_OF_PROMPT: Final = 1
PAD: Final = 2
_SPECIAL_COUNT: Final = 3


class Tokenizer:
    """Token ids: specials (begin, end of prompt, padding), the 256 bytes, then pieces of two bytes and more."""

    def __init__(self) -> None:
        pieces: dict[bytes, None] = {}
        for word in WORDS:
            for form in (word, word.capitalize()):
                pieces[b" " + form.encode()] = None
                pieces[form.encode()] = None
        for syllable in syllables():
            pieces[syllable.encode()] = None
        singles = [bytes([value]) for value in range(256)]
        self._pieces: list[bytes] = [b""] * _SPECIAL_COUNT + singles + [piece for piece in pieces if len(piece) > 1]
        self._ids: dict[bytes, int] = {piece: index for index, piece in enumerate(self._pieces) if piece}
        self._longest_bytes = max(len(piece) for piece in self._pieces)

    @property
    def vocabulary_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, specials not added. A lone surrogate raises UnicodeEncodeError."""
        data = text.encode("utf-8")
        tokens: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest_bytes, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    tokens.append(token)
                    at += length
                    break
        return tokens

    def prompt_tokens(self, text: str) -> list[int]:
        """The prompt as a chat template gives it to a model: begin, text, end of prompt."""
        return [BEGIN, *self.encode(text), END_OF_PROMPT]

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`; specials are dropped, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._pieces[token] for token in tokens).decode("utf-8", errors="replace")

    def prompt_part(self, tokens: Sequence[int]) -> list[int]:
        """`tokens` up to the end-of-prompt mark, or all of them where there is none."""
        return list(tokens[: list(tokens).index(END_OF_PROMPT)]) if END_OF_PROMPT in tokens else list(tokens)
