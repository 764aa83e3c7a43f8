"""csi-sanity against the agent as the chart runs it, on a real node: what it can ask of a node-only, ephemeral driver.

Every claim that is skipped or fails is listed with its reason; one that nobody has looked at fails the test.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from controlplane import binary, need_tools
from installed import Installed

pytestmark = [pytest.mark.root, pytest.mark.slow]

_NO_CONTROLLER = "there is no controller service: a volume is made by NodePublishVolume, for one pod"
_MADE = (
    "its volume would come from CreateVolume; asked of kubelet's own calls in tests/node/csi and the acceptance tests"
)
_HEALTH = (
    "alpha in the CSI specification, and no capability of this driver: health is the conditions of the KVCacheVolume"
)
NOT_ASKED = {
    "Controller Service": _NO_CONTROLLER,
    "GroupController Service": _NO_CONTROLLER,
    "ListSnapshots": _NO_CONTROLLER,
    "GetSnapshot": _NO_CONTROLLER,
    "CreateSnapshot": _NO_CONTROLLER,
    "DeleteSnapshot": _NO_CONTROLLER,
    "ExpandVolume": _NO_CONTROLLER,
    "ModifyVolume": _NO_CONTROLLER,
    "ControllerGetVolumeHealth": _NO_CONTROLLER,
    "ControllerListVolumeHealth": _NO_CONTROLLER,
    "Identity Service GetPluginCapabilities should return appropriate capabilities [SnapshotMetadata": _NO_CONTROLLER,
    "SnapshotMetadata": _NO_CONTROLLER,
    "Node Service NodeUnpublishVolume should remove target path": _MADE,
    "Node Service NodeGetVolumeStats should fail when volume does not exist on the specified path": _MADE,
    "Node Service should work": _MADE,
    "Node Service should be idempotent": _MADE,
    "Node Service NodeStageVolume": "there is no stage: an inline volume has none",
    "Node Service NodeUnstageVolume": "there is no stage: an inline volume has none",
    "Node Service NodeGetVolumeHealth": _HEALTH,
    "Node Service NodeGetStorageHealth": _HEALTH,
    "Node Service NodePublishVolume with single node multi writer capability": _MADE,
    "Node Service NodeExpandVolume": "a volume has the size of its tier, as long as it lives",
}
"""Claims by the beginning of their names."""


def test_every_claim_holds_or_is_listed_with_its_reason(installed: Installed) -> None:
    need_tools("csi-sanity")
    node = installed.node
    report = node.base / "sanity.json"
    folders = [f"--csi.mountdir={node.base}/sanity-target", f"--csi.stagingdir={node.base}/sanity-staging"]
    endpoint = f"--csi.endpoint=unix://{node.base}/lib/kubelet/plugins/node.kvtier.dev/csi.sock"
    subprocess.run(
        [str(binary("csi-sanity")), endpoint, *folders, f"--ginkgo.json-report={report}"],
        capture_output=True,
        timeout=300,
        check=False,
    )
    (suite,) = json.loads(report.read_text())
    states: dict[str, set[str]] = {}
    for spec in suite["SpecReports"]:
        if spec["LeafNodeType"] == "It":
            words = [*(spec["ContainerHierarchyTexts"] or ()), spec["LeafNodeText"]]
            states.setdefault(spec["State"], set()).add(" ".join(words).replace(" [Controller Server]", ""))
    others = {name for state, names in states.items() if state != "passed" for name in names}
    assert {name for name in others if not name.startswith(tuple(NOT_ASKED))} == set()
    assert len(states["passed"]) >= 13, sorted(states["passed"])
