"""The controller's and the node's image, built from the project's own Dockerfile by buildah, on a Debian that mmdebstrap makes here.

No registry and no container engine is needed: Debian's packages and PyPI are. Layers are kept in the cache folder, so that a change
of kvtier's sources builds the last ones only; `--fresh` begins from nothing, with the packages of today. Each buildah runs in
namespaces of its own and ends with the process that started it: no mount and no process of it is ever left.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import build_tools
from docker_archive import CONTROLLER, NODE, Image

__all__ = ["TARGETS", "Storage", "lacking", "storage"]

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"controller": CONTROLLER, "node": NODE}
"""The Dockerfile's targets, and what their images are called on a test node."""
_BUILD = "localhost/kvtier/build:test"
"""The stage that the others copy from: named, so that its layers are kept."""
_PACKAGES = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "unshare": "util-linux", "setpriv": "util-linux"}
_DEBIAN = "bookworm"
_BASE_OPTIONS = (
    "--variant=apt",  # the least on which apt runs: the Dockerfile has to name all else that it needs
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
    "--customize-hook=rm -f $1/etc/resolv.conf $1/etc/hostname",  # mmdebstrap copies this machine's
)
_ENTER = (
    "setpriv",
    "--pdeathsig",
    "KILL",
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
_EPOCH = "0"
"""The time that everything in a layer has: the same files make the same layer."""
_PIP_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "cert")


def lacking() -> str | None:
    """What a build needs and is not here."""
    if os.geteuid() != 0:
        return "root"
    return next(
        (f"the program {name} (Debian: {_PACKAGES[name]})" for name in _PACKAGES if not shutil.which(name)), None
    )


class Storage:
    """A folder with buildah's layers, and what is built in it. One process at a time: others wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def _driver(self) -> str:
        """buildah's own variable has the last word: `vfs` where the folder's file system can't be below an overlay."""
        return os.environ.get("STORAGE_DRIVER", "overlay")

    def _buildah(self, *arguments: str) -> str:
        """Raises RuntimeError with the end of what buildah said."""
        places = ("--root", str(self.folder / "root"), "--runroot", str(self.folder / "run"))
        command = [*_ENTER, "buildah", *places, "--storage-driver", self._driver, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"buildah {arguments[0]}: {(done.stdout + done.stderr)[-4000:]}")
        return done.stdout

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._buildah("rm", "--all")  # of a build that was killed
            yield

    def build(self, context: Path = ROOT) -> None:
        """Both images, and the base below them."""
        with self._locked(), _pip_secrets() as secrets:
            base = self._base()
            for target, name in (("build", _BUILD), *TARGETS.items()):
                started = time.monotonic()
                self._buildah(
                    *("build", "--layers", "--isolation", "chroot", "--format", "docker", "--pull-never"),
                    *("--timestamp", _EPOCH, "--build-arg", f"SOURCE_DATE_EPOCH={_EPOCH}"),
                    *("--build-arg", f"BASE_IMAGE={base}", *secrets),
                    *("--target", target, "--tag", name, str(context)),
                )
                print(f"{target}: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            self._buildah("rmi", "--prune")  # what an earlier state of the sources was

    def _base(self) -> str:
        """The name of a Debian with nothing in it but apt."""
        key = hashlib.sha256(repr((_DEBIAN, _BASE_OPTIONS)).encode()).hexdigest()[:12]
        name = f"localhost/debian:{_DEBIAN}-{key}"
        if name in self._buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
            return name
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            env = os.environ | {"SOURCE_DATE_EPOCH": _EPOCH}
            command = ["mmdebstrap", "--quiet", "--mode=root", *_BASE_OPTIONS, _DEBIAN, f"{folder}/base.tar"]
            done = subprocess.run([*_ENTER, *command], env=env, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"mmdebstrap: {done.stderr[-4000:]}")
            Path(folder, "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
            self._buildah("build", "--format", "docker", "--timestamp", _EPOCH, "--tag", name, folder)
        print(f"base: built in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return name

    def save(self, folder: Path) -> dict[str, Image]:
        """The images by target, as files in that folder."""
        found = {}
        with self._locked():
            for target, name in TARGETS.items():
                where = folder / target
                self._buildah("push", "--quiet", "--disable-compression", "--format", "v2s2", name, f"dir:{where}")
                manifest = json.loads((where / "manifest.json").read_bytes())
                digests = [part["digest"].removeprefix("sha256:") for part in (manifest["config"], *manifest["layers"])]
                config, *layers = (where / digest for digest in digests)
                found[target] = Image((name,), config.read_bytes(), tuple(layers))
        return found

    def run(self, target: str, *argv: str) -> str:
        """What a program prints in a new container of that image, as the image's user. Raises RuntimeError where it fails."""
        with self._locked():
            container = self._buildah("from", "--pull-never", TARGETS[target]).strip()
            return self._buildah("run", "--isolation", "chroot", container, "--", *argv)


def storage() -> Storage:
    """The one in the cache folder."""
    return Storage(build_tools.cache_base() / "buildah")


@contextlib.contextmanager
def _pip_secrets() -> Iterator[tuple[str, ...]]:
    """How this machine's pip reaches PyPI, for the time of a build and for no layer."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = {}
    # Such as global.cert='/some/file'; those of the environment are listed last.
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2].removeprefix("default-")] = value.strip("'\"")
    arguments: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        if "cert" in settings:
            arguments += ["--secret", f"id=pip_ca,src={settings['cert']}"]
            settings["cert"] = "/run/secrets/pip_ca"
        lines = [f"{name} = {settings[name]}\n" for name in _PIP_SETTINGS if name in settings]
        configuration = Path(folder, "pip.conf")
        configuration.write_text("[global]\n" + "".join(lines))
        yield (*arguments, "--secret", f"id=pip_conf,src={configuration}")


def main() -> int:
    """Builds both images; `images.py` makes an archive of them."""
    lacks = lacking()
    if lacks is not None:
        print(f"the images are not built: that needs {lacks}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    found = storage()
    if "--fresh" in sys.argv[1:]:
        shutil.rmtree(found.folder, ignore_errors=True)
    found.build()
    return 0


if __name__ == "__main__":
    sys.exit(main())
