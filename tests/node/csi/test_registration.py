"""Registration with kubelet: what is in its directory when, what is answered, and what a dead or foreign socket does.

The other side is kubelet's own protocol (pluginregistration v1), spoken by the test.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from csi_agent import Kubelet, Pod
from kvtier_node.csi.generated import csi_pb2 as pb
from kvtier_node.csi.generated import csi_pb2_grpc, pluginregistration_pb2, pluginregistration_pb2_grpc
from kvtier_node.csi.server import CsiOptions

pytestmark = pytest.mark.root


def registration_socket(kubelet: Kubelet) -> Path:
    return kubelet.root / "plugins_registry" / "node.kvtier.dev-reg.sock"


def socket_at(path: Path) -> tuple[int, int] | None:
    """Which socket it is. An inode number alone may be given again once the file is gone."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_ctime_ns


def ask(path: Path) -> pluginregistration_pb2.PluginInfo:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        stub = pluginregistration_pb2_grpc.RegistrationStub(channel)
        return stub.GetInfo(pluginregistration_pb2.InfoRequest(), timeout=60)


def answer(path: Path, *, registered: bool, error: str = "") -> None:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        status = pluginregistration_pb2.RegistrationStatus(plugin_registered=registered, error=error)
        pluginregistration_pb2_grpc.RegistrationStub(channel).NotifyRegistrationStatus(status, timeout=60)


def test_kubelet_learns_name_endpoint_and_version_and_the_endpoint_answers(serving: Kubelet) -> None:
    path = serving.wait("the socket", lambda: (p := registration_socket(serving)).exists() and p)
    info = ask(path)
    assert (info.type, info.name, list(info.supported_versions)) == ("CSIPlugin", "node.kvtier.dev", ["1.0.0"])
    assert info.endpoint == f"{serving.root}/plugins/node.kvtier.dev/csi.sock"
    with grpc.insecure_channel(f"unix:{info.endpoint}") as channel:
        found = csi_pb2_grpc.IdentityStub(channel).GetPluginInfo(pb.GetPluginInfoRequest(), timeout=60)
        nothing = csi_pb2_grpc.IdentityStub(channel).GetPluginCapabilities(
            pb.GetPluginCapabilitiesRequest(), timeout=60
        )
    assert found.name == "node.kvtier.dev"
    assert found.vendor_version
    assert list(nothing.capabilities) == []
    for each in (path, Path(info.endpoint)):
        assert each.stat().st_mode & 0o777 == 0o600
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_nothing_is_registered_and_nothing_published_before_recovery_has_finished(
    kubelet: Kubelet, new_pod: Callable[..., Pod]
) -> None:
    """The registration socket is the node's fence: it comes last. Recovery is held up by a volume's lock."""
    pod, other = new_pod(), new_pod()
    kubelet.declare_tier()
    kubelet.start_agent()
    kubelet.publish(pod)
    kubelet.stop_agent()
    assert not registration_socket(kubelet).exists(), "an agent that stops takes it away"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys\n"
            "c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); print('held', flush=True)\n"
            "sys.stdin.read()",
            str(kubelet.base / "state" / "ledger.db"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        os.system(f"umount -l {kubelet.target(pod)}")
        kubelet.remove_folders(pod)  # the pod is gone, so recovery has something to write
        kubelet.start_agent(serve=False)
        kubelet.wait("the endpoint answers", lambda: kubelet.probe() is not None)
        assert kubelet.probe() is False
        assert not registration_socket(kubelet).exists()
        with pytest.raises(grpc.RpcError) as caught:
            kubelet.publish(other)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        holder.kill()
        holder.wait()
    kubelet.wait("it serves", kubelet.is_ready)
    kubelet.publish(other)


def test_a_dead_agents_sockets_are_replaced(serving: Kubelet) -> None:
    """node-driver-registrar#206: a stale socket costs kubelet's back-off."""
    path = serving.wait("the socket", lambda: (p := registration_socket(serving)).exists() and p)
    serving.stop_agent(signal.SIGKILL)
    dead = socket_at(path)
    serving.start_agent()
    serving.wait("a new socket", lambda: socket_at(path) not in (None, dead))
    assert ask(path).name == "node.kvtier.dev"


def test_a_registration_that_kubelet_refused_or_lost_comes_again(serving: Kubelet) -> None:
    """node-driver-registrar#139."""
    path = serving.wait("the socket", lambda: (p := registration_socket(serving)).exists() and p)
    answer(path, registered=True)
    first = socket_at(path)
    answer(path, registered=False, error="CSI driver is not ready (test)")
    serving.wait("another socket", lambda: socket_at(path) not in (None, first))
    assert ask(path).name == "node.kvtier.dev"
    answer(path, registered=True)
    path.unlink()  # kubelet's directory was emptied
    serving.wait("another socket", path.exists)
    assert ask(path).name == "node.kvtier.dev"


def test_what_is_no_socket_and_what_answers_is_left_alone(kubelet: Kubelet) -> None:
    path = registration_socket(kubelet)
    path.write_text("somebody's")
    kubelet.start_agent()
    kubelet.wait("it says so", lambda: "cannot-register" in (kubelet.base / "agent.log").read_text())
    assert path.read_text() == "somebody's"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        os.utime(path)
        kubelet.wait("it says so", lambda: "another agent answers" in (kubelet.base / "agent.log").read_text())
        assert path.is_socket()


def test_paths_are_in_kubelets_directory_unless_said_otherwise() -> None:
    assert CsiOptions().endpoint_path == "/var/lib/kubelet/plugins/node.kvtier.dev/csi.sock"
    assert CsiOptions(kubelet="/k").registration_directory == "/k/plugins_registry"
    assert CsiOptions(kubelet="/k", endpoint="/e/x.sock", registration="/r").endpoint_path == "/e/x.sock"


def test_the_agent_with_its_csi_service_stays_small(serving: Kubelet, new_pod: Callable[..., Pod]) -> None:
    """Under 100 MiB of resident memory, with volumes of several pods."""
    assert serving.process is not None
    for _ in range(3):
        serving.publish(new_pod())
    status = Path(f"/proc/{serving.process.pid}/status").read_text()
    (peak_kib,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")]
    assert peak_kib < 100 * 1024
