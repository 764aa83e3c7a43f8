"""What the agent makes of a list of the API's volumes, where publishing goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_api.errors import NotFound
from kvtier_api.volume import VolumeState
from kvtier_node.cluster import part as cluster_part
from kvtier_node.cluster.part import ClusterPart

NEW, OLD = "kvv-" + "a" * 20, "kvv-" + "b" * 20


def test_a_volume_that_is_made_while_the_ledger_is_asked_about_a_list_is_not_called_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger has it, then the API, then the watch brings it. Else a volume in use would be offered for giving up."""
    ledger: dict[str, Any] = {}
    objects = {"old": {"metadata": {"name": OLD}}}
    compared: list[set[str]] = []

    def get(name: str) -> Any:
        if name not in ledger:
            raise NotFound("no such volume", obj=name)
        return ledger[name]

    class Threads:
        async def run(self, work: Callable[[], Any]) -> Any:
            found = work()
            if asked_about_the_list := isinstance(found, dict):
                ledger[NEW] = SimpleNamespace(volume_id=NEW, state=VolumeState.PLANNED)
                objects["new"] = {"metadata": {"name": NEW}}
            assert asked_about_the_list or not ledger
            return found

    part = ClusterPart(
        SimpleNamespace(),
        SimpleNamespace(look_at=lambda rows: None),
        SimpleNamespace(),  # type: ignore[arg-type]
    )

    async def told() -> None:
        compared.append(set(part._unknown))

    part._node = SimpleNamespace(ledger=SimpleNamespace(get=get))  # type: ignore[assignment]
    part._threads = Threads()  # type: ignore[assignment]
    part._volumes = SimpleNamespace(synced=True, objects=objects)  # type: ignore[assignment]
    part._requests = SimpleNamespace(objects={})  # type: ignore[assignment]
    part._relisted = True
    monkeypatch.setattr(part, "_tell_unknown", told)
    monkeypatch.setattr(cluster_part, "of_pods", lambda node: [])
    asyncio.run(part._round())
    assert compared == [{OLD}]
