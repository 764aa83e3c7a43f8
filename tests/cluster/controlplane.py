"""A control plane on loopback with fresh data: etcd and kube-apiserver, and kube-controller-manager on demand.

Real binaries from `build_tools`. All processes are this one's children, in sessions of their own, and are ended
by pid. None outlives the test run, however that ends: each is started with PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import build_tools
import httpx2
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from live_logs import whole_lines
from requirements import missing

__all__ = ["MANIFESTS", "TOOLS", "ControlPlane", "binary", "install_crds", "need_tools", "wait_until"]

MANIFESTS = Path(__file__).resolve().parents[2] / "crds" / "manifests"
TOOLS = ("etcd", "kube-apiserver")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def binary(name: str) -> Path | None:
    """A built binary, or the one that the user named by an environment variable."""
    path = build_tools.named_by_user(name) or build_tools.path_of(name)
    return path if os.access(path, os.X_OK) else None


def need_tools(*names: str) -> None:
    for name in names:
        if binary(name) is None:
            missing(
                f"{name} ({'tests/cluster/build_tools.py --floor' if build_tools.on_floor() else 'make cluster-tools'})"
            )


def wait_until(what: str, holds: Callable[[], bool], *, limit_s: float = 120, pause_s: float = 0.1) -> None:
    """Poll until it holds. The limit is for what never comes; nothing is asserted of how long it took."""
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not after {limit_s} s")
        time.sleep(pause_s)


_PORTS_FROM = 12000
_taken: list[socket.socket] = []
"""Ports are this process's as long as it lives: by a name that other test runs on this machine ask for as well."""


def free_ports(count: int) -> list[int]:
    """On loopback, for a server that starts later, and again after it was stopped: the kernel gives them to nobody else.

    They lie below those that it chooses itself, for a connection or for port 0.
    """
    below = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.sample(range(_PORTS_FROM, below), k=below - _PORTS_FROM):
        if len(found) == count:
            break
        if _take(port):
            found.append(port)
    assert len(found) == count, f"no {count} free ports between {_PORTS_FROM} and {below}"
    return found


