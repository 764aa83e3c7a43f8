"""What somebody can put in kvtier's way, and that each is refused with nothing outside touched.

`outside` is hashed (names, modes, owners, content, times) before and after each attempt.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import (
    Busy,
    ForeignData,
    InsufficientSpace,
    KernelError,
    KvtierError,
    NotFound,
    NotPermitted,
    UnsafePath,
)
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import files, libc
from kvtier_node.paths import AllowedRoots, Directory
from leftovers import open_descriptors
from requirements import need_root

NOBODY = 65534


class Scene:
    """`allowed/tier` is ours; `outside` must never change."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "allowed"
        self.tier = self.root / "tier"
        self.outside = base / "outside"
        self.secret = self.outside / "secret"
        for path in (self.root, self.tier, self.outside, self.outside / "folder"):
            path.mkdir(mode=0o755)
        self.secret.write_bytes(b"another's data")
        (self.outside / "folder" / "file").write_bytes(b"more of it")
        self.roots = AllowedRoots([str(self.root)])

    def open(self, path: Path | str | None = None, *, create: bool = False) -> Directory:
        return self.roots.open_directory(str(path or self.tier), create=create)

    def digest(self) -> str:
        seen = hashlib.sha256()
        for path in sorted([self.outside, *self.outside.rglob("*")]):
            info = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
            seen.update(repr((str(path), info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, content)).encode())
        return seen.hexdigest()

    @contextlib.contextmanager
    def refuses(self, *kinds: type[KvtierError]) -> Iterator[None]:
        before = self.digest()
        with pytest.raises(kinds) as caught:
            yield
        assert self.digest() == before, "something outside changed"
        assert "\n" not in str(caught.value), "an error stays on one line"
        assert caught.value.obj, "an error names its object"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    os.umask(0o022)
    return Scene(tmp_path)


def bind(source: Path, target: Path) -> None:
    libc.mount(str(source), str(target), None, c.MS_BIND, None)


def tmpfs(target: Path, options: str = "mode=755") -> None:
    libc.mount("tmpfs", str(target), "tmpfs", 0, options)


# Paths that are wrong as text


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("", id="empty"),
        pytest.param("tier", id="relative"),
        pytest.param("{root}/../outside", id="dot-dot to the outside"),
        pytest.param("{root}/tier/../tier", id="dot-dot that comes back"),
        pytest.param("{root}/./tier", id="dot"),
        pytest.param("{root}//tier", id="double slash"),
        pytest.param("/{root}/tier", id="double slash in front"),
        pytest.param("{root}/tier/", id="trailing slash"),
        pytest.param("{root}/ti\ner", id="newline"),
        pytest.param("{root}/ti\0er", id="NUL"),
        pytest.param("{root}/ti\x1b[31mer", id="terminal escape"),
        pytest.param("{root}/ti\u202eer", id="bidirectional override"),
        pytest.param("{root}/ti\udcffer", id="undecodable byte"),
        pytest.param("{root}/" + "n" * 256, id="name of 256 bytes"),
        pytest.param("{root}/" + "é" * 128, id="name of 256 bytes in 128 characters"),
        pytest.param("{root}" + "/n" * 2100, id="path of more than 4095 bytes"),
    ],
)
def test_path_that_is_not_clean_is_refused(scene: Scene, path: str) -> None:
    with scene.refuses(UnsafePath):
        scene.roots.open_directory(path.format(root=scene.root), create=True)


@pytest.mark.parametrize("path", ["{outside}", "{base}", "{root}-evil", "/", "/proc/self/root{root}/tier", "/etc"])
def test_path_under_no_allowed_root_is_refused_and_the_roots_are_named(scene: Scene, path: str) -> None:
    asked = path.format(outside=scene.outside, base=scene.base, root=scene.root)
    with scene.refuses(NotPermitted):
        scene.open(asked, create=True)
    with pytest.raises(NotPermitted, match=str(scene.root)):
        scene.open(asked)


@pytest.mark.parametrize("root", ["/", "", "relative", "/a/../b", "/a//b", "/a/", "/a\nb"])
def test_root_that_is_not_clean_or_is_everything_is_refused(root: str) -> None:
    with pytest.raises(UnsafePath):
        AllowedRoots([root])


