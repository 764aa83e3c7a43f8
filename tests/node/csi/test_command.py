"""`kvtier node --csi` as a command: what it needs, what it says, and that a node without manifests is not a fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier_node.ledger import Ledger
from kvtier_node.manifests import ManifestDirectory

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: nothing}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


def node(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "kubelet" / "plugins_registry").mkdir(parents=True)
    (tmp_path / "tiers").mkdir()
    options = {"--state-dir": "state", "--root": "tiers", "--kubelet-root": "kubelet"}
    words = [word for name, value in options.items() for word in (name, str(tmp_path / value))]
    return [sys.executable, "-m", "kvtier_cli.main", "node", "--csi", "--listen", "off", "--log", "json", *words, *more]


def test_without_a_way_to_the_api_server_it_says_what_to_give(tmp_path: Path) -> None:
    found = subprocess.run(node(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2
    assert "--kubeconfig" in found.stderr
    (tmp_path / "kubelet").rename(tmp_path / "old")
    missing = subprocess.run(
        node(tmp_path / "b", "--kubeconfig", "/nowhere"), capture_output=True, text=True, timeout=120, check=False
    )
    assert missing.returncode == 2
    assert "/nowhere" in missing.stderr


def test_an_api_server_that_is_away_and_no_manifests_keep_it_from_nothing(tmp_path: Path) -> None:
    """It recovers, serves and stops; nothing is taken for a bad or a removed manifest."""
    (tmp_path / "config").write_text(KUBECONFIG)
    process = subprocess.Popen(
        node(tmp_path, "--kubeconfig", str(tmp_path / "config")), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        seen = ""
        while '"event": "ready"' not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
    finally:
        process.terminate()
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, seen + rest
    with Ledger.open(tmp_path / "state", create=False) as ledger:
        assert [event for event in ledger.events() if event.reason == "InvalidManifest"] == []


def test_no_directory_declares_nothing_and_removes_nothing() -> None:
    found = ManifestDirectory("").scan()
    assert (found.tiers, found.bad, found.complete) == ({}, [], False)
