"""Fixtures: one control plane for the session, with kvtier's CRDs; a namespace for each test."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build_tools
from api_client import Api
from controlplane import TOOLS, ControlPlane, install_crds, need_tools
from installed import Installed

from node import Node, need_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They share one node, so they run in one process: `-m whole_node`. None of them runs on the floor."""
    newest = f"a whole node runs on {build_tools.KUBERNETES} only, this is {build_tools.FLOOR}"
    for item in items:
        if "installation" in getattr(item, "fixturenames", ()):
            item.add_marker("whole_node")
            if build_tools.on_floor():
                item.add_marker(pytest.mark.skip(reason=newest))


@pytest.fixture(scope="session")
def bare_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with nothing in it."""
    need_tools(*TOOLS)
    with ControlPlane(tmp_path_factory.mktemp("plane") / "run") as plane:
        yield plane


@pytest.fixture(scope="session")
def plane(bare_plane: ControlPlane) -> ControlPlane:
    """With the CRDs."""
    install_crds(bare_plane)
    return bare_plane


@pytest.fixture
def api(plane: ControlPlane) -> Iterator[Api]:
    """A new namespace, as the administrator."""
    namespace = f"t-{secrets.token_hex(4)}"
    with plane.http() as client:
        api = Api(client, namespace)
        api.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        yield api


@pytest.fixture
def installed(installation: Installed) -> Installed:
    """A whole node with kvtier on it, installed by Helm from its chart."""
    if installation.agent_pod() is None:
        installation.install()
    return installation


@pytest.fixture(scope="session")
def installation() -> Iterator[Installed]:
    """The same node for all tests of the session. One of them may leave it without kvtier."""
    need_node()
    need_tools("helm")
    with Node() as node:
        found = Installed(node)
        found.install()
        yield found
        found.settle()