def test_without_any_root_nothing_opens(scene: Scene) -> None:
    with scene.refuses(NotPermitted):
        AllowedRoots([]).open_directory(str(scene.tier))


BAD_NAMES = {
    "empty": "",
    "dot": ".",
    "dot-dot": "..",
    "slash": "a/b",
    "absolute": "/etc",
    "to the outside": "../../outside/secret",
    "newline": "a\nb",
    "NUL": "a\0b",
    "DEL": "a\x7f",
    "undecodable": "a\udcff",
    "too long": "n" * 256,
}
CALLS: dict[str, Callable[[Directory, str], object]] = {
    "child": lambda place, name: place.child(name),
    "mkdir": lambda place, name: place.mkdir(name, 0o700),
    "create_file": lambda place, name: place.create_file(name),
    "open_file": lambda place, name: place.open_file(name),
    "read_file": lambda place, name: place.read_file(name, 10),
    "write_file_atomic": lambda place, name: place.write_file_atomic(name, b"ours"),
    "unlink": lambda place, name: place.unlink(name),
    "rmdir": lambda place, name: place.rmdir(name),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_name_is_refused_by_every_call(scene: Scene, call: str, name: str) -> None:
    with scene.open() as place, scene.refuses(UnsafePath):
        CALLS[call](place, BAD_NAMES[name])
    assert os.listdir(scene.tier) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../tier", "/etc", "a\0b"])
def test_stat_looks_at_entries_only(scene: Scene, name: str) -> None:
    with scene.open() as place, scene.refuses(UnsafePath):
        place.stat(name)


# Symbolic and magic links


def test_root_that_is_a_symlink_is_refused(scene: Scene) -> None:
    (scene.base / "link").symlink_to(scene.outside)
    with scene.refuses(UnsafePath):
        AllowedRoots([str(scene.base / "link")]).open_directory(str(scene.base / "link"))


def test_symlink_above_the_root_is_refused(scene: Scene) -> None:
    (scene.base / "link").symlink_to(scene.base)
    path = str(scene.base / "link" / "allowed")
    with scene.refuses(UnsafePath):
        AllowedRoots([path]).open_directory(path)


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("target", ["outside", "outside/folder", "allowed/real", "nowhere", "allowed/tier"])
def test_tier_that_is_a_symlink_is_refused_wherever_it_leads(scene: Scene, target: str, create: bool) -> None:
    (scene.root / "real").mkdir()
    scene.tier.rmdir()
    scene.tier.symlink_to(scene.base / target)
    with scene.refuses(UnsafePath):
        scene.open(create=create)
    assert not (scene.base / "nowhere").exists()


def test_symlink_that_leads_nowhere_else_is_refused_too(scene: Scene) -> None:
    """Relative, beside its target: it does not leave the directory, and still is a name that somebody can turn."""
    (scene.root / "link").symlink_to("tier")
    (scene.tier / "real").mkdir()
    (scene.tier / "link").symlink_to("real")
    with scene.refuses(UnsafePath):
        scene.open(scene.root / "link")
    with scene.open() as place, scene.refuses(UnsafePath):
        place.child("link")


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_symlink_at_each_level_below_the_root_is_refused(scene: Scene, level: int, create: bool) -> None:
    names = ["a", "b", "c", "d"]
    at = scene.root
    for depth, name in enumerate(names):
        at /= name
        if depth == level:
            at.symlink_to(scene.outside)
            break
        at.mkdir()
    with scene.refuses(UnsafePath):
        scene.open(scene.root / "/".join(names), create=create)


def test_magic_links_of_proc_are_refused(scene: Scene) -> None:
    outside = os.open(scene.outside, os.O_PATH)
    try:
        for magic in (f"/proc/{os.getpid()}/fd/{outside}", f"/proc/{os.getpid()}/root{scene.outside}"):
            with scene.refuses(UnsafePath):
                AllowedRoots([magic]).open_directory(magic)
        with scene.refuses(UnsafePath):
            AllowedRoots(["/proc/self/root"]).open_directory(f"/proc/self/root{scene.outside}")
    finally:
        os.close(outside)


@pytest.mark.parametrize(
    "call", ["child", "mkdir", "create_file", "open_file", "read_file", "write_file_atomic", "rmdir"]
)
@pytest.mark.parametrize("target", ["outside/secret", "outside/folder", "outside/new", "allowed/tier/real"])
def test_name_that_is_a_symlink_is_never_followed(scene: Scene, call: str, target: str) -> None:
    (scene.tier / "name").symlink_to(scene.base / target)
    with scene.open() as place, scene.refuses(UnsafePath, ForeignData):
        CALLS[call](place, "name")
    assert (scene.tier / "name").is_symlink()
    assert not (scene.base / "outside/new").exists()


def test_unlink_of_a_symlink_takes_the_link_only(scene: Scene) -> None:
    (scene.tier / "name").symlink_to(scene.secret)
    before = scene.digest()
    with scene.open() as place:
        place.unlink("name")
    assert scene.digest() == before
    assert os.listdir(scene.tier) == []


# Things that are no directory or no regular file


def put(kind: str, at: Path) -> None:
    if kind == "FIFO":
        os.mkfifo(at)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(at.parent):
            listener.bind(at.name)
    elif kind == "character device":
        need_root()
        os.mknod(at, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    elif kind == "block device":
        need_root()
        os.mknod(at, stat.S_IFBLK | 0o666, os.makedev(7, 0))
    elif kind == "directory":
        at.mkdir()
        (at / "inside").write_bytes(b"another's")
    else:
        at.write_bytes(b"another's")


SPECIAL = ["FIFO", "socket", "character device", "block device"]


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("kind", [*SPECIAL, "file"])
def test_tier_that_is_no_directory_is_foreign(scene: Scene, kind: str, create: bool) -> None:
    scene.tier.rmdir()
    put(kind, scene.tier)
    with scene.refuses(ForeignData):
        scene.open(create=create)
    with scene.refuses(UnsafePath):
        scene.open(scene.tier / "below", create=create)


@pytest.mark.parametrize("call", ["open_file", "read_file", "write_file_atomic", "mkdir", "create_file"])
@pytest.mark.parametrize("kind", [*SPECIAL, "directory"])
def test_special_file_is_foreign_and_nothing_blocks_on_it(scene: Scene, kind: str, call: str) -> None:
    put(kind, scene.tier / "name")
    before = (scene.tier / "name").lstat()
    with scene.open() as place, scene.refuses(ForeignData):
        CALLS[call](place, "name")
    after = (scene.tier / "name").lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    assert os.listdir(scene.tier) == ["name"], "no temporary file is left"


@pytest.mark.parametrize("kind", [*SPECIAL, "file"])
def test_child_that_is_no_directory_is_refused(scene: Scene, kind: str) -> None:
    put(kind, scene.tier / "name")
    with scene.open() as place, scene.refuses(UnsafePath):
        place.child("name")


def test_existing_file_is_never_adopted(scene: Scene) -> None:
    put("file", scene.tier / "name")
    with scene.open() as place:
        for call in ("create_file", "mkdir"):
            with scene.refuses(ForeignData):
                CALLS[call](place, "name")
    assert (scene.tier / "name").read_bytes() == b"another's"


def test_truncation_does_not_reach_a_refused_file(scene: Scene) -> None:
    os.link(scene.secret, scene.tier / "name")
    with scene.open() as place, scene.refuses(UnsafePath):
        place.open_file("name", os.O_RDWR | os.O_TRUNC)


# Hard links


@pytest.mark.parametrize("call", ["open_file", "read_file", "write_file_atomic", "create_file"])
def test_hard_link_to_a_file_outside_is_refused(scene: Scene, call: str) -> None:
    os.link(scene.secret, scene.tier / "name")
    with scene.open() as place, scene.refuses(UnsafePath, ForeignData):
        CALLS[call](place, "name")
    assert (scene.tier / "name").stat().st_ino == scene.secret.stat().st_ino


def test_removing_a_tree_removes_names_of_hard_links_and_not_what_they_name(scene: Scene) -> None:
    os.link(scene.secret, scene.tier / "name")
    before = scene.digest()
    with scene.open() as place:
        place.remove_tree_contents()
    assert scene.digest() == before


# Who could change it


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777, 0o2775])
@pytest.mark.parametrize("where", ["root", "tier"])
def test_directory_that_others_may_write_to_is_refused_from_the_root_down(scene: Scene, where: str, mode: int) -> None:
    os.chmod(getattr(scene, where), mode)
    with scene.refuses(UnsafePath):
        scene.open()


