"""What a boot id proves, and what it does not."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kvtier_api.volume import BackendName, VolumeState
from kvtier_operator.facts import NodeFacts, VolumeFacts
from kvtier_operator.places import Surroundings, keys_lost, places
from operator_facts import EARLIER, a_node, a_volume, around

REBOOTED = a_node(boot_id="boot-2", ready=False)
YOUNGER = EARLIER + timedelta(minutes=1)

ROWS: list[tuple[str, VolumeFacts, NodeFacts | None, bool]] = [
    ("same boot", a_volume(), a_node(ready=False), False),
    ("another boot", a_volume(), REBOOTED, True),
    ("another boot, dm-crypt", a_volume(backend=BackendName.DM_CRYPT), REBOOTED, True),
    ("the host holds the key", a_volume(backend=BackendName.HOST_ATTESTED), REBOOTED, False),
    ("sealed only", a_volume(backend=BackendName.SEAL_ONLY), REBOOTED, False),
    ("no boot id on record", a_volume(boot_id=None), REBOOTED, False),
    ("the node reports none", a_volume(), a_node(boot_id="", ready=False), False),
    ("the node is gone", a_volume(), None, False),
    ("the Node object is younger", a_volume(), a_node(boot_id="boot-2", created_at=YOUNGER), False),
    ("the same machine joined anew", a_volume(system_uuid="MACHINE-1"), a_node(boot_id="b", created_at=YOUNGER), True),
    ("another machine took the name", a_volume(system_uuid="machine-0"), REBOOTED, False),
    ("final already", a_volume(state=VolumeState.ERASED), REBOOTED, False),
    ("unreadable", a_volume(state=None, backend=None, problem="?"), REBOOTED, False),
]


@pytest.mark.parametrize(("name", "volume", "node", "proven"), ROWS, ids=[row[0] for row in ROWS])
def test_keys_are_lost_only_where_the_same_machine_runs_another_kernel(
    name: str, volume: VolumeFacts, node: NodeFacts | None, proven: bool
) -> None:
    assert bool(keys_lost(volume, Surroundings({node.name: node} if node is not None else {}))) is proven


def test_a_node_that_is_heard_proves_for_itself() -> None:
    (place,) = places([a_volume()], around(a_node(boot_id="boot-2")))
    assert place.counts, "its agent erases and signs a receipt; the controller does not guess before it"
    assert not place.unheard
