"""Both images, built from the Dockerfile: what is in them, what is not, that it runs, and that a second build makes the same."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tarfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import built_images
import pytest
from built_images import ROOT, TARGETS, Storage
from docker_archive import Image

from requirements import missing

pytestmark = [pytest.mark.root, pytest.mark.slow]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VENV = {"controller": "opt/operator", "node": "opt/node"}
TOOLS = ("mkfs.ext4", "cryptsetup", "dmsetup")
BY_HASH = 0b01
"""Flag of a .pyc (PEP 552): not by the source's time. Without the next one: not compared at all."""


@dataclass(frozen=True)
class File:
    """One of an image's, in the highest layer that has it."""

    layer: Path
    member: tarfile.TarInfo

    def read(self) -> bytes:
        with self.layer.open("rb") as tar:
            tar.seek(self.member.offset_data)
            return tar.read(self.member.size)


@dataclass(frozen=True)
class Built:
    """An image and the file system that its layers make: paths without the leading slash."""

    image: Image
    files: dict[str, File]

    @property
    def config(self) -> dict[str, Any]:
        found = json.loads(self.image.config)["config"]
        assert isinstance(found, dict)
        return found

    def below(self, folder: str) -> Iterator[str]:
        """What is in that folder and is no folder itself."""
        prefix = f"{folder}/"
        return (name for name, file in self.files.items() if name.startswith(prefix) and not file.member.isdir())


def read_layers(image: Image) -> Built:
    files: dict[str, File] = {}
    for layer in image.layers:
        with tarfile.open(layer) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.name.startswith(".wh."):
                    assert path.name != ".wh..wh..opq", "no folder of a lower layer is hidden"
                    gone = str(path.with_name(path.name.removeprefix(".wh.")))
                    for name in [name for name in files if name == gone or name.startswith(f"{gone}/")]:
                        del files[name]
                else:
                    files[str(path)] = File(layer, member)
    return Built(image, files)


def need_builder() -> None:
    lacks = built_images.lacking()
    if lacks is not None:
        missing(lacks)


@pytest.fixture(scope="module")
def storage() -> Storage:
    need_builder()
    found = built_images.storage()
    found.build()
    return found


@pytest.fixture(scope="module")
def images(storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Built]]:
    folder = tmp_path_factory.mktemp("images")
    yield {target: read_layers(image) for target, image in storage.save(folder).items()}
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def built(target: str, images: dict[str, Built]) -> Built:
    return images[target]


@pytest.fixture
def run(target: str, storage: Storage) -> Callable[..., str]:
    return lambda *argv: storage.run(target, *argv)


# -- what runs


def test_the_entry_point_starts_without_a_shell(built: Built, run: Callable[..., str]) -> None:
    entrypoint = built.config["Entrypoint"]
    assert not {"sh", "bash", "-c"} & set(entrypoint)
    assert "Usage" in run(*entrypoint, "--help").title()


def test_the_controller_runs_as_a_user_that_has_no_name(images: dict[str, Built], storage: Storage) -> None:
    assert images["controller"].config["User"] == "65532:65532"
    code = "import os; print(os.getresuid(), os.getresgid(), os.access('/etc', os.W_OK))"
    said = storage.run("controller", "python", "-c", code)
    assert said.strip() == "(65532, 65532, 65532) (65532, 65532, 65532) False"
    assert b":65532:" not in images["controller"].files["etc/passwd"].read(), (
        "it would hide what a cluster's own uid meets"
    )


def test_the_node_has_the_programs_that_the_agent_starts_and_the_controller_has_none(
    images: dict[str, Built], storage: Storage
) -> None:
    for program in TOOLS:
        version = "-V" if program.startswith("mkfs") else "--version"
        storage.run("node", program, version)
    for name in images["controller"].files:
        assert PurePosixPath(name).name not in TOOLS


def test_every_module_of_kvtier_is_in_both_images_and_can_be_imported(built: Built, run: Callable[..., str]) -> None:
    """But for what another extra is for: the engine's, which runs in neither."""
    own = ("kvtier_api", "kvtier_operator" if VENV["controller"] in built.config["Env"][-1] else "kvtier_node")
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for each in pkgutil.walk_packages(importlib.import_module(name).__path__, f'{name}.'):\n"
        "        if not each.name.endswith('__main__'):\n"
        "            importlib.import_module(each.name)\n"
    )
    run("python", "-c", code, *own)
    for name in own:
        (sources,) = [folder for folder in ("crds", "operator") if (ROOT / folder / name).is_dir()]
        there = {str(path.relative_to(ROOT / sources)) for path in (ROOT / sources / name).rglob("*.py")}
        inside = {each.partition("site-packages/")[2] for each in built.files if f"site-packages/{name}/" in each}
        assert there <= inside