def test_ancestor_that_others_may_write_to_is_refused_unless_sticky(scene: Scene) -> None:
    os.chmod(scene.base, 0o777)
    with scene.refuses(UnsafePath):
        scene.open()
    os.chmod(scene.base, 0o1777)
    scene.open().close()


def test_access_list_that_lets_another_write_is_refused(scene: Scene) -> None:
    entries = [(0x01, 7, -1), (0x02, 7, NOBODY), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1)]  # linux/posix_acl_xattr.h
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(scene.tier, "system.posix_acl_access", acl)
    with scene.refuses(UnsafePath):
        scene.open()


@pytest.mark.root
@pytest.mark.parametrize("where", ["base", "root", "tier"])
def test_directory_of_another_user_is_refused_at_every_level(scene: Scene, where: str) -> None:
    need_root()
    os.chown(getattr(scene, where), NOBODY, NOBODY)
    with scene.refuses(UnsafePath):
        scene.open()


@pytest.mark.root
def test_directory_that_another_made_first_is_not_adopted(scene: Scene) -> None:
    need_root()
    (scene.root / "new").mkdir()
    os.chown(scene.root / "new", NOBODY, NOBODY)
    with scene.refuses(UnsafePath):
        scene.open(scene.root / "new" / "deeper", create=True)
    assert os.listdir(scene.root / "new") == []


