"""What the images of a test node are called, and the docker-archive that holds several of them.

What is in them is for others to say: `built_images` those of the Dockerfile, `images` those made of this machine's files.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTROLLER", "NAMES", "NODE", "PAUSE", "REGISTRY", "TAG", "WORKLOAD", "Image", "sha256", "write"]

PAUSE, WORKLOAD = "localhost/pause:dev", "localhost/kvtier-workload:dev"
REGISTRY, TAG = "localhost", "test"
CONTROLLER, NODE = f"{REGISTRY}/kvtier/controller:{TAG}", f"{REGISTRY}/kvtier/node:{TAG}"
NAMES = (PAUSE, CONTROLLER, NODE, WORKLOAD)


@dataclass(frozen=True)
class Image:
    """Layers are tar files, not compressed, the lowest first. `config` is Docker's, whole."""

    names: tuple[str, ...]
    config: bytes
    layers: tuple[Path, ...]

    @classmethod
    def of_layers(
        cls, names: tuple[str, ...], layers: tuple[Path, ...], entrypoint: list[str], env: list[str]
    ) -> Image:
        """One of this machine's architecture that was not built by a builder."""
        found = {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
            "os": "linux",
            "config": {"Entrypoint": entrypoint, "Env": env},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256(layer)}" for layer in layers]},
        }
        return cls(names, json.dumps(found).encode(), layers)

    @property
    def layer_ids(self) -> list[str]:
        """SHA-256 of each layer, in hex, as the config says."""
        return [each.removeprefix("sha256:") for each in json.loads(self.config)["rootfs"]["diff_ids"]]


def write(path: Path, images: Iterable[Image]) -> None:
    """A docker-archive of all of them; a layer that several have is in it once."""
    manifest, written = [], set()
    with tarfile.open(path, "w") as tar:

        def add(name: str, content: bytes) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))

        for image in images:
            ids = image.layer_ids
            for layer_id, layer in zip(ids, image.layers, strict=True):
                if layer_id not in written:
                    tar.add(layer, f"{layer_id}.tar")
                    written.add(layer_id)
            config = f"{hashlib.sha256(image.config).hexdigest()}.json"
            add(config, image.config)
            layers = [f"{layer_id}.tar" for layer_id in ids]
            manifest.append({"Config": config, "RepoTags": [*image.names], "Layers": layers})
        add("manifest.json", json.dumps(manifest).encode())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