def test_versions_are_those_of_constraints_txt(target: str, built: Built) -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().lower().splitlines() if "==" in line
    )
    found = {
        match[1].lower().replace("_", "-"): match[2]
        for name in built.files
        if (match := re.fullmatch(rf"{VENV[target]}/lib/python3.*/site-packages/([^/]+)-([^-/]+)\.dist-info", name))
    }
    assert found.pop("kvtier") == PROJECT["version"]
    assert {"pydantic", "cryptography", "lightkube"} <= set(found)
    assert not {"pip", "setuptools", "torch", "pytest"} & set(found)
    for name, version in found.items():
        assert pinned[name] == version, name


# -- what it says of itself


def test_the_image_says_what_it_is_and_how_it_is(built: Built) -> None:
    labels = built.config["Labels"]
    for key in ("title", "description", "source", "licenses", "revision"):
        assert labels[f"org.opencontainers.image.{key}"]
    assert labels["org.opencontainers.image.version"] == PROJECT["version"]
    kind, *command = built.config["Healthcheck"]["Test"]
    assert kind == "CMD"
    assert "/healthz" in command[-1]
    (port,) = (name.removesuffix("/tcp") for name in built.config["ExposedPorts"])
    assert f":{port}/" in command[-1]


def test_the_health_check_fails_where_nothing_serves(built: Built, run: Callable[..., str]) -> None:
    _, *command, code = built.config["Healthcheck"]["Test"]
    with pytest.raises(RuntimeError, match="Connection refused"):
        run(*command, re.sub(r":[0-9]+/", ":1/", code))


# -- what is not in it


def test_nothing_of_the_build_is_left(built: Built) -> None:
    for folder in ("var/lib/apt/lists", "var/cache/apt", "var/log", "tmp", "var/tmp", "root/.cache", "run", "src"):
        left = [name for name in built.below(folder) if built.files[name].member.size]
        assert left[:3] == [], folder
    for name in built.files:
        assert not name.startswith(("wheel", "kvtier", "build")), name
        assert not name.endswith((".deb", ".whl", "/aux-cache")), name


def test_no_setting_of_this_machine_is_in_it(built: Built) -> None:
    for name in ("etc/resolv.conf", "etc/hostname", "etc/hosts", "etc/machine-id", "etc/pip.conf"):
        assert name not in built.files or built.files[name].member.size == 0, name
    assert [*built.below("usr/local/share/ca-certificates")] == []
    certificates = b"".join(built.files[name].read() for name in built.below("usr/share/ca-certificates"))
    bundle = built.files["etc/ssl/certs/ca-certificates.crt"].read()
    begin = b"BEGIN CERTIFICATE"
    assert bundle.count(begin) == certificates.count(begin), "Debian's, and none beside"
    settings = {
        value
        for name, value in os.environ.items()
        if re.search("proxy|pip_|_index|cert|ssl|_ca_", name, re.I) and len(value) > 4 and not value.isdigit()
    }
    usual = {"/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/certs"}  # Debian's own place for them
    texts = [built.image.config, *(built.files[name].read() for name in built.below("etc"))]
    for value in {str(ROOT), *(settings - usual)}:
        assert not any(value.encode() in text for text in texts), value
    assert built.config["Hostname"] != socket.gethostname()
    assert not {"PIP_CERT", "PIP_INDEX_URL", "HTTP_PROXY"} & {
        each.split("=")[0].upper() for each in built.config["Env"]
    }
    sources = [name for name in built.below("etc/apt") if b"http" in built.files[name].read()]
    for name in sources:
        for host in re.findall(rb"https?://([^/\s]+)", built.files[name].read()):
            assert host == b"deb.debian.org" or host.endswith(b".debian.org"), (name, host)


def test_byte_code_is_there_and_depends_on_no_time(target: str, built: Built) -> None:
    flags = {
        name: int.from_bytes(built.files[name].read()[4:8], "little") for name in built.files if name.endswith(".pyc")
    }
    by_time = [name for name, found in flags.items() if not found & BY_HASH]
    assert by_time[:3] == []
    own = {name: found for name, found in flags.items() if name.startswith(VENV[target])}
    assert set(own.values()) == {BY_HASH}, "never compared: the image is not written to"
    for name in own:
        path = PurePosixPath(name)
        assert str(path.parent.parent / f"{path.name.partition('.')[0]}.py") in built.files
    assert any("kvtier_" in name for name in own)


# -- once more


def test_a_second_build_from_nothing_makes_the_same_layers(images: dict[str, Built], tmp_path: Path) -> None:
    """Of the same packages and sources, in another folder, at another time: base, Debian's packages, PyPI's and kvtier's."""
    context = tmp_path / "elsewhere"
    context.mkdir()
    for name in (".dockerignore", "Dockerfile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, context / name)
    for name in ("crds", "operator", "engine", "cli"):
        shutil.copytree(ROOT / name, context / name, copy_function=shutil.copyfile)
    again = Storage(tmp_path / "storage")
    again.build(context)
    for target, image in again.save(tmp_path).items():
        assert image.layer_ids == images[target].image.layer_ids