@pytest.mark.root
@pytest.mark.parametrize("call", ["open_file", "read_file", "write_file_atomic", "child"])
def test_entry_of_another_user_is_refused(scene: Scene, call: str) -> None:
    need_root()
    put("directory" if call == "child" else "file", scene.tier / "name")
    os.chown(scene.tier / "name", NOBODY, NOBODY)
    with scene.open() as place, scene.refuses(UnsafePath):
        CALLS[call](place, "name")


def test_child_that_others_may_write_to_is_refused(scene: Scene) -> None:
    (scene.tier / "name").mkdir()
    os.chmod(scene.tier / "name", 0o770)
    with scene.open() as place, scene.refuses(UnsafePath):
        place.child("name")


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_umask_decides_nothing(scene: Scene, umask: int) -> None:
    if os.geteuid() != 0 and umask:
        pytest.skip("an ordinary user cannot enter a directory of mode 0 in between")
    before = os.umask(umask)
    try:
        with scene.open() as place, place.mkdir("folder", 0o711) as folder:
            os.close(folder.create_file("file", 0o640))
            folder.write_file_atomic("data", b"x", 0o444)
            scene.open(scene.root / "made", create=True).close()
    finally:
        os.umask(before)
    modes = {
        name: stat.S_IMODE((scene.tier / name).stat().st_mode) for name in ("folder", "folder/file", "folder/data")
    }
    assert modes == {"folder": 0o711, "folder/file": 0o640, "folder/data": 0o444}
    assert stat.S_IMODE((scene.root / "made").stat().st_mode) == 0o755


# Mounts


@pytest.mark.root
def test_bind_mount_over_the_tier_is_refused(scene: Scene, private_mounts: None) -> None:
    bind(scene.outside, scene.tier)
    with scene.refuses(UnsafePath):
        scene.open()
    with scene.refuses(UnsafePath):
        scene.open(scene.tier / "folder" / "new", create=True)


@pytest.mark.root
def test_another_file_system_over_the_tier_is_refused(scene: Scene, private_mounts: None) -> None:
    tmpfs(scene.tier)
    with scene.refuses(UnsafePath):
        scene.open()


@pytest.mark.root
def test_mount_that_is_the_root_itself_is_the_administrators_choice(scene: Scene, private_mounts: None) -> None:
    tmpfs(scene.root)
    with scene.open(create=True) as place:
        place.write_file_atomic("name", b"x")


@pytest.mark.root
def test_mount_of_another_user_over_the_root_is_refused(scene: Scene, private_mounts: None) -> None:
    tmpfs(scene.root, f"mode=755,uid={NOBODY}")
    with scene.refuses(UnsafePath):
        scene.open(create=True)


@pytest.mark.root
@pytest.mark.parametrize("same_file_system", [True, False])
def test_mount_inside_is_refused_unless_asked_for(scene: Scene, private_mounts: None, same_file_system: bool) -> None:
    (scene.tier / "mnt").mkdir()
    if same_file_system:
        bind(scene.outside, scene.tier / "mnt")
    else:
        tmpfs(scene.tier / "mnt")
    with scene.open() as place:
        with scene.refuses(UnsafePath):
            place.child("mnt")
        with place.child("mnt", same_device=False) as inner:
            assert inner.is_mount_point()


