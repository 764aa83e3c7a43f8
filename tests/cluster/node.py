"""A whole node on loopback with fresh data: a control plane, containerd and kubelet, as on a machine of its own.

The node's processes live in namespaces of their own (`node_namespaces`), with the usual paths of a node, all of them folders of
one directory on the disk. They are ended by pid; when the namespaces' first process ends, all others do, and every mount,
network interface and pod goes with it. What the kernel keeps beyond (cgroups, loop devices) is taken back, and checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import images
import node_namespaces
import yaml
from controlplane import ControlPlane, binary, die_with_parent, free_ports, need_tools, wait_until

from kvtier_node.kernel import loop
from requirements import missing, need_root, need_tool

__all__ = ["NODE", "Node", "need_node"]

NODE = "localhost"
"""The API server reaches kubelet by the node's name."""
_ADDRESS = "10.89.0.2"
_PODS = "10.244.0.0/24"
_TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "containerd")
_CTR = ("containerd-shim-runc-v2", "ctr")
_PLUGINS = "/usr/lib/cni"
_HERE = Path(__file__).resolve().parent
_DROPIN_CGROUPS = ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")


def need_node() -> None:
    """What a node needs of the machine; missing: a skip, or a failure in CI."""
    need_root()
    need_tools(*_TOOLS, *_CTR)
    for program in ("runc", "iptables", "ip", "mkfs.ext4"):
        need_tool(program)
    if not os.path.exists(f"{_PLUGINS}/bridge"):
        missing("the CNI plug-ins (Debian: containernetworking-plugins)")


