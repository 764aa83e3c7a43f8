"""A reload is proven by logits that are equal bit for bit, and the proof fails when a single stored byte is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier_api.errors import InvalidResource

if TYPE_CHECKING:
    from kvtier_demo.generate import Served
    from kvtier_demo.model import DemoModel
    from kvtier_demo.stock import StockDisk

pytestmark = pytest.mark.torch


def test_a_reload_from_the_file_gives_identical_logits(model: DemoModel, served: Served, stock_disk: StockDisk) -> None:
    from kvtier_demo.generate import offload, reload

    assert offload(served, stock_disk) == len(served.tokens) // model.config.block_tokens
    again = reload(model, served.tokens, stock_disk, served.last_logits)
    assert again.hits == again.asked == (len(served.tokens) - 1) // model.config.block_tokens
    assert again.logits_identical


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("value", [0, 1], ids=["key", "value"])
def test_one_wrong_number_in_any_layer_is_noticed(
    layer: int, value: int, model: DemoModel, served: Served, stock_disk: StockDisk
) -> None:
    from kvtier_demo.generate import offload, reload

    offload(served, stock_disk)
    half_layer_bytes = model.config.block_shape.payload_bytes // (2 * model.config.layers)
    with open(stock_disk.path, "r+b") as file:
        # The high byte of a bfloat16: sign and exponent, so that the number really changes.
        file.seek(model.config.block_shape.block_bytes + (2 * layer + value) * half_layer_bytes + 1)
        before = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([before ^ 0x81]))
    again = reload(model, served.tokens, stock_disk, served.last_logits)
    assert again.hits == again.asked
    assert not again.logits_identical


def test_swapped_blocks_are_noticed(model: DemoModel, served: Served, stock_disk: StockDisk) -> None:
    from kvtier_demo.generate import reload
    from kvtier_demo.kvblocks import block_keys

    blocks = served.full_blocks()
    blocks[0], blocks[1] = blocks[1], blocks[0]
    for key, block in zip(block_keys(served.tokens, model.config.block_tokens), blocks, strict=True):
        stock_disk.put(key, block)
    assert not reload(model, served.tokens, stock_disk, served.last_logits).logits_identical


def test_what_the_store_lacks_is_computed_and_is_no_hit(
    model: DemoModel, served: Served, stock_disk: StockDisk
) -> None:
    from kvtier_demo.generate import reload
    from kvtier_demo.kvblocks import block_keys

    keys = block_keys(served.tokens, model.config.block_tokens)
    for key, block in list(zip(keys, served.full_blocks(), strict=True))[:2]:
        stock_disk.put(key, block)
    again = reload(model, served.tokens, stock_disk, served.last_logits)
    assert (again.hits, again.logits_identical) == (2, True)


def test_two_models_of_one_configuration_write_the_same_bytes(model: DemoModel, served: Served, prompt: str) -> None:
    from kvtier_demo.generate import serve
    from kvtier_demo.model import DemoModel

    assert serve(DemoModel(model.config), prompt).full_blocks() == served.full_blocks()


def test_every_token_of_the_prompt_lies_in_a_block_that_is_offloaded(model: DemoModel) -> None:
    from kvtier_demo.generate import serve

    for length in range(1, 40):
        served = serve(model, "x" * length, answer_tokens=24)
        assert len(served.full_blocks()) * model.config.block_tokens >= served.prompt_tokens


def test_a_prompt_that_does_not_fit_is_refused_without_quoting_it(model: DemoModel) -> None:
    from kvtier_demo.generate import serve

    with pytest.raises(InvalidResource, match="do not fit 4096 positions") as caught:
        serve(model, "zq#" * 5000)
    assert "zq#" not in str(caught.value)


def test_blocks_are_padded_to_whole_pages_and_the_padding_is_no_part_of_the_cache() -> None:
    from kvtier_demo.generate import serve
    from kvtier_demo.model import DemoModel, KVCache, ModelConfig

    small = DemoModel(ModelConfig(d_model=32, heads=1, kv_heads=1, head_dim=8, layers=1, hidden=32, block_tokens=4))
    shape = small.config.block_shape
    assert (shape.payload_bytes, shape.block_bytes) == (128, 4096)
    served = serve(small, "hello")
    block = served.full_blocks()[0]
    assert block[128:] == bytes(4096 - 128)
    cache = KVCache(small.config)
    cache.load_block(0, block[:128] + b"\xff" * (4096 - 128))
    assert cache.block_bytes(0) == block
