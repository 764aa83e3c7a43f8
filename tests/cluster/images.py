"""Images for a test node, without a registry or a container engine: one docker-archive. `make images` writes it to a file.

The controller and the node agent are what `built_images` builds from the Dockerfile. The tests' workloads are made of this machine's
files, in three layers: the interpreter, the packages that kvtier declares and the tools that it runs; kvtier itself; the workloads.
Each is made once for its content and kept in the cache folder. Where nothing can be built, those layers are the two images too.
`KVTIER_IMAGES=FILE` names an archive of the same image names that is used instead.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import marshal
import os
import platform
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import build_tools
import built_images
from docker_archive import CONTROLLER, NAMES, NODE, PAUSE, REGISTRY, TAG, WORKLOAD, Image, write
from packaging.requirements import Requirement

from requirements import missing, need_tool

__all__ = ["CONTROLLER", "NAMES", "NODE", "PAUSE", "REGISTRY", "TAG", "WORKLOAD", "WORKLOADS", "archive"]

WORKLOADS = Path(__file__).resolve().parent / "workloads"
ROOTS = Path(__file__).resolve().parents[2]

_TOOLS = ("sh", "sleep", "cat", "ls", "mkfs.ext4", "e2fsck", "tune2fs", "blkdiscard", "losetup", "wipefs")
_SOURCES = {
    "crds": ("kvtier_api",),
    "operator": ("kvtier_node", "kvtier_operator"),
    "engine": ("kvtier_engine",),
    "cli": ("kvtier_cli",),
}
_EXTRAS = ("node", "operator")
_MORE = ("numpy",)
"""What the engine needs in a workload. Not torch: the slot store works on buffers."""
_SKIPPED = frozenset(
    {"__pycache__", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages"}
)
_VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_SITE = f"usr/local/lib/{_VERSION}/site-packages"
_ENVIRONMENT = ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONDONTWRITEBYTECODE=1", "LC_ALL=C.UTF-8"]
_KEPT = 4
"""Layers of one name that stay in the cache."""
_FORMAT = "3"
"""Changes when this module makes something else of the same files."""

Entry = tuple[str, Path | bytes | str, int]
"""Where in the image; a file, its content, or `->target` for a link; its mode."""


def _pause() -> bytes:
    """A static program that waits for ever (ppoll without an end): what holds a pod's namespaces."""
    machine, code = {
        "x86_64": (62, bytes.fromhex("31ff31f631d24531d24531c0b80f0100000f05ebeb")),
        "aarch64": (183, bytes.fromhex("000080d2010080d2020080d2030080d2040080d2280980d2010000d4f9ffff17")),
    }[platform.machine()]
    base, start = 0x400000, 120
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += (2).to_bytes(2, "little") + machine.to_bytes(2, "little") + (1).to_bytes(4, "little")
    header += (base + start).to_bytes(8, "little") + (64).to_bytes(8, "little") + bytes(8) + bytes(4)
    header += b"".join(part.to_bytes(2, "little") for part in (64, 56, 1, 0, 0, 0))
    size = start + len(code)
    segment = (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + bytes(8)
    segment += base.to_bytes(8, "little") * 2 + size.to_bytes(8, "little") * 2 + (0x1000).to_bytes(8, "little")
    return header + segment + code


# -- what goes in


def _walk(folder: Path, where: str) -> Iterator[Entry]:
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        relative = os.path.relpath(at, folder)
        for name in sorted(names):
            path = Path(at) / name
            if name.endswith((".pyc", ".pyi", ".a", ".o", ".h")) or not path.is_file():
                continue
            yield os.path.normpath(f"{where}/{relative}/{name}"), path, 0o644


def _interpreter() -> Iterator[Entry]:
    binary = Path(os.path.realpath(sys.executable))
    yield f"usr/local/bin/{_VERSION}", binary, 0o755
    yield "usr/local/bin/python3", f"->{_VERSION}", 0o777
    yield "usr/local/bin/python", f"->{_VERSION}", 0o777
    yield f"usr/local/lib/{_VERSION}/dist-packages", "->site-packages", 0o777  # where Debian's Python looks
    yield from _walk(Path(sysconfig.get_path("stdlib")), f"usr/local/lib/{_VERSION}")


def _distributions() -> list[importlib.metadata.Distribution]:
    """Those of kvtier's extras that run in a cluster, and what they need in turn."""
    project = tomllib.loads((ROOTS / "pyproject.toml").read_text())["project"]
    extras = [text for extra in _EXTRAS for text in project["optional-dependencies"][extra]]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras, *_MORE)]
    found: dict[str, importlib.metadata.Distribution] = {}
    seen = set()
    while wanted:
        need = wanted.pop()
        item = (need.name.lower().replace("_", "-"), *sorted(need.extras))
        if item in seen:
            continue
        seen.add(item)
        found[item[0]] = distribution = importlib.metadata.distribution(need.name)
        for text in distribution.requires or ():
            more = Requirement(text)
            if more.marker is None or any(more.marker.evaluate({"extra": extra}) for extra in (*need.extras, "")):
                wanted.append(more)
    return [found[name] for name in sorted(found)]