class Node:
    """`with Node() as node:` has a node that is Ready. `crash` and `boot` are a machine's."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvt-"))
        self.base.chmod(0o755)
        self.plane = ControlPlane(self.base / "plane")
        self.cgroup = f"kvtier-test-{secrets.token_hex(4)}"
        self._kubelet_port, self._scheduler_port = free_ports(2)
        self._spaces: subprocess.Popen[str] | None = None
        self._ports: subprocess.Popen[bytes] | None = None
        self._first = 0
        self._answers: list[dict[str, Any]] = []
        self._ended: dict[str, int] = {}
        self._changed = threading.Condition()
        self.volumes: set[str] = set()
        """Ids of volumes that a test has seen here: one may lie on another disk, which is gone."""
        self.pids: dict[str, int] = {}
        """What runs of the node's own, in the node's PID namespace."""

    # -- life

    def __enter__(self) -> Node:
        try:
            self.plane.start_etcd()
            self.plane.start_apiserver()
            self._write_configuration()
            archive = images.archive(self.base / "images.tar")
            self.plane.start_controller_manager()
            self._start_scheduler()
            self.boot(images_from=archive)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything, in the order in which it is safe; then take back what the kernel keeps. Fails if something is left."""
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.base, ignore_errors=True)
            stack.callback(self._detach_loops)
            stack.callback(self._stop_plane)
            stack.callback(self.crash)

    def _stop_plane(self) -> None:
        """At once: its data goes too."""
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver"):
            self.plane.stop(name, kill=True)
        self.plane.stop_all()

    def boot(self, *, images_from: Path | None = None) -> None:
        """As a machine starts: namespaces, containerd, kubelet; until the node is Ready."""
        self._make_cgroups()
        self._start_namespaces()
        self._start_ports()
        self.start_containerd()
        if images_from is not None:
            self.ctr("images", "import", "--local", str(images_from))
            images_from.unlink()
            for name in images.NAMES:  # no registry has them: kubelet must not remove them, whatever the disk
                self.ctr("images", "label", name, "io.cri-containerd.pinned=pinned")
        self.start_kubelet()
        self.wait_ready()

    def crash(self) -> None:
        """All of it at once, without a warning: SIGKILL for every process of the node, and every mount is gone.

        As when the power goes, but for the page cache, which is the machine's; and `/run` is empty afterwards.
        """
        spaces, self._spaces = self._spaces, None
        if self._first:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._first, signal.SIGKILL)
            self._first = 0
        if spaces is not None:
            spaces.kill()
            spaces.wait()
            self._listener.join()
            for stream in (spaces.stdin, spaces.stdout):
                if stream is not None:
                    stream.close()
        ports, self._ports = self._ports, None
        if ports is not None:
            ports.kill()
            ports.wait()
        self.pids.clear()
        shutil.rmtree(self.base / "run", ignore_errors=True)
        self._remove_cgroups()

    # -- the namespaces and what runs in them

    def _start_namespaces(self) -> None:
        log = (self.plane.log_folder / "namespaces.log").open("ab")
        with log:
            self._spaces = subprocess.Popen(
                [sys.executable, str(_HERE / "node_namespaces.py"), str(self.base)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._ended.clear()
        self._answers.clear()
        self._listener = threading.Thread(target=self._listen, args=(self._spaces,), daemon=True)
        self._listener.start()
        self._first = int(self._answer("first")["first"])

    def _listen(self, spaces: subprocess.Popen[str]) -> None:
        assert spaces.stdout is not None
        with contextlib.suppress(ValueError):
            for line in spaces.stdout:
                found = json.loads(line)
                with self._changed:
                    if "ended" in found:
                        self._ended[found["ended"]] = found["status"]
                        self.pids.pop(found["ended"], None)
                    else:
                        self._answers.append(found)
                    self._changed.notify_all()

    def _answer(self, key: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((it for it in self._answers if key in it), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, 60), self.log("namespaces")
            answer = found()
            assert answer is not None
            self._answers.remove(answer)
            return answer

    def _order(self, **order: Any) -> None:
        assert self._spaces is not None and self._spaces.stdin is not None
        self._spaces.stdin.write(json.dumps(order) + "\n")
        self._spaces.stdin.flush()

    def start(self, name: str, argv: list[str]) -> None:
        """A process of the node. Its log is NAME.log of the control plane's folder."""
        with self._changed:
            self._ended.pop(name, None)
        self._order(start=name, argv=argv, log=str(self.plane.log_folder / f"{name}.log"))
        self.pids[name] = int(self._answer("started")["pid"])

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process of the node by its pid there. Raises ProcessLookupError where there is none."""
        self._order(kill=pid, signal=int(number))
        error = self._answer("killed")["error"]
        if error:
            raise ProcessLookupError(f"{pid}: {error}")

    def kill_and_wait(self, name: str) -> None:
        """SIGKILL for one of the node's own processes, until it is gone."""
        self.kill(self.pids[name])
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._ended, 60), name

    @property
    def inside(self) -> Path:
        """The node's file system as its processes see it, mounts and all."""
        return Path(f"/proc/{self._first}/root")

    def run_inside(self, *argv: str) -> str:
        """Run a command in the node's namespaces."""
        enter = ["nsenter", "-t", str(self._first), "-m", "-n", "-p", "--", *argv]
        return subprocess.run(enter, check=True, capture_output=True, text=True).stdout

    # -- its parts

    def _start_ports(self) -> None:
        """The node's way to the API server and to kubelet; nothing else leads in or out."""
        api = self.plane.api_port
        for arguments in (
            ("link", "add", "node0", "type", "bridge"),
            ("addr", "add", f"{_ADDRESS}/24", "dev", "node0"),
            ("link", "set", "node0", "up"),
            ("route", "add", "default", "dev", "node0"),
        ):
            self.run_inside("ip", *arguments)
        self._ports = subprocess.Popen(
            [
                *(sys.executable, str(_HERE / "node_ports.py"), f"/proc/{self._first}/ns/net"),
                f"out:127.0.0.1:{api}=127.0.0.1:{api}",
                f"out:{node_namespaces.SERVICE_ADDRESS}:443=127.0.0.1:{api}",
                f"in:127.0.0.1:{self._kubelet_port}={_ADDRESS}:{self._kubelet_port}",
            ],
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._ports.stdout is not None
        self._ports.stdout.read()
        self._ports.stdout.close()

    @contextlib.contextmanager
    def cut_off(self, *pods: str) -> Iterator[None]:
        """kubelet and the pods with these addresses have no way to the API server, nor it to kubelet: packets are dropped.

        Connections are not ended, as where a cable is pulled. Other pods go on.
        """
        api, service = str(self.plane.api_port), node_namespaces.SERVICE_ADDRESS
        rules = [
            ("INPUT", "-i", "lo", "-d", "127.0.0.1", "-p", "tcp", "--dport", api),
            ("INPUT", "-i", "lo", "-s", "127.0.0.1", "-p", "tcp", "--sport", api),
            ("INPUT", "-i", "lo", "-d", _ADDRESS, "-p", "tcp", "--dport", str(self._kubelet_port)),
            *(("INPUT", "-s", pod, "-d", service) for pod in pods),
            *(("OUTPUT", "-s", service, "-d", pod) for pod in pods),
        ]
        with contextlib.ExitStack() as stack:
            for rule in rules:
                self.run_inside("iptables", "-w", "-A", *rule, "-j", "DROP")
                stack.callback(self.run_inside, "iptables", "-w", "-D", *rule, "-j", "DROP")
            yield

    def start_containerd(self) -> None:
        programs = self.base / "programs"
        path = f"PATH={programs}:/usr/sbin:/usr/bin:/sbin:/bin"
        self.start(
            "containerd",
            ["/usr/bin/env", path, str(binary("containerd")), "--config", str(self.base / "containerd.toml")],
        )
        wait_until("containerd answers", self._containerd_answers)

    def _containerd_answers(self) -> bool:
        if "containerd" in self._ended:
            raise RuntimeError(self.log("containerd"))
        return subprocess.run([*self._ctr, "version"], check=False, capture_output=True).returncode == 0

    def start_kubelet(self, **configuration: Any) -> None:
        """`configuration`: fields that stand in the place of the usual ones, until it is started again."""
        config = self.base / "kubelet.yaml"
        if configuration:
            usual = yaml.safe_load(config.read_text())
            config = self.base / "kubelet-other.yaml"
            config.write_text(yaml.safe_dump(usual | configuration))
        arguments = {
            "config": config,
            "kubeconfig": self._kubelet_config,
            "hostname-override": NODE,
            "node-ip": _ADDRESS,
            "root-dir": "/var/lib/kubelet",
            "cert-dir": "/var/lib/kubelet/pki",
        }
        self.start("kubelet", [str(binary("kubelet")), *(f"--{name}={value}" for name, value in arguments.items())])

    def wait_ready(self) -> None:
        """By kubelet's Lease: what the Node says of itself may be from before a crash."""
        started = datetime.now(UTC)

        def ready() -> bool:
            if "kubelet" in self._ended:
                raise RuntimeError(self.log("kubelet"))
            with self.plane.http() as client:
                lease = client.get(f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{NODE}")
                found = client.get(f"/api/v1/nodes/{NODE}")
            if found.status_code != 200 or lease.status_code != 200:
                return False
            conditions = found.json()["status"].get("conditions", [])
            alive = datetime.fromisoformat(lease.json()["spec"]["renewTime"]) > started
            return alive and any(it["type"] == "Ready" and it["status"] == "True" for it in conditions)

        wait_until("the node is Ready", ready, limit_s=180)

    def _start_scheduler(self) -> None:
        config = self.plane.kubeconfig("system:kube-scheduler")
        same = [
            f"--{flag}={config}" for flag in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        ]
        more = ["--leader-elect=false", "--bind-address=127.0.0.1", f"--secure-port={self._scheduler_port}"]
        self.plane.start("kube-scheduler", [str(binary("kube-scheduler")), *same, *more])

    def _write_configuration(self) -> None:
        programs = self.base / "programs"
        programs.mkdir()
        for name in _CTR:
            (programs / name).symlink_to(str(binary(name)))
        (self.base / "cni").mkdir()
        ipam = {"type": "host-local", "ranges": [[{"subnet": _PODS}]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "pods0", "isGateway": True, "ipMasq": False, "ipam": ipam}
        network = {"cniVersion": "0.3.1", "name": "pods", "plugins": [bridge]}
        (self.base / "cni" / "10-pods.conflist").write_text(json.dumps(network))
        (self.base / "containerd.toml").write_text(
            _CONTAINERD.format(runc=need_tool("runc"), cni=self.base / "cni", pause=images.PAUSE)
        )
        self._kubelet_config = self.plane.kubeconfig(f"system:node:{NODE}", ("system:nodes",))
        certificate, key = self.plane.certificate("kubelet-serving", f"system:node:{NODE}", hosts=(NODE, "127.0.0.1"))
        self._sockets = "unix:///run/containerd/containerd.sock"
        (self.base / "kubelet.yaml").write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "kind": "KubeletConfiguration",
                    "address": _ADDRESS,
                    "port": self._kubelet_port,
                    "healthzPort": 0,
                    "readOnlyPort": 0,
                    "authentication": {
                        "anonymous": {"enabled": False},
                        "webhook": {"enabled": True},
                        "x509": {"clientCAFile": str(self.plane.ca)},
                    },
                    "authorization": {"mode": "Webhook"},
                    "tlsCertFile": str(certificate),
                    "tlsPrivateKeyFile": str(key),
                    "cgroupDriver": "cgroupfs",
                    "cgroupRoot": f"/{self.cgroup}",
                    "failCgroupV1": False,
                    "containerRuntimeEndpoint": self._sockets,
                    "imageServiceEndpoint": self._sockets,
                    "failSwapOn": False,
                    "makeIPTablesUtilChains": False,
                    "resolvConf": "",
                    "volumePluginDir": "/var/lib/kubelet/volume-plugins",
                    "imageGCHighThresholdPercent": 100,
                    "imageGCLowThresholdPercent": 99,
                    "evictionHard": {
                        "memory.available": "100Mi",
                        "nodefs.available": "1%",
                        "imagefs.available": "1%",
                        "nodefs.inodesFree": "1%",
                    },
                    "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
                    "featureGates": {"KubeletCrashLoopBackOffMax": True},
                    "syncFrequency": "5s",
                    "nodeStatusUpdateFrequency": "5s",
                }
            )
        )

    # -- what it says

    @property
    def _ctr(self) -> list[str]:
        return [str(binary("ctr")), "-a", str(self.base / "run" / "containerd" / "containerd.sock"), "-n", "k8s.io"]

    def ctr(self, *arguments: str) -> str:
        return subprocess.run([*self._ctr, *arguments], check=True, capture_output=True, text=True, timeout=120).stdout

    def tasks(self) -> dict[str, int]:
        """Running containers and sandboxes: id to pid in the node's PID namespace."""
        lines = [line.split() for line in self.ctr("tasks", "ls").splitlines()[1:]]
        return {line[0]: int(line[1]) for line in lines if line[2] == "RUNNING"}

    def sandbox(self, pod_uid: str) -> str:
        """The newest sandbox of a pod."""
        wanted = f'labels."io.kubernetes.pod.uid"=={pod_uid},labels."io.cri-containerd.kind"==sandbox'
        found = self.ctr("containers", "ls", "-q", wanted).split()
        running = self.tasks()
        return next(each for each in found if each in running)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        command = [str(binary("kubectl")), "--kubeconfig", str(self.plane.admin), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=300)
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr}")
        return done

    def log(self, name: str, *, size: int = 4000) -> str:
        path = self.plane.log_folder / f"{name}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    # -- what the kernel keeps

    def _hierarchies(self) -> Iterator[tuple[Path, bool]]:
        """Mount points of cgroup hierarchies; whether it is version 2."""
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, where, kind = line.split()[:3]
            if kind in ("cgroup", "cgroup2"):
                yield Path(where), kind == "cgroup2"

    def _make_cgroups(self) -> None:
        for where, unified in self._hierarchies():
            (where / self.cgroup).mkdir(exist_ok=True)
            if unified:
                for controller in _DROPIN_CGROUPS:
                    for folder in (where, where / self.cgroup):
                        with contextlib.suppress(OSError):  # not there, or another hierarchy has it
                            (folder / "cgroup.subtree_control").write_text(f"+{controller}")

    def _remove_cgroups(self) -> None:
        def gone() -> bool:
            left = False
            for line in Path("/proc/self/mounts").read_text().splitlines():
                _, where, kind = line.split()[:3]
                root = Path(where) / self.cgroup
                if kind not in ("cgroup", "cgroup2") or not root.is_dir():
                    continue
                for folder, _, _ in os.walk(root, topdown=False):
                    try:
                        os.rmdir(folder)
                    except OSError:  # a process of it is not reaped yet
                        left = True
            return not left

        wait_until("the node's cgroups are gone", gone)

    def loops(self) -> list[str]:
        """Loop devices on images of this node, also of those that have lost their name.

        By inode, or by the volume's id: the path is one of a name space of the node's, and may begin anywhere.
        """
        images = [path.stat() for path in (self.base / "lib").rglob("volume.img")]
        inodes = {(info.st_dev, info.st_ino) for info in images}
        volumes = self.volumes | {path.name for path in (self.base / "lib" / "kvtier" / "tiers").glob("*/kvv-*")}
        found = []
        for name, path in loop.backing_paths().items():
            below = set(path.removesuffix(" (deleted)").split("/"))
            if below & volumes or self.below(f"/dev/{name}") in inodes:
                found.append(f"/dev/{name}")
        return found

    @staticmethod
    def below(device: str) -> tuple[int, int] | None:
        """st_dev and st_ino of the file below a loop device."""
        columns = ["losetup", "-n", "-O", "BACK-MAJ:MIN,BACK-INO", device]
        listed = subprocess.run(columns, capture_output=True, text=True, check=False).stdout.split()
        if len(listed) != 2:
            return None
        major, minor = (int(part) for part in listed[0].split(":"))
        return os.makedev(major, minor), int(listed[1])

    def _detach_loops(self) -> None:
        for device in self.loops():
            subprocess.run(["losetup", "-d", device], check=True)


_CONTAINERD = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.nri.v1.nri",
]
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  tolerate_missing_hugetlb_controller = true
  disable_hugetlb_controller = true
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
        SystemdCgroup = false
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["/usr/lib/cni"]
    conf_dir = "{cni}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
"""
