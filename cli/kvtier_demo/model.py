"""A small real decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU, paged KV cache.

Weights are random from a seed, so nothing is downloaded; what matters here, the KV cache, has the structure of any
model of the Llama family. The answers are gibberish. The layout of blocks in files is `kvblocks`' subject.

Every step computes one whole block of positions (padded), so that each matrix product has the same shape whether its
prefix was computed or reloaded: logits after a reload equal the first ones bit for bit, or the reload was wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtier_demo.attack import KeyTable
from kvtier_demo.kvblocks import BlockShape
from kvtier_demo.tokenizer import PAD, Tokenizer

__all__ = ["DemoModel", "KVCache", "ModelConfig"]

_EPSILON = 1e-6


class ModelConfig(BaseModel):
    """Dimensions of the model; two models of equal configuration are equal. Not secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 20
    d_model: int = Field(default=256, ge=8)
    layers: int = Field(default=4, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=64, ge=8, multiple_of=2)
    hidden: int = Field(default=512, ge=8)
    rope_theta: float = Field(default=10000.0, gt=1)
    max_positions: int = Field(default=4096, ge=16)
    block_tokens: int = Field(default=16, ge=1)
    kv_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    @property
    def block_shape(self) -> BlockShape:
        return BlockShape(
            layers=self.layers,
            block_tokens=self.block_tokens,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            element_bytes=2 if self.kv_dtype == "bfloat16" else 4,
        )


class KVCache:
    """Keys and values of one sequence, by block: [blocks, layers, K or V, block_tokens, kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        blocks = math.ceil(config.max_positions / config.block_tokens)
        dtype = torch.bfloat16 if config.kv_dtype == "bfloat16" else torch.float32
        shape = (blocks, config.layers, 2, config.block_tokens, config.kv_heads, config.head_dim)
        self.blocks: Any = torch.zeros(shape, dtype=dtype)

    def block_bytes(self, index: int) -> bytes:
        """The block as an engine offloads it: every layer's K, then V; padded to the file's alignment."""
        raw = self.blocks[index].contiguous().view(torch.uint8).numpy().tobytes()
        return self.config.block_shape.pad(raw)

    def load_block(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Put a block's bytes, as read from a store, back into the cache."""
        shape = self.config.block_shape
        raw = torch.frombuffer(bytearray(data[: shape.payload_bytes]), dtype=self.blocks.dtype)
        self.blocks[index] = raw.view(self.blocks[index].shape)


class DemoModel:
    """The transformer. Deterministic: two instances of one configuration compute the same bytes on one machine."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or ModelConfig()
        self.tokenizer = Tokenizer()
        c = self.config
        generator = torch.Generator().manual_seed(c.seed)

        def weight(*shape: int, scale: float | None = None) -> Any:
            return torch.randn(*shape, generator=generator) * (scale if scale is not None else shape[0] ** -0.5)

        self._embedding = weight(self.tokenizer.vocabulary_size, c.d_model, scale=1.0)
        self._layers: list[dict[str, Any]] = [
            {
                "norm_attention": 1 + weight(c.d_model, scale=0.1),
                "q": weight(c.d_model, c.heads * c.head_dim),
                "k": weight(c.d_model, c.kv_heads * c.head_dim),
                "v": weight(c.d_model, c.kv_heads * c.head_dim),
                "o": weight(c.heads * c.head_dim, c.d_model),
                "norm_mlp": 1 + weight(c.d_model, scale=0.1),
                "gate": weight(c.d_model, c.hidden),
                "up": weight(c.d_model, c.hidden),
                "down": weight(c.hidden, c.d_model),
            }
            for _ in range(c.layers)
        ]
        self._norm_out = 1 + weight(c.d_model, scale=0.1)
        half = c.head_dim // 2
        self._inv_freq = c.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)

    def key_table(self) -> KeyTable:
        """What an attacker needs of the model: public weights only, the layer-0 key of each token before RoPE."""
        c = self.config
        with _one_thread():
            keys = _rms_norm(self._embedding, self._layers[0]["norm_attention"]) @ self._layers[0]["k"]
        return KeyTable(
            keys=keys.view(-1, c.kv_heads, c.head_dim).numpy().astype(np.float32),
            inv_freq=self._inv_freq.numpy().astype(np.float64),
            max_positions=c.max_positions,
            element=c.kv_dtype,
        )

    def _rotate(self, x: Any, positions: Any) -> Any:
        angles = positions.to(torch.float64)[:, None] * self._inv_freq[None, :]
        cos, sin = angles.cos().float()[:, None, :], angles.sin().float()[:, None, :]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def run_block(self, tokens: Sequence[int], block: int, cache: KVCache) -> Any:
        """Compute the tokens of one block over the cache of the blocks before it, and write their keys and values.

        `tokens`: 1 to block_tokens ids, from the block's first position on. Returns logits [len(tokens), vocabulary].
        Positions after `tokens` hold padding, which nothing before them attends to.
        """
        c = self.config
        start, end = block * c.block_tokens, (block + 1) * c.block_tokens
        padded = list(tokens) + [PAD] * (c.block_tokens - len(tokens))
        positions = torch.arange(start, end)
        unseen = torch.arange(end)[None, :] > positions[:, None]
        with _one_thread():
            x = self._embedding[torch.tensor(padded)]
            for index, layer in enumerate(self._layers):
                h = _rms_norm(x, layer["norm_attention"])
                q = self._rotate((h @ layer["q"]).view(-1, c.heads, c.head_dim), positions)
                k = self._rotate((h @ layer["k"]).view(-1, c.kv_heads, c.head_dim), positions)
                cache.blocks[block, index, 0] = k
                cache.blocks[block, index, 1] = (h @ layer["v"]).view(-1, c.kv_heads, c.head_dim)
                keys, values = (
                    cache.blocks[: block + 1, index, which].float().reshape(end, c.kv_heads, c.head_dim)
                    .repeat_interleave(c.heads // c.kv_heads, dim=1).transpose(0, 1)
                    for which in (0, 1)
                )  # fmt: skip
                scores = q.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(c.head_dim)
                mixed = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1) @ values
                x = x + mixed.transpose(0, 1).reshape(c.block_tokens, -1) @ layer["o"]
                h = _rms_norm(x, layer["norm_mlp"])
                x = x + (torch.nn.functional.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
            logits = _rms_norm(x, self._norm_out) @ self._embedding.T
        return logits[: len(tokens)]


def _rms_norm(x: Any, weight: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + _EPSILON) * weight


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and no gradients: small products are faster so, and their sums have one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
