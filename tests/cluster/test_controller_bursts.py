"""Many changes at once: a tier rests between two looks. A bound, not a time: a slow machine holds it too."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from api_client import Api, node, tier, volume, volume_status
from controllers import Controller
from controlplane import ControlPlane, wait_until

TIERS, VOLUMES = "kvcachetiers", "kvcachevolumes"
REST_S = 0.5
"""As `kvtier_operator.term` has it."""


@pytest.fixture
def controller(plane: ControlPlane, api: Api) -> Iterator[Controller]:
    """Of this namespace alone."""
    with Controller(
        plane,
        f"of-{api.namespace}",
        lease_namespace=api.namespace,
        namespaces=(api.namespace,),
    ) as it:
        yield it


def looks(controller: Controller) -> float:
    return controller.metric('kvtier_reconciles_total{result="done"}')


def test_a_tier_whose_volumes_change_all_the_time_is_looked_at_twice_a_second_at_most(
    api: Api, controller: Controller
) -> None:
    name = f"node-{api.namespace}"
    api.create("nodes", node(name))
    of = api.create(TIERS, tier("t"))
    made = api.create(VOLUMES, volume(of, name) | {"status": volume_status("Ready")})["metadata"]["name"]
    wait_until("it is counted", lambda: api.get(TIERS, "t").get("status", {}).get("volumes", {}).get("ready") == 1)
    before, began = looks(controller), time.monotonic()
    for _ in range(60):
        api.set_status(VOLUMES, made, volume_status("InUse"))
        api.set_status(VOLUMES, made, volume_status("Ready"))
    wait_until("the last one is counted", lambda: api.get(TIERS, "t")["status"]["volumes"]["ready"] == 1)
    most = (time.monotonic() - began) / REST_S + 2
    assert looks(controller) - before <= most