@pytest.mark.root
@pytest.mark.parametrize("call", ["open_file", "read_file", "write_file_atomic", "create_file"])
def test_file_mounted_over_a_file_is_refused(scene: Scene, private_mounts: None, call: str) -> None:
    (scene.tier / "name").write_bytes(b"")
    bind(scene.secret, scene.tier / "name")
    with scene.open() as place, scene.refuses(UnsafePath, ForeignData):
        CALLS[call](place, "name")


@pytest.mark.root
@pytest.mark.parametrize("source", ["bind", "tmpfs", "file"])
def test_tree_with_a_mount_deep_inside_is_not_removed_at_all(scene: Scene, private_mounts: None, source: str) -> None:
    deep = scene.tier / "b" / "c"
    deep.mkdir(parents=True)
    (scene.tier / "a").write_bytes(b"first in order")
    (deep / "file").write_bytes(b"")
    if source == "file":
        bind(scene.secret, deep / "file")
    elif source == "tmpfs":
        tmpfs(deep)
    else:
        bind(scene.outside, deep)
    with scene.open() as place, scene.refuses(UnsafePath):
        place.remove_tree_contents()
    assert (scene.tier / "a").exists()


@pytest.mark.root
@pytest.mark.parametrize("call", ["mkdir", "create_file", "write_file_atomic"])
def test_read_only_file_system_is_named(scene: Scene, private_mounts: None, call: str) -> None:
    tmpfs(scene.root, "mode=755")
    scene.open(create=True).close()
    libc.mount(None, str(scene.root), None, c.MS_REMOUNT | c.MS_RDONLY, None)
    with scene.open() as place, scene.refuses(NotPermitted):
        CALLS[call](place, "name")
    with pytest.raises(NotPermitted, match="read-only"):
        scene.open(scene.root / "new", create=True)


@pytest.mark.root
def test_full_file_system_leaves_the_old_content_and_no_temporary_file(scene: Scene, private_mounts: None) -> None:
    tmpfs(scene.root, "mode=755,size=64k")
    with scene.open(create=True) as place:
        place.write_file_atomic("name", b"old")
        with scene.refuses(InsufficientSpace):
            place.write_file_atomic("name", bytes(2**20))
        assert place.read_file("name", 100) == b"old"
        assert place.names() == ["name"]


@pytest.mark.root
@pytest.mark.parametrize("call", ["mkdir", "create_file", "write_file_atomic"])
def test_file_system_without_inodes_is_insufficient_space(scene: Scene, private_mounts: None, call: str) -> None:
    tmpfs(scene.root, "mode=755,nr_inodes=2")
    with scene.open(create=True) as place, scene.refuses(InsufficientSpace):
        CALLS[call](place, "name")


@pytest.mark.root
def test_busy_directory_is_not_removed(scene: Scene, private_mounts: None) -> None:
    (scene.tier / "mnt").mkdir()
    tmpfs(scene.tier / "mnt")
    with scene.open() as place, scene.refuses(Busy):
        place.rmdir("mnt")


# The immutable bit


@pytest.fixture
def immutable() -> Iterator[Callable[[Path], None]]:
    need_root()
    held: list[int] = []

    def make(path: Path) -> None:
        fd = os.open(path, os.O_RDONLY)
        held.append(fd)
        files.set_immutable(fd, True)

    try:
        yield make
    finally:
        for fd in held:
            files.set_immutable(fd, False)
            os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("call", ["mkdir", "create_file", "write_file_atomic", "unlink"])
def test_immutable_directory_is_refused(scene: Scene, immutable: Callable[[Path], None], call: str) -> None:
    if call == "unlink":
        (scene.tier / "name").write_bytes(b"")
    immutable(scene.tier)
    with scene.open() as place, scene.refuses(NotPermitted):
        CALLS[call](place, "name")


@pytest.mark.root
def test_immutable_file_is_neither_replaced_nor_removed(scene: Scene, immutable: Callable[[Path], None]) -> None:
    (scene.tier / "name").write_bytes(b"kept")
    immutable(scene.tier / "name")
    with scene.open() as place:
        for call in ("write_file_atomic", "unlink"):
            with scene.refuses(NotPermitted):
                CALLS[call](place, "name")
        with scene.refuses(NotPermitted):
            place.remove_tree_contents()
        assert place.names() == ["name"]


