"""What the demonstration's tests share: models (made once), and a served prompt left behind in a stock slot file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from requirements import need_module

if TYPE_CHECKING:
    from kvtier_demo.generate import Served
    from kvtier_demo.model import DemoModel
    from kvtier_demo.stock import StockDisk

PROMPT = (
    "The patient, Zoë Brückner (born 3 May 1971), asks: is it positive? 結果 🙂 -- IBAN DE89 3704 0044!\n\ttwo  spaces."
)


@pytest.fixture(scope="session")
def model() -> DemoModel:
    need_module("torch")
    from kvtier_demo.model import DemoModel

    return DemoModel()


@pytest.fixture(scope="session")
def prompt() -> str:
    return PROMPT


@pytest.fixture(scope="session")
def served(model: DemoModel) -> Served:
    from kvtier_demo.generate import serve

    return serve(model, PROMPT)


@pytest.fixture
def stock_disk(tmp_path: Path, model: DemoModel) -> Iterator[StockDisk]:
    from kvtier_demo.stock import StockDisk

    disk = StockDisk(
        str(tmp_path / "store" / "slot"),
        rank=0,
        capacity_bytes=64 << 20,
        block_bytes=model.config.block_shape.block_bytes,
    )
    yield disk
    disk.close()


@pytest.fixture
def leave_behind(tmp_path: Path) -> Callable[..., Path]:
    """`leave_behind(model, *served)`: the slot file that a stock engine leaves after these requests."""

    def leave(model: DemoModel, *requests: Served) -> Path:
        from kvtier_demo.generate import offload
        from kvtier_demo.stock import StockDisk

        disk = StockDisk(
            str(tmp_path / "left" / "slot"),
            rank=0,
            capacity_bytes=64 << 20,
            block_bytes=model.config.block_shape.block_bytes,
        )
        try:
            for request in requests:
                offload(request, disk)
        finally:
            disk.close()
        return Path(disk.path)

    return leave
