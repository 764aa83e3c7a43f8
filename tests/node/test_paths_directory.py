"""What the path functions do when nobody is in the way, for root and for an ordinary user."""

from __future__ import annotations

import os
import stat
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import ForeignData, KvtierError, NotFound, NotPermitted, UnsafePath
from kvtier_node.paths import AllowedRoots, Directory
from requirements import need_root

NOBODY = 65534


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Directory]:
    with AllowedRoots([str(tmp_path)]).open_directory(str(tmp_path / "tier"), create=True) as directory:
        yield directory


def as_nobody(work: Callable[[], None]) -> None:
    """Run `work` in a forked child as uid 65534 without groups; fail with its traceback."""
    need_root()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
        except BaseException:
            os.write(writer, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as report:
        told = report.read()
    os.waitpid(pid, 0)
    assert not told, told


def test_create_makes_what_is_missing_from_the_root_down(tmp_path: Path) -> None:
    root = tmp_path / "root"
    roots = AllowedRoots([str(root)])
    with pytest.raises(NotFound):
        roots.open_directory(str(root))
    with roots.open_directory(str(root / "a" / "b"), create=True, mode=0o711) as made:
        assert made.path == str(root / "a" / "b")
    for path in (root, root / "a", root / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o711
    with roots.open_directory(str(root / "a"), create=True) as again:
        assert again.names() == ["b"]
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o711, "what exists keeps its mode"


def test_nothing_above_the_root_is_made(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "root")
    with pytest.raises(NotFound):
        AllowedRoots([path]).open_directory(path, create=True)
    assert not (tmp_path / "missing").exists()


def test_the_innermost_of_nested_roots_decides(tmp_path: Path) -> None:
    inner = tmp_path / "shared" / "inner"
    inner.mkdir(parents=True)
    os.chmod(tmp_path / "shared", 0o1777)
    with pytest.raises(UnsafePath):
        AllowedRoots([str(tmp_path)]).open_directory(str(inner))
    AllowedRoots([str(tmp_path), str(inner)]).open_directory(str(inner)).close()


def test_file_is_made_once_and_read_back(place: Directory) -> None:
    fd = place.create_file("slot.rank_0", 0o600)
    os.write(fd, b"bytes")
    os.close(fd)
    assert place.read_file("slot.rank_0", 100) == b"bytes"
    found = place.stat("slot.rank_0")
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
    with pytest.raises(ForeignData):
        place.create_file("slot.rank_0")


def test_flags_of_the_caller_are_used(place: Directory) -> None:
    os.close(place.create_file("file", flags=os.O_WRONLY))
    fd = place.open_file("file", os.O_RDWR | os.O_APPEND)
    try:
        assert os.get_inheritable(fd) is False
        os.write(fd, b"one")
        os.pwrite(fd, b"two", 0)
        assert os.pread(fd, 10, 0) == b"onetwo"
    finally:
        os.close(fd)
    os.close(place.open_file("file", os.O_RDWR | os.O_TRUNC))
    assert place.stat("file").st_size == 0


def test_opening_never_creates(place: Directory) -> None:
    with pytest.raises(NotFound):
        place.open_file("file", os.O_RDWR | os.O_CREAT)
    assert place.names() == []


def test_replacing_is_atomic_and_leaves_one_name(place: Directory) -> None:
    place.write_file_atomic("place.json", b"old", 0o444)
    held = place.open_file("place.json")
    place.write_file_atomic("place.json", b"new", 0o400)
    assert os.read(held, 10) == b"old"
    os.close(held)
    assert place.read_file("place.json", 10) == b"new"
    assert stat.S_IMODE(place.stat("place.json").st_mode) == 0o400
    assert place.names() == ["place.json"]


def test_longest_name_can_be_replaced_too(place: Directory) -> None:
    place.write_file_atomic("n" * 255, b"x")
    place.write_file_atomic("é" * 127, b"x")
    assert len(place.names()) == 2


def test_directories_nest_and_go(place: Directory) -> None:
    with place.mkdir("mnt", 0o700) as mnt:
        assert mnt.path == f"{place.path}/mnt"
        mnt.mkdir("slots", 0o711).close()
        with pytest.raises(ForeignData):
            place.rmdir("mnt")
        assert not mnt.is_mount_point()
        mnt.chmod(0o711)
        mnt.fsync()
    with pytest.raises(ForeignData):
        place.mkdir("mnt")
    with place.child("mnt") as mnt:
        assert stat.S_IMODE(os.fstat(mnt.fd).st_mode) == 0o711
        mnt.rmdir("slots")
    place.rmdir("mnt")
    for attempt in (lambda: place.child("mnt"), lambda: place.rmdir("mnt"), lambda: place.unlink("mnt")):
        with pytest.raises(NotFound):
            attempt()
    assert place.names() == []


def test_descriptor_path_leads_to_the_directory(place: Directory) -> None:
    place.mkdir("mnt").close()
    assert os.listdir(place.fd_path()) == ["mnt"]


def test_removing_contents_keeps_what_is_named(place: Directory) -> None:
    with place.mkdir("folder") as folder:
        os.close(folder.create_file("file"))
        os.close(folder.create_file("place.json"))
    place.write_file_atomic("place.json", b"kept")
    assert place.remove_tree_contents(keep=["place.json"]) == 3
    assert place.names() == ["place.json"]


@pytest.mark.root
def test_consumers_file_and_directory_open_for_its_uid_only(place: Directory) -> None:
    need_root()
    with place.mkdir("slots", 0o700) as slots:
        fd = slots.create_file("slot")
        os.fchown(fd, NOBODY, NOBODY)
        os.close(fd)
        slots.chown(NOBODY, NOBODY)
    with pytest.raises(UnsafePath, match=str(NOBODY)):
        place.child("slots")
    with pytest.raises(UnsafePath):
        place.child("slots", owner_uid=NOBODY - 1)
    with place.child("slots", owner_uid=NOBODY) as slots:
        with pytest.raises(UnsafePath):
            slots.open_file("slot")
        os.close(slots.open_file("slot", owner_uid=NOBODY))
        os.close(slots.open_file("slot", any_owner=True))


@pytest.mark.root
def test_consumer_cannot_keep_its_directory_from_being_erased(place: Directory) -> None:
    need_root()
    with place.mkdir("slots", 0o700) as slots:
        os.close(slots.create_file("slot"))
        slots.chown(NOBODY, NOBODY)
        slots.chmod(0o777)
    with pytest.raises(UnsafePath):
        place.child("slots", owner_uid=NOBODY)
    with place.child("slots", any_owner=True) as slots:
        assert slots.remove_tree_contents() == 1


@pytest.mark.root
def test_ordinary_user_works_in_directories_of_its_own() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as base:
        os.chown(base, NOBODY, NOBODY)

        def work() -> None:
            with AllowedRoots([base]).open_directory(f"{base}/tier", create=True) as tier:
                tier.write_file_atomic("name", b"x")
                with tier.mkdir("inner") as inner:
                    os.close(inner.create_file("file"))
                assert tier.remove_tree_contents() == 3

        as_nobody(work)


@pytest.mark.root
def test_ordinary_user_is_told_what_roots_directories_refuse() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        Path(base, "tier").mkdir(mode=0o755)
        Path(base, "closed").mkdir(mode=0o700)

        def work() -> None:
            roots = AllowedRoots([base])
            with roots.open_directory(f"{base}/tier") as tier:
                for attempt in (lambda: tier.create_file("x"), lambda: tier.mkdir("x"), lambda: tier.chmod(0o777)):
                    try:
                        attempt()
                    except NotPermitted:
                        continue
                    raise AssertionError(attempt)
            try:
                roots.open_directory(f"{base}/closed")
            except KvtierError as error:
                assert isinstance(error, NotPermitted)
            else:
                raise AssertionError("opened")

        as_nobody(work)
        assert os.listdir(f"{base}/tier") == []
