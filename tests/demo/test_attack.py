"""The attack reads a prompt off any file that holds plaintext KV blocks, and reads nothing off anything else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier_api.errors import NotFound, UsageError

if TYPE_CHECKING:
    from kvtier_demo.generate import Served
    from kvtier_demo.model import DemoModel

pytestmark = pytest.mark.torch
Leave = Callable[..., Path]

TYPED = [
    "x",
    "Hello, world!",
    "My password is hunter2; don't tell my EMPLOYER.",
    "Überweisung an Müller & Söhne: 1.234,56 € -- «dringend»",
    "你好，请解释这份诊断报告。🙂👩‍⚕️ עברית العربية",  # noqa: RUF001
    "line one\nline two\r\n\ttabbed   spaces \x00 nul \x7f",
    "SELECT * FROM patients WHERE name = 'O''Brien'; -- {\"a\": [1, 2]}",
    "Please summarize the following confidential contract. " * 30,
]


def _used(path: Path, model: DemoModel, served: Served) -> bytes:
    size = len(served.full_blocks()) * model.config.block_shape.block_bytes
    return path.read_bytes()[:size]


@pytest.mark.parametrize("text", TYPED, ids=range(len(TYPED)))
def test_any_typed_prompt_is_recovered_word_for_word(text: str, model: DemoModel, leave_behind: Leave) -> None:
    from kvtier_demo.attack import recover_prompt
    from kvtier_demo.generate import serve

    found = recover_prompt(leave_behind(model, serve(model, text)), model)
    tokens = model.tokenizer.prompt_tokens(text)
    assert found.text == text
    assert found.matching(tokens) == len(tokens)


@pytest.mark.parametrize(
    "dimensions",
    [
        {"seed": 7, "d_model": 96, "heads": 2, "kv_heads": 1, "head_dim": 32, "layers": 2, "kv_dtype": "float32"},
        {"seed": 8, "d_model": 128, "heads": 4, "kv_heads": 4, "head_dim": 128, "layers": 1, "block_tokens": 8},
        {"seed": 9, "rope_theta": 500000.0, "d_model": 64, "hidden": 64, "layers": 3, "block_tokens": 5},
    ],
    ids=lambda d: f"seed{d['seed']}",
)
def test_other_weights_dimensions_and_precisions_are_recovered_too(
    dimensions: dict[str, object], prompt: str, leave_behind: Leave
) -> None:
    from kvtier_demo.attack import recover_prompt
    from kvtier_demo.generate import serve
    from kvtier_demo.model import DemoModel, ModelConfig

    other = DemoModel(ModelConfig.model_validate(dimensions))
    assert recover_prompt(leave_behind(other, serve(other, prompt)), other).text == prompt


def test_the_weights_of_another_model_read_nothing(model: DemoModel, served: Served, leave_behind: Leave) -> None:
    from kvtier_demo.attack import recover_prompt
    from kvtier_demo.model import DemoModel, ModelConfig

    other = DemoModel(ModelConfig(seed=model.config.seed + 1))
    assert recover_prompt(leave_behind(model, served), other).hits == []


@pytest.mark.parametrize("make", [os.urandom, bytes, lambda n: (b"GET /index.html HTTP/1.1\r\n" * n)[:n]])
def test_nothing_is_found_where_nothing_is(make: Callable[[int], bytes], model: DemoModel, tmp_path: Path) -> None:
    from kvtier_demo.attack import recover_prompt

    image = tmp_path / "image"
    image.write_bytes(make(16 << 20))
    found = recover_prompt(image, model)
    assert (found.hits, found.text, found.tokens_recovered, found.scanned_bytes) == ([], "", 0, 16 << 20)


def test_an_encrypted_copy_gives_nothing(model: DemoModel, served: Served, leave_behind: Leave, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvtier_demo.attack import recover_prompt

    plain = _used(leave_behind(model, served), model, served)
    sealed = tmp_path / "sealed"
    sealed.write_bytes(AESGCM(os.urandom(32)).encrypt(os.urandom(12), plain, None))
    assert recover_prompt(sealed, model).hits == []


@pytest.mark.parametrize("offset", [4096, 7 * 4096 + 512, (8 << 20) - 64, (8 << 20) - 4096 + 64])
def test_a_file_inside_a_larger_image_is_found_wherever_it_lies(
    offset: int, model: DemoModel, served: Served, prompt: str, leave_behind: Leave, tmp_path: Path
) -> None:
    from kvtier_demo.attack import recover_prompt

    alone = leave_behind(model, served)
    image = tmp_path / "image"
    image.write_bytes(os.urandom(offset) + _used(alone, model, served) + os.urandom(1 << 20))
    found = recover_prompt(image, model)
    assert found.text == prompt
    assert [hit.offset - offset for hit in found.hits] == [hit.offset for hit in recover_prompt(alone, model).hits]


def test_keys_at_odd_places_need_a_finer_alignment(
    model: DemoModel, served: Served, prompt: str, leave_behind: Leave, tmp_path: Path
) -> None:
    from kvtier_demo.attack import recover_prompt

    image = tmp_path / "image"
    image.write_bytes(os.urandom(4096 + 6) + _used(leave_behind(model, served), model, served))
    assert recover_prompt(image, model).hits == []
    assert recover_prompt(image, model, alignment_bytes=2).text == prompt


def test_blocks_are_put_in_order_by_what_they_hold_not_by_where_they_lie(
    model: DemoModel, served: Served, prompt: str, tmp_path: Path
) -> None:
    from kvtier_demo.attack import recover_prompt

    blocks = served.full_blocks()
    random.Random(3).shuffle(blocks)
    image = tmp_path / "image"
    image.write_bytes(b"".join(blocks))
    assert recover_prompt(image, model).text == prompt


def test_after_a_partial_overwrite_the_rest_is_still_read(
    model: DemoModel, served: Served, prompt: str, leave_behind: Leave
) -> None:
    from kvtier_demo.attack import GAP, recover_prompt

    leftover = leave_behind(model, served)
    shape, size = model.config.block_shape, model.config.block_tokens
    with leftover.open("r+b") as file:
        file.seek(2 * shape.block_bytes)
        file.write(os.urandom(shape.block_bytes))
    found = recover_prompt(leftover, model)
    tokens = model.tokenizer.prompt_tokens(prompt)
    assert found.matching(tokens) == len(tokens) - size
    before, after = found.text.split(GAP)
    assert before == model.tokenizer.decode(tokens[: 2 * size])
    assert after == model.tokenizer.decode(tokens[3 * size :])


def test_one_kv_head_of_each_token_is_enough(
    model: DemoModel, served: Served, prompt: str, leave_behind: Leave
) -> None:
    from kvtier_demo.attack import recover_prompt

    leftover = leave_behind(model, served)
    head_bytes = model.config.head_dim * 2
    with leftover.open("r+b") as file:
        for hit in recover_prompt(leftover, model).hits:
            if hit.kv_head == hit.position % 2:
                file.seek(hit.offset)
                file.write(bytes(head_bytes))
    assert recover_prompt(leftover, model).text == prompt


def test_two_requests_in_one_file_are_both_read_their_shared_prefix_included(model: DemoModel, tmp_path: Path) -> None:
    from kvtier_demo.attack import recover_prompt
    from kvtier_demo.generate import serve

    texts = ["You are a helpful system. Answer: what is my diagnosis?", "You are a helpful system. Answer: who am I?"]
    image = tmp_path / "image"
    image.write_bytes(b"".join(block for text in texts for block in serve(model, text).full_blocks()))
    found = recover_prompt(image, model)
    read = {model.tokenizer.decode(model.tokenizer.prompt_part([s[p] for p in sorted(s)])) for s in found.sequences}
    assert read == set(texts)


@pytest.mark.parametrize("alignment", [0, 1, 48, 8192])
def test_an_alignment_that_cannot_be_is_refused(alignment: int, model: DemoModel, tmp_path: Path) -> None:
    from kvtier_demo.attack import recover_prompt

    with pytest.raises(UsageError, match=f"alignment_bytes={alignment}"):
        recover_prompt(tmp_path / "any", model, alignment_bytes=alignment)


def test_a_missing_file_is_an_error_and_not_a_clean_result(model: DemoModel, tmp_path: Path) -> None:
    from kvtier_demo.attack import recover_prompt

    with pytest.raises(NotFound, match="cannot be opened"):
        recover_prompt(tmp_path / "none", model)