def _packages() -> Iterator[Entry]:
    for distribution in _distributions():
        for file in distribution.files or ():
            if ".." in file.parts or _SKIPPED & set(file.parts[:-1]) or file.suffix in (".pyc", ".pyi"):
                continue
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                yield f"{_SITE}/{file}", path, 0o644


def _tools() -> Iterator[Entry]:
    for name in _TOOLS:
        yield f"usr/bin/{name}", Path(os.path.realpath(need_tool(name))), 0o755
    for path in ("/etc/mke2fs.conf",):
        if os.path.exists(path):
            yield path[1:], Path(path), 0o644
    for name, where in (("lib", "usr/lib"), ("lib64", "usr/lib64"), ("bin", "usr/bin"), ("sbin", "usr/sbin")):
        yield name, f"->{where}", 0o777
    users = b"root:x:0:0::/root:/bin/sh\nkvtier:x:65532:65532::/:/bin/sh\n"
    yield "etc/passwd", users, 0o644
    yield "etc/group", b"root:x:0:\nkvtier:x:65532:\n", 0o644


def _libraries(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Shared libraries of the machine that binaries among the entries are linked with, where a loader without a cache looks."""
    files = [str(what) for where, what, mode in entries if isinstance(what, Path) and (mode == 0o755 or ".so" in where)]
    # ldd ends with 1 for a script among them; what it could not find shows when the image runs.
    answer = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    found = {
        line.split("(")[0].split("=>")[-1].strip() for line in answer.splitlines() if "/" in line and "(0x" in line
    }
    own = {os.path.realpath(name) for name in files}
    for name in sorted(found):
        if not name.startswith("/") or os.path.realpath(name) in own or "site-packages" in name:
            continue
        folder = os.path.realpath(os.path.dirname(name))
        if not folder.startswith(("/usr/lib", "/lib")):  # libpython of a build of the user's own
            folder = f"/usr/lib/{platform.machine()}-linux-gnu"
        yield f"{folder[1:]}/{os.path.basename(name)}", Path(os.path.realpath(name)), 0o755


def _base() -> list[Entry]:
    entries = [*_interpreter(), *_packages(), *_tools()]
    return [*entries, *_libraries(entries)]


def _kvtier() -> list[Entry]:
    entries: list[Entry] = []
    for root, packages in _SOURCES.items():
        for package in packages:
            entries += _walk(ROOTS / root / package, f"{_SITE}/{package}")
    distribution = importlib.metadata.distribution("kvtier")
    metadata = f"{_SITE}/kvtier-{distribution.version}.dist-info/METADATA"
    entries.append((metadata, (distribution.read_text("METADATA") or "").encode(), 0o644))
    script = f"#!/usr/local/bin/{_VERSION}\nimport sys\nfrom kvtier_cli.main import main\nsys.exit(main())\n"
    entries.append(("usr/local/bin/kvtier", script.encode(), 0o755))
    return entries


def _workloads() -> list[Entry]:
    return list(_walk(WORKLOADS, "workloads"))


# -- layers and images


def _key(entries: list[Entry], *, by_content: bool) -> str:
    """What a layer is called in the cache. Machine's files by size and time, kvtier's own by content."""
    digest = hashlib.sha256(_FORMAT.encode())
    for where, what, mode in entries:
        if isinstance(what, Path):
            info = what.stat()
            state: object = (
                hashlib.sha256(what.read_bytes()).hexdigest() if by_content else (info.st_size, info.st_mtime_ns)
            )
        else:
            state = what
        digest.update(repr((where, str(what), mode, state)).encode())
    return digest.hexdigest()[:24]


def _compiled(source: bytes, name: str) -> bytes | None:
    """Byte code that is never checked against its source: images are read-only, and start sooner."""
    try:
        code = compile(source, f"/{name}", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # templates, and code for other versions
        return None
    return (
        importlib.util.MAGIC_NUMBER
        + (1).to_bytes(4, "little")
        + importlib.util.source_hash(source)
        + marshal.dumps(code)
    )


def _write_layer(entries: list[Entry], path: Path) -> None:
    folders: set[str] = set()
    with tarfile.open(path, "w") as tar:

        def add(where: str, content: bytes, mode: int) -> None:
            parent = os.path.dirname(where)
            missing = []
            while parent and parent not in folders:
                missing.append(parent)
                folders.add(parent)
                parent = os.path.dirname(parent)
            for folder in reversed(missing):
                info = tarfile.TarInfo(folder)
                info.type, info.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(info)
            info = tarfile.TarInfo(where)
            info.mode, info.size = mode, len(content)
            tar.addfile(info, io.BytesIO(content))

        for where, what, mode in entries:
            if isinstance(what, str):
                info = tarfile.TarInfo(where)
                info.type, info.linkname = tarfile.SYMTYPE, what.removeprefix("->")
                tar.addfile(info)
                continue
            content = what.read_bytes() if isinstance(what, Path) else what
            add(where, content, mode)
            if where.endswith(".py") and (code := _compiled(content, where)) is not None:
                folder, name = os.path.split(where)
                add(f"{folder}/__pycache__/{name[:-3]}.{sys.implementation.cache_tag}.pyc", code, 0o644)


def _layer(name: str, entries: list[Entry], *, by_content: bool, cache: Path) -> Path:
    path = cache / f"{name}-{_key(entries, by_content=by_content)}.tar"
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        _write_layer(entries, partial)
        partial.rename(path)
        for old in sorted(cache.glob(f"{name}-*.tar"), key=lambda it: it.stat().st_mtime)[:-_KEPT]:
            old.unlink(missing_ok=True)
    return path


def _folders() -> list[Entry]:
    return [
        (f"{name}/.keep", b"", 0o644) for name in ("dev", "proc", "sys", "tmp", "run", "root", "var/lib", "var/tmp")
    ]


def archive(path: Path) -> Path:
    """A docker-archive of PAUSE, CONTROLLER, NODE and WORKLOAD at that path; whoever removes it removes no file of the user's."""
    named = os.environ.get("KVTIER_IMAGES")
    if named:
        path.symlink_to(Path(named).absolute())
        return path
    cache = build_tools.cache_base() / "images"
    cache.mkdir(parents=True, exist_ok=True)
    base = _layer("base", [*_base(), *_folders()], by_content=False, cache=cache)
    kvtier = _layer("kvtier", _kvtier(), by_content=True, cache=cache)
    workloads = _layer("workloads", _workloads(), by_content=True, cache=cache)
    pause = _layer("pause", [("pause", _pause(), 0o755)], by_content=True, cache=cache)
    found = [
        Image.of_layers((PAUSE,), (pause,), ["/pause"], _ENVIRONMENT),
        Image.of_layers((WORKLOAD,), (base, kvtier, workloads), ["/usr/local/bin/python"], _ENVIRONMENT),
    ]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        lacks = built_images.lacking()
        if lacks is None:
            built = built_images.storage()
            built.build()
            found += built.save(Path(folder)).values()
        elif os.environ.get("CI"):
            missing(lacks)
        else:
            print(f"not the images of the Dockerfile: that needs {lacks}", file=sys.stderr)
            found.append(Image.of_layers((CONTROLLER, NODE), (base, kvtier), ["/usr/local/bin/kvtier"], _ENVIRONMENT))
        write(path, found)
    return path


def main() -> int:
    """`python images.py FILE`: writes the archive there."""
    print(archive(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