def _take(port: int) -> bool:
    mine = socket.socket(socket.AF_UNIX)
    try:
        mine.bind(f"\0kvtier-test-port-{port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        mine.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    _taken.append(mine)
    return True


def die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Authority:
    """A certificate authority for one control plane; `issue` writes NAME.crt and NAME.key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kvtier-test-ca")])
        built = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self._certificate = built
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(built.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=7))
        )

    def issue(self, name: str, user: str, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = self._builder(subject, key.public_key()).add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        if hosts:
            names: list[x509.GeneralName] = [x509.DNSName(host) for host in hosts if not host[0].isdigit()]
            names += [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts if host[0].isdigit()]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._write_key(name, key)

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> None:
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            )
        )

    def service_account_keys(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self._write_key("sa", key)
        (self.folder / "sa.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )


class ControlPlane:
    """`with ControlPlane(folder) as plane:` starts etcd and the API server, and ends whatever runs at the end."""

    def __init__(self, folder: Path, *, apiserver_arguments: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.log_folder = folder / "log"
        self.log_folder.mkdir(parents=True)
        self.api_port, self._etcd_port, self._peer_port, self._kcm_port = free_ports(4)
        self.server = f"https://127.0.0.1:{self.api_port}"
        self._apiserver_arguments = apiserver_arguments
        self.audit_log = folder / "audit.log"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._authority = Authority(folder / "pki")
        hosts = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "127.0.0.1", "10.96.0.1")
        self._authority.issue("apiserver", "kube-apiserver", hosts=hosts)
        self._authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ("system:masters",))
        self._authority.issue("front-proxy", "front-proxy-client")
        self._authority.service_account_keys()
        self.admin = self.kubeconfig("admin", ("system:masters",))

    def __enter__(self) -> ControlPlane:
        try:
            self.start_etcd()
            self.start_apiserver()
        except BaseException:
            self.stop_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def kubeconfig(self, user: str, groups: tuple[str, ...] = ()) -> Path:
        """A kubeconfig for a user, by client certificate."""
        name = user.replace(":", "-")
        self._authority.issue(name, user, groups)
        pki = self._authority.folder

        def data(path: Path) -> str:
            return base64.b64encode(path.read_bytes()).decode()

        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "kvt",
                    "cluster": {"server": self.server, "certificate-authority-data": data(self._authority.ca)},
                }
            ],
            "users": [
                {
                    "name": "u",
                    "user": {
                        "client-certificate-data": data(pki / f"{name}.crt"),
                        "client-key-data": data(pki / f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "kvt", "context": {"cluster": "kvt", "user": "u", "namespace": "default"}}],
            "current-context": "kvt",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config))
        return path

    @property
    def ca(self) -> Path:
        return self._authority.ca

    def certificate(self, name: str, user: str, *, hosts: tuple[str, ...]) -> tuple[Path, Path]:
        """A server's certificate and key."""
        self._authority.issue(name, user, hosts=hosts)
        return self._authority.folder / f"{name}.crt", self._authority.folder / f"{name}.key"

    def start(self, name: str, arguments: list[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """A child of the control plane: its log is NAME.log, and it is ended with everything else."""
        log = (self.log_folder / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._processes[name] = process
        return process

    def stop(self, name: str, *, kill: bool = False, limit_s: float = 10) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A process that answers nobody, and whose connections stay open."""
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def stop_all(self) -> None:
        for name in reversed(list(self._processes)):
            self.stop(name, kill=name == "etcd")

    def start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        self.start(
            "etcd",
            [
                *(str(binary("etcd")), "--name", "kvt", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync"),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", f"kvt={peer}", "--log-level", "warn"),
            ],
        )

    def start_apiserver(self) -> None:
        pki = self._authority.folder
        proxy_headers = (
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        )
        self.start(
            "kube-apiserver",
            [
                str(binary("kube-apiserver")),
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={self.api_port}",
                "--endpoint-reconciler-type=none",
                f"--tls-cert-file={pki}/apiserver.crt",
                f"--tls-private-key-file={pki}/apiserver.key",
                f"--client-ca-file={pki}/ca.crt",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={pki}/sa.pub",
                f"--service-account-signing-key-file={pki}/sa.key",
                "--service-cluster-ip-range=10.96.0.0/24",
                "--authorization-mode=Node,RBAC",
                "--enable-admission-plugins=NodeRestriction",
                "--allow-privileged=true",
                f"--kubelet-certificate-authority={pki}/ca.crt",
                f"--kubelet-client-certificate={pki}/kubelet-client.crt",
                f"--kubelet-client-key={pki}/kubelet-client.key",
                "--kubelet-preferred-address-types=Hostname",
                f"--requestheader-client-ca-file={pki}/ca.crt",
                "--requestheader-allowed-names=front-proxy-client",
                *proxy_headers,
                f"--proxy-client-cert-file={pki}/front-proxy.crt",
                f"--proxy-client-key-file={pki}/front-proxy.key",
                f"--audit-policy-file={self._audit_policy()}",
                f"--audit-log-path={self.audit_log}",
                *self._apiserver_arguments,
            ],
        )
        self.wait_ready()

    def _audit_policy(self) -> Path:
        path = self.folder / "audit-policy.yaml"
        quiet = {"level": "None", "verbs": ["get", "list", "watch"]}
        policy = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [quiet, {"level": "Metadata"}],
        }
        path.write_text(yaml.safe_dump(policy))
        return path

    def writes(self, user: str, *, resources: tuple[str, ...] = ()) -> list[tuple[str, str, int]]:
        """What a user asked to change, by the API server's own record: (verb, resource/subresource/name, code)."""
        found = []
        for verb, about, code in self.writes_since(0, {user}):
            if not resources or about.get("resource") in resources:
                parts = ("resource", "subresource", "namespace", "name")
                found.append((verb, "/".join(about[part] for part in parts if part in about), code))
        return found

    def writes_since(self, offset: int, users: Collection[str]) -> Iterator[tuple[str, dict[str, str], int]]:
        """The same from a place in the audit log on: (verb, what it was about, code)."""
        for line in whole_lines(self.audit_log, since=offset):
            entry = json.loads(line)
            if entry["user"]["username"] in users:
                yield entry["verb"], entry.get("objectRef", {}), entry.get("responseStatus", {}).get("code", 0)

    def wait_ready(self) -> None:
        with self.http() as client:

            def ready() -> bool:
                self.refuse_dead("kube-apiserver")
                try:
                    return client.get("/readyz").status_code == 200
                except httpx2.HTTPError:
                    return False

            wait_until("kube-apiserver ready", ready, limit_s=180)
            version = client.get("/version").json()["gitVersion"]
        if build_tools.on_floor() and version != build_tools.FLOOR:
            raise RuntimeError(f"the API server is {version}, and the floor is {build_tools.FLOOR}")

    def refuse_dead(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and process.poll() is not None:
            tail = (self.log_folder / f"{name}.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")

    def start_controller_manager(self, *arguments: str) -> None:
        """Garbage collection, namespaces' end, service accounts."""
        pki = self._authority.folder
        config = self.kubeconfig("system:kube-controller-manager")
        same = [
            f"--{flag}={config}" for flag in ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        ]
        self.start(
            "kube-controller-manager",
            [
                str(binary("kube-controller-manager")),
                *same,
                "--bind-address=127.0.0.1",
                f"--secure-port={self._kcm_port}",
                "--leader-elect=false",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={pki}/sa.key",
                f"--root-ca-file={pki}/ca.crt",
                *arguments,
            ],
        )

        def settled() -> bool:
            self.refuse_dead("kube-controller-manager")
            with self.http() as client:
                return client.get("/api/v1/namespaces/default/serviceaccounts/default").status_code == 200

        wait_until("the default service account", settled)

    @contextlib.contextmanager
    def http(self, user: str = "admin") -> Iterator[httpx2.Client]:
        """A plain HTTP client with a user's certificate."""
        pki = self._authority.folder
        context = ssl.create_default_context(cafile=str(self._authority.ca))
        context.load_cert_chain(pki / f"{user}.crt", pki / f"{user}.key")
        with httpx2.Client(base_url=self.server, verify=context, timeout=20, trust_env=False) as client:
            yield client


def install_crds(plane: ControlPlane) -> None:
    """By server-side apply with strict field validation, and waited for until each kind is served."""
    with plane.http() as client:
        for path in sorted(MANIFESTS.glob("*.yaml")):
            crd = yaml.safe_load(path.read_text())
            name = crd["metadata"]["name"]
            answer = client.patch(
                f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}?fieldManager=test&fieldValidation=Strict",
                content=path.read_bytes(),
                headers={"Content-Type": "application/apply-patch+yaml"},
            )
            assert answer.status_code in (200, 201), answer.json()["message"]
        for path in sorted(MANIFESTS.glob("*.yaml")):
            plural = yaml.safe_load(path.read_text())["spec"]["names"]["plural"]
            url = f"/apis/kvtier.dev/v1alpha1/{plural}"
            wait_until(f"{plural} served", lambda url=url: client.get(url).status_code == 200)