# What is gone


def test_directory_that_was_deleted_takes_nothing_new(scene: Scene) -> None:
    with scene.open() as place:
        scene.tier.rmdir()
        for call in ("mkdir", "create_file", "write_file_atomic", "child"):
            with scene.refuses(NotFound):
                CALLS[call](place, "name")
    with scene.refuses(NotFound):
        scene.open()


def test_directory_that_was_moved_away_stays_the_one_that_was_opened(scene: Scene) -> None:
    with scene.open() as place:
        scene.tier.rename(scene.root / "moved")
        scene.tier.symlink_to(scene.outside)
        before = scene.digest()
        place.write_file_atomic("name", b"ours")
        assert scene.digest() == before
    assert (scene.root / "moved" / "name").read_bytes() == b"ours"


def test_closed_directory_reaches_no_other_descriptor(scene: Scene) -> None:
    place = scene.open()
    place.close()
    place.close()
    with scene.refuses(KernelError):
        place.create_file("name")


def test_tree_that_is_deeper_than_ours_is_not_removed_at_all(scene: Scene) -> None:
    (scene.tier / "a").write_bytes(b"")
    scene.tier.joinpath(*["d"] * 40).mkdir(parents=True)
    with scene.open() as place, scene.refuses(UnsafePath):
        place.remove_tree_contents()
    assert (scene.tier / "a").exists()


def test_tree_with_hostile_names_and_links_is_removed_without_following(scene: Scene) -> None:
    inner = scene.tier / "folder"
    inner.mkdir()
    for name in ("new\nline", "-rf", "\udcff", "n" * 255, " "):
        (inner / name).write_bytes(b"x")
    (inner / "to file").symlink_to(scene.secret)
    (inner / "to folder").symlink_to(scene.outside)
    (inner / "to itself").symlink_to(inner)
    os.mkfifo(inner / "fifo")
    before = scene.digest()
    with scene.open() as place:
        assert place.remove_tree_contents(keep=()) == 10
        assert place.names() == []
    assert scene.digest() == before


def test_longer_file_than_ours_is_foreign(scene: Scene) -> None:
    (scene.tier / "name").write_bytes(bytes(11))
    with scene.open() as place:
        with scene.refuses(ForeignData):
            place.read_file("name", 10)
        assert place.read_file("name", 11) == bytes(11)


# Races: another process exchanges two names as fast as it can, while we work

SWAPPER = """
import ctypes, os, sys
first, second = (os.fsencode(name) for name in sys.argv[1:])
rename = ctypes.CDLL(None, use_errno=True).renameat2
print("swapping", flush=True)
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100):
        rename(-100, first, -100, second, 2)
"""


