"""KV blocks as bytes, in the layout of vLLM's simple disk backend.

A block is the concatenation of every layer's keys and values for `block_tokens` tokens, padded to a multiple of 4096.
Blocks are named by a hash over all tokens up to their end, so that equal prefixes share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvtier_api.errors import EngineError

__all__ = ["ALIGNMENT_BYTES", "BlockShape", "block_keys"]

ALIGNMENT_BYTES: Final = 4096


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block. `element_bytes`: 2 for bfloat16, 4 for float32."""

    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        return -(-self.payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def pad(self, payload: bytes) -> bytes:
        if len(payload) != self.payload_bytes:
            raise EngineError(f"a block's payload is {self.payload_bytes} bytes, not {len(payload)}", obj="payload")
        return payload + bytes(self.block_bytes - self.payload_bytes)


def block_keys(tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Name of each full block of `tokens`: SHA-256 over the name of the block before it and its own tokens."""
    keys: list[bytes] = []
    previous = b"kvtier-demo"
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        own = b"".join(token.to_bytes(4, "big") for token in tokens[start : start + block_tokens])
        previous = hashlib.sha256(previous + own).digest()
        keys.append(previous)
    return keys
