"""Tensors through the store on a CPU. The CUDA half needs a GPU: it runs only where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_material import SLOT_BYTES
from kvtier_api.errors import EngineError
from kvtier_engine import Outcome, SlotStore
from requirements import need_module

pytestmark = pytest.mark.torch
Opener = Callable[..., SlotStore]


@pytest.fixture
def torch() -> Any:
    need_module("torch")
    import torch

    return torch


def _devices() -> list[str]:
    return ["cpu", "cuda"] if os.path.exists("/dev/nvidia0") else ["cpu"]


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def staged(open_store: Opener, torch: Any, device: str) -> Iterator[Callable[..., Any]]:
    from kvtier_engine.torch_staging import TorchStaging

    opened = []

    def make(ranks: int = 1, *, blocks: int = 4, **options: Any) -> Any:
        opened.append(TorchStaging(open_store(ranks, slots=64, **options), device=device, blocks=blocks))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def _parts(torch: Any, seed: int, device: str, whole: bool) -> list[Any]:
    """One slot as one tensor, or as the regions of layers of several kinds of number."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        return [torch.randn(SLOT_BYTES // 4, generator=generator).to(device)]
    return [
        torch.randn(2, 16, 16, generator=generator).to(torch.float16).to(device),
        torch.randn(1024, generator=generator).to(torch.bfloat16).to(device),
        torch.randint(0, 255, (SLOT_BYTES - 1024 - 2048,), generator=generator).to(torch.uint8).to(device),
    ]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_come_back_as_they_went(
    staged: Callable[..., Any], torch: Any, device: str, whole: bool, sealed: bool, ranks: int
) -> None:
    staging = staged(ranks, seal_slots=sealed)
    keys = [bytes([k]) for k in range(21)]  # many parts of a job, the last not full
    source = {key: [_parts(torch, 100 * key[0] + rank, device, whole) for rank in range(ranks)] for key in keys}
    staging.submit_store(1, list(source.items()), tenant=b"a")
    assert staging.drain(120)
    (stored,) = staging.finished()
    assert stored.outcomes == (Outcome.STORED,) * 21
    assert stored.transferred_bytes == 21 * ranks * SLOT_BYTES
    target = {key: [[torch.zeros_like(part) for part in rank] for rank in source[key]] for key in keys}
    staging.submit_load(2, list(target.items()), tenant=b"a")
    assert staging.wait([2], 120)
    (loaded,) = staging.finished()
    assert loaded.success
    for key in keys:
        for rank in range(ranks):
            assert all(torch.equal(a, b) for a, b in zip(source[key][rank], target[key][rank], strict=True))


def test_what_is_missing_leaves_its_tensor_alone_and_is_told(
    staged: Callable[..., Any], torch: Any, device: str
) -> None:
    staging = staged()
    staging.submit_store(1, [(b"k", [_parts(torch, 1, device, False)])], tenant=b"a")
    staging.drain(60)
    rooms = [[torch.full_like(part, 7) for part in _parts(torch, 1, device, False)] for _ in range(2)]
    staging.submit_load(2, [(b"absent", [rooms[0]]), (b"k", [rooms[1]])], tenant=b"a")
    staging.submit_load(3, [(b"k", [rooms[0]])], tenant=b"b")
    staging.drain(60)
    results = {result.job_id: result.outcomes for result in staging.finished()}
    assert results == {1: (Outcome.STORED,), 2: (Outcome.MISS, Outcome.LOADED), 3: (Outcome.MISS,)}
    assert all(torch.all(part == 7) for part in rooms[0])


def test_wrong_tensors_are_refused_before_anything_happens(staged: Callable[..., Any], torch: Any, device: str) -> None:
    staging = staged()
    with pytest.raises(EngineError, match="contiguous"):
        staging.submit_store(1, [(b"k", [[torch.zeros(8, 8, device=device).t()]])], tenant=b"a")
    with pytest.raises(EngineError, match="bytes"):
        staging.submit_store(1, [(b"k", [[torch.zeros(SLOT_BYTES, device=device)]])], tenant=b"a")
    assert staging.finished() == []


def test_a_closed_store_fails_the_jobs_and_hangs_nobody(staged: Callable[..., Any], torch: Any, device: str) -> None:
    staging = staged()
    staging._store.close()
    staging.submit_store(1, [(bytes([k]), [_parts(torch, 1, device, False)]) for k in range(9)], tenant=b"a")
    assert staging.drain(60)
    (result,) = staging.finished()
    assert not result.success
    assert "closed" in result.error
