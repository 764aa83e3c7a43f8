"""The kernel of the virtual machine: fetched once from Debian sid, kept in a cache folder.

Debian's older builds (6.1, 6.12) panic on processors with AMX or AVX-512 state; sid's works but needs sid's C library,
which is unpacked beside it. The machine's own apt sources, lists and caches stay untouched: apt gets folders of its
own. Signatures are checked as ever. Leaves booting to `machine`. Standard library only: it also runs before any
virtual environment exists (`fetch_kernel.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("user-mode-linux", "libc6")
#: What the host needs beside them: to build the cache, and for what guests run from the host's own tree.
HOST_PACKAGES = (
    "patchelf", "kmod", "cryptsetup-bin", "dmsetup", "e2fsprogs", "xfsprogs", "btrfs-progs", "f2fs-tools",
    "debian-archive-keyring",
)  # fmt: skip
#: The version that this was written with. Another one is used too; the stamp says which.
TESTED_VERSION = "7.2um1"
DEFAULT_MIRROR = "http://deb.debian.org/debian"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_STAMP = "stamp.json"
_LAYOUT = 1  # raised when the layout of the cache changes, so that an old cache is made anew


class KernelMissing(RuntimeError):
    """No usable kernel in the cache, or it cannot be made. The message ends with what to do."""


@dataclass(frozen=True)
class Kernel:
    """A kernel ready to boot: `linux` (the executable), `modprobe` (what the guest's kernel calls for a module)."""

    linux: Path
    modprobe: Path
    version: str


def cache_folder() -> Path:
    """`$KVTIER_CACHE/uml`, else `.cache/uml` in the checkout."""
    base = os.environ.get("KVTIER_CACHE")
    root = Path(base) if base else Path(__file__).resolve().parents[4] / ".cache"
    return root.absolute() / "uml"


def find(folder: Path | None = None) -> Kernel:
    """The kernel in the cache; raises KernelMissing if it is absent, damaged or was made for another place."""
    folder = folder or cache_folder()
    try:
        stamp = json.loads((folder / _STAMP).read_text())
    except (OSError, ValueError) as error:
        raise KernelMissing(f"no user-mode Linux in {folder}: run tests/vm/fetch_kernel.py") from error
    # The interpreter's path is absolute inside the executable, so a moved cache is no cache.
    if stamp.get("layout") != _LAYOUT or stamp.get("folder") != str(folder):
        raise KernelMissing(f"{folder} was made by another version or in another place: run tests/vm/fetch_kernel.py")
    kernel = Kernel(folder / "linux", folder / "modprobe", str(stamp["versions"]["user-mode-linux"]))
    for name, digest in stamp["sha256"].items():
        path = folder / name
        if not path.is_file() or _sha256(path) != digest:
            raise KernelMissing(f"{path} is damaged: remove {folder} and run tests/vm/fetch_kernel.py")
    return kernel


def fetch(folder: Path | None = None) -> Kernel:
    """Make the cache unless it is there already; safe to call from several processes. About 20 s and 190 MB."""
    folder = folder or cache_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "uml.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return find(folder)
        except KernelMissing:
            pass
        fresh = folder.with_name("uml.new")
        for old in (folder, fresh):
            shutil.rmtree(old, ignore_errors=True)
        fresh.mkdir()
        versions = _build(fresh, folder)
        shutil.rmtree(fresh / "apt")
        made = {name: _sha256(fresh / name) for name in ("linux", "modprobe", "lib/libc.so.6")}
        stamp = {"layout": _LAYOUT, "folder": str(folder), "versions": versions, "sha256": made}
        (fresh / _STAMP).write_text(json.dumps(stamp, indent=1))
        fresh.rename(folder)
        return find(folder)


def mirror() -> str:
    """The Debian mirror that this machine's own apt uses (a site may have a local one), else the public one."""
    form = "$(ORIGIN)|$(COMPONENT)|$(REPO_URI)"
    targets = [line.split("|") for line in _run(["apt-get", "indextargets", "--format", form]).stdout.splitlines()]
    # The origin is known only once lists were fetched; before that, `main` tells Debian from others' `/debian` folders.
    for origin, component, uri in targets:
        if origin in ("Debian", "") and component == "main" and uri.rstrip("/").endswith("/debian"):
            return uri.rstrip("/")
    return DEFAULT_MIRROR


def _build(fresh: Path, final: Path) -> dict[str, str]:
    """Download, unpack, and point the executable at its own C library in `final`. Returns package versions."""
    for tool, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("patchelf", "patchelf"), ("kmod", "kmod")):
        if shutil.which(tool, path=_PATH) is None:
            raise KernelMissing(f"needs {tool}: apt-get install {package}")
    if not _KEYRING.is_file():
        raise KernelMissing(f"needs {_KEYRING}: apt-get install debian-archive-keyring")
    debs = _download(fresh / "apt")
    trees = {}
    for name, deb in debs.items():
        trees[name] = fresh / "apt" / f"tree-{name}"
        _run(["dpkg-deb", "-x", str(deb), str(trees[name])])
    library = next((trees["libc6"] / "usr/lib").glob("*/libc.so.6")).parent
    (fresh / "lib").mkdir()
    for name in ("libc.so.6", "ld-linux-x86-64.so.2"):
        shutil.copy2(library / name, fresh / "lib" / name)
    shutil.copy2(trees["user-mode-linux"] / "usr/bin/linux.uml", fresh / "linux")
    interpreter = final / "lib/ld-linux-x86-64.so.2"
    _run(["patchelf", "--set-interpreter", str(interpreter), "--set-rpath", str(final / "lib"), str(fresh / "linux")])
    (fresh / "tree/lib").mkdir(parents=True)
    (trees["user-mode-linux"] / "usr/lib/uml/modules").rename(fresh / "tree/lib/modules")
    # kmod acts by the name it is called by; a script keeps that name and adds where the modules are.
    kmod = shutil.which("kmod", path=_PATH)
    (fresh / "bin").mkdir()
    (fresh / "bin/modprobe").symlink_to(str(kmod))
    (fresh / "modprobe").write_text(f'#!/bin/sh\nexec "{final}/bin/modprobe" -d "{final}/tree" "$@"\n')
    (fresh / "modprobe").chmod(0o755)
    return {name: _run(["dpkg-deb", "-f", str(deb), "Version"]).stdout.strip() for name, deb in debs.items()}