@pytest.fixture
def swapping() -> Iterator[Callable[[Path, Path], None]]:
    """Exchange two paths (RENAME_EXCHANGE) without pause, from other processes, until the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(first: Path, second: Path) -> None:
        argv = [sys.executable, "-I", "-S", "-c", SWAPPER, str(first), str(second)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        assert process.stdout.readline() == "swapping\n"

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def tried(attempt: Callable[[], object], *refusals: type[KvtierError], times: int = 20_000) -> tuple[int, int]:
    """(successes, refusals) of `attempt`; stops early once both were seen 50 times."""
    done = refused = 0
    for _ in range(times):
        try:
            attempt()
            done += 1
        except refusals:
            refused += 1
        if min(done, refused) >= 50:
            break
    return done, refused


def test_symlink_swapped_with_the_tier_between_check_and_use_leads_nowhere(
    scene: Scene, swapping: Callable[[Path, Path], None]
) -> None:
    (scene.root / "trap").symlink_to(scene.outside)
    before = scene.digest()
    swapping(scene.tier, scene.root / "trap")

    def attempt() -> None:
        with scene.open(create=True) as place:
            place.write_file_atomic("name", b"ours")
            os.close(place.create_file("once"))
            place.remove_tree_contents()

    assert all(tried(attempt, UnsafePath)), "the race was not run on both sides"
    assert scene.digest() == before


def test_symlink_swapped_with_an_inner_directory_leads_nowhere(
    scene: Scene, swapping: Callable[[Path, Path], None]
) -> None:
    (scene.root / "a" / "b").mkdir(parents=True)
    (scene.root / "trap").symlink_to(scene.outside)
    (scene.outside / "b").mkdir()
    before = scene.digest()
    swapping(scene.root / "a", scene.root / "trap")

    def attempt() -> None:
        with scene.open(scene.root / "a" / "b" / "c", create=True) as place:
            place.write_file_atomic("name", b"ours")

    assert all(tried(attempt, UnsafePath))
    assert scene.digest() == before


@pytest.mark.parametrize("trap", ["FIFO", "hard link", "symlink", "socket"])
def test_file_swapped_between_check_and_open_is_never_opened(
    scene: Scene, swapping: Callable[[Path, Path], None], trap: str
) -> None:
    (scene.tier / "name").write_bytes(b"ours")
    if trap == "hard link":
        os.link(scene.secret, scene.root / "trap")
    elif trap == "symlink":
        (scene.root / "trap").symlink_to(scene.secret)
    else:
        put(trap, scene.root / "trap")
    before = scene.digest()
    swapping(scene.tier / "name", scene.root / "trap")
    with scene.open() as place:

        def attempt() -> None:
            fd = place.open_file("name", os.O_RDWR)
            try:
                assert os.read(fd, 100) == b"ours"
                os.pwrite(fd, b"ours", 0)
            finally:
                os.close(fd)

        assert all(tried(attempt, UnsafePath, ForeignData))
    assert scene.digest() == before


def test_directory_swapped_with_a_symlink_while_the_tree_is_removed_leads_nowhere(
    scene: Scene, swapping: Callable[[Path, Path], None]
) -> None:
    inner = scene.tier / "inner"
    inner.mkdir()
    (scene.base / "trap").symlink_to(scene.outside)
    before = scene.digest()
    swapping(inner, scene.base / "trap")
    stop = threading.Event()

    def refill() -> None:
        while not stop.is_set():
            for at in (inner, scene.base / "trap"):
                with contextlib.suppress(OSError):
                    at.mkdir()
            fd = -1
            with contextlib.suppress(OSError):
                fd = os.open(inner, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY)
                os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            if fd >= 0:
                os.close(fd)

    filler = threading.Thread(target=refill)
    filler.start()
    try:
        with scene.open() as place:
            for _ in range(300):
                with contextlib.suppress(KvtierError):
                    place.remove_tree_contents()
    finally:
        stop.set()
        filler.join()
    assert scene.digest() == before


@pytest.mark.root
def test_mount_that_comes_and_goes_while_we_open_is_never_entered(scene: Scene, private_mounts: None) -> None:
    stop = threading.Event()
    seen = {"mounted": 0}
    before = scene.digest()

    def flicker() -> None:
        while not stop.is_set():
            bind(scene.outside, scene.tier)
            seen["mounted"] += 1
            libc.umount2(str(scene.tier), c.MNT_DETACH)

    mounter = threading.Thread(target=flicker)
    mounter.start()
    try:

        def attempt() -> None:
            with scene.open() as place:
                place.write_file_atomic("name", b"ours")

        tried(attempt, UnsafePath, times=1500)
    finally:
        stop.set()
        mounter.join()
    assert seen["mounted"]
    assert scene.digest() == before


def test_refusal_closes_every_descriptor(scene: Scene) -> None:
    (scene.tier / "link").symlink_to(scene.outside)
    os.link(scene.secret, scene.tier / "hard")
    (scene.root / "open").mkdir(mode=0o777)
    os.chmod(scene.root / "open", 0o777)
    with scene.open() as place:
        before = open_descriptors()
        for attempt in (
            lambda: place.open_file("link"),
            lambda: place.open_file("hard"),
            lambda: place.child("link"),
            lambda: place.write_file_atomic("hard", b""),
            lambda: scene.open(scene.root / "open"),
            lambda: scene.open(scene.tier / "link" / "x", create=True),
            lambda: scene.open(scene.root / "none"),
        ):
            with pytest.raises(KvtierError):
                attempt()
        assert open_descriptors() == before


def test_the_hash_of_the_outside_sees_a_change(scene: Scene) -> None:
    before = scene.digest()
    scene.secret.write_bytes(b"changed")
    assert scene.digest() != before
