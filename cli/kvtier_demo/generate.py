"""A request served: prefill, greedy generation, offload to a block store, and the proof that a reload is real."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvtier_api.errors import InvalidResource
from kvtier_demo.kvblocks import block_keys
from kvtier_demo.model import DemoModel, KVCache

__all__ = ["ANSWER_TOKENS", "BlockStore", "Reload", "Served", "offload", "reload", "serve"]

ANSWER_TOKENS = 24  # enough that the block with the prompt's last token is full, and one more token follows


class BlockStore(Protocol):
    """Where blocks go. `get` returns None for a block that is not there, or not intact."""

    def put(self, key: bytes, block: bytes) -> None: ...

    def get(self, key: bytes) -> bytes | None: ...


@dataclass(frozen=True)
class Served:
    """A served request: all tokens (prompt, then answer), its cache, and the logits of the last block computed."""

    tokens: list[int]
    prompt_tokens: int
    cache: KVCache
    last_logits: Any

    def full_blocks(self) -> list[bytes]:
        """Bytes of each full block, in order: what the engine offloads."""
        return [self.cache.block_bytes(index) for index in range(len(self.tokens) // self.cache.config.block_tokens)]


@dataclass(frozen=True)
class Reload:
    """Blocks found in the store and those asked for, and whether the logits computed over them equal the first ones."""

    hits: int
    asked: int
    logits_identical: bool


def serve(model: DemoModel, prompt: str, *, answer_tokens: int = ANSWER_TOKENS) -> Served:
    """Prefill `prompt`, generate `answer_tokens` greedily. Raises InvalidResource where it does not fit the model."""
    size = model.config.block_tokens
    tokens = model.tokenizer.prompt_tokens(prompt)
    prompt_tokens = len(tokens)
    limit = model.config.max_positions
    if prompt_tokens + answer_tokens > limit:
        raise InvalidResource(
            f"{prompt_tokens} prompt tokens and {answer_tokens} of the answer do not fit {limit} positions",
            obj="prompt",
            remedy=f"shorten the prompt to {limit - answer_tokens} tokens",
        )
    cache = KVCache(model.config)
    for block in range((prompt_tokens - 1) // size):
        model.run_block(tokens[block * size : (block + 1) * size], block, cache)
    block = (prompt_tokens - 1) // size
    logits = model.run_block(tokens[block * size :], block, cache)
    for _ in range(answer_tokens):
        tokens.append(int(logits[-1].argmax()))
        block = (len(tokens) - 1) // size
        logits = model.run_block(tokens[block * size :], block, cache)
    return Served(tokens, prompt_tokens, cache, logits)


def offload(served: Served, store: BlockStore) -> int:
    """Put each full block into `store`; returns how many."""
    blocks = served.full_blocks()
    keys = block_keys(served.tokens, served.cache.config.block_tokens)
    for key, block in zip(keys, blocks, strict=True):
        store.put(key, block)
    return len(blocks)


def reload(model: DemoModel, tokens: Sequence[int], store: BlockStore, expected_logits: Any) -> Reload:
    """Serve the same tokens from an empty cache and `store`; compare the last block's logits bit for bit.

    As in an engine, the block with the last token is always computed. The first block that the store lacks, and those
    after it, are computed too, and are no hits.
    """
    size = model.config.block_tokens
    cache = KVCache(model.config)
    last = (len(tokens) - 1) // size
    keys = block_keys(tokens, size)[:last]
    hits = 0
    for index, key in enumerate(keys):
        data = store.get(key)
        if data is None:
            break
        cache.load_block(index, data)
        hits += 1
    logits: Any = None
    for block in range(hits, last + 1):
        logits = model.run_block(tokens[block * size : (block + 1) * size], block, cache)
    return Reload(hits=hits, asked=len(keys), logits_identical=bool(torch.equal(logits, expected_logits)))