def _download(folder: Path) -> dict[str, Path]:
    for name in ("state/lists/partial", "cache/archives/partial", "none", "debs"):
        (folder / name).mkdir(parents=True)
    (folder / "sid.sources").write_text(
        f"Types: deb\nURIs: {mirror()}\nSuites: sid\nComponents: main\nArchitectures: amd64\nSigned-By: {_KEYRING}\n"
    )
    # A mirror may be a frozen snapshot, whose Release file is past its date; signatures are checked all the same.
    (folder / "apt.conf").write_text(
        f'Dir::State "{folder}/state";\nDir::Cache "{folder}/cache";\n'
        f'Dir::Etc::SourceList "{folder}/sid.sources";\nDir::Etc::SourceParts "{folder}/none";\n'
        f'Dir::Etc::Preferences "{folder}/no-preferences";\nDir::Etc::PreferencesParts "{folder}/none";\n'
        'Acquire::Check-Valid-Until "false";\nAcquire::Retries "3";\nAcquire::Languages "none";\nAPT::Sandbox::User "root";\n'
        'APT::Architecture "amd64";\nAcquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";\n'
        "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n#clear DPkg::Post-Invoke;\n"
    )
    apt = ["apt-get", "-q", "-c", str(folder / "apt.conf")]
    _run([*apt, "update"])
    _run([*apt, "download", *PACKAGES], cwd=folder / "debs")
    return {name: next((folder / "debs").glob(f"{name}_*.deb")) for name in PACKAGES}


_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _run(command: list[str], *, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"LC_ALL": "C", "PATH": _PATH}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    if check and done.returncode != 0:
        raise KernelMissing(f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
