"""csi-sanity (kubernetes-csi/csi-test v5) against the service: the claims that a node-only, ephemeral driver can be asked.

What does not apply is left out by name, each with its reason; a claim that csi-sanity adds and nobody has looked at fails here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from csi_agent import Kubelet
from requirements import missing

pytestmark = pytest.mark.root

NO_CONTROLLER = "there is no controller service: a volume is made by NodePublishVolume, for one pod"
NOT_OURS = {
    "Controller Service": NO_CONTROLLER,
    "GroupController Service": NO_CONTROLLER,
    "ListSnapshots": NO_CONTROLLER,
    "GetSnapshot": NO_CONTROLLER,
    "CreateSnapshot": NO_CONTROLLER,
    "DeleteSnapshot": NO_CONTROLLER,
    "ExpandVolume": NO_CONTROLLER,
    "ModifyVolume": NO_CONTROLLER,
    "ControllerGetVolumeHealth": NO_CONTROLLER,
    "ControllerListVolumeHealth": NO_CONTROLLER,
    "Node Service NodeUnpublishVolume should remove target path": "its volume comes from CreateVolume; see test_publish.py",
    "Node Service NodeGetVolumeStats should fail when volume does not exist on the specified path": "the same",
}
"""Claims, by the beginning of their names, that cannot be asked of this driver, and why."""
OURS = {
    "Identity Service GetPluginCapabilities should return appropriate capabilities",
    "Identity Service GetPluginInfo should return appropriate information",
    "Identity Service Probe should return appropriate information",
    "Node Service NodeGetCapabilities should return appropriate capabilities",
    "Node Service NodeGetInfo should return appropriate values",
    "Node Service NodeGetVolumeStats should fail when no volume id is provided",
    "Node Service NodeGetVolumeStats should fail when no volume path is provided",
    "Node Service NodeGetVolumeStats should fail when volume is not found",
    "Node Service NodePublishVolume should fail when no target path is provided",
    "Node Service NodePublishVolume should fail when no volume capability is provided",
    "Node Service NodePublishVolume should fail when no volume id is provided",
    "Node Service NodeUnpublishVolume should fail when no target path is provided",
    "Node Service NodeUnpublishVolume should fail when no volume id is provided",
}


def binary() -> Path:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "cluster"))
    import build_tools

    path = build_tools.named_by_user("csi-sanity") or build_tools.cache_folder() / "csi-sanity"
    if not os.access(path, os.X_OK):
        missing("csi-sanity (make cluster-tools)")
    return path


def test_every_claim_of_csi_sanity_holds_or_is_listed_with_its_reason(argument_kubelet: Kubelet) -> None:
    base = argument_kubelet.base
    endpoint = f"unix://{argument_kubelet.root}/plugins/node.kvtier.dev/csi.sock"
    folders = (f"--csi.mountdir={base}/sanity-target", f"--csi.stagingdir={base}/sanity-staging")
    subprocess.run(
        [str(binary()), f"--csi.endpoint={endpoint}", *folders, f"--ginkgo.json-report={base}/report.json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=300,
        check=False,
    )
    (suite,) = json.loads((base / "report.json").read_text())
    states: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set(), "pending": set()}
    for spec in suite["SpecReports"]:
        words = [*(spec["ContainerHierarchyTexts"] or ()), spec["LeafNodeText"]]
        if spec["LeafNodeType"] == "It":
            states[spec["State"]].add(" ".join(words).replace(" [Controller Server]", ""))
    unexplained = {name for name in states["failed"] if not name.startswith(tuple(NOT_OURS))}
    assert unexplained == set()
    assert states["passed"] >= OURS, OURS - states["passed"]
