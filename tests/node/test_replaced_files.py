"""Another process replaces or removes what is looked at, between any two looks: it is there anew, or gone, and never suspicious."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import Busy, NotFound
from kvtier_api.tier import KVCacheTier
from kvtier_node.kernel import libc
from kvtier_node.paths import AllowedRoots, Directory
from kvtier_node.state_dir import StateDirectory
from kvtier_node.status_files import StatusFiles

NAME = "file"


def replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"new")
    new.chmod(0o600)
    new.rename(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir(mode=0o700)
    path = tmp_path / "there" / NAME
    path.write_bytes(b"old")
    path.chmod(0o600)
    return path


@pytest.fixture
def after_open(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Callable[[Path], None], int], None]:
    """Do something to a file right after its first opens."""

    def arm(path: Path, work: Callable[[Path], None], times: int = 1) -> None:
        left = iter(range(times))

        def opened(name: object) -> None:
            if name == path.name and next(left, None) is not None:
                work(path)

        plain, below = os.open, libc.openat2

        def plain_open(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            fd = plain(name, flags, mode, dir_fd=dir_fd)
            opened(name)
            return fd

        def below_open(at: int, name: str, flags: int, mode: int, resolve: int) -> int:
            fd = below(at, name, flags, mode, resolve)
            opened(name)
            return fd

        monkeypatch.setattr(os, "open", plain_open)
        monkeypatch.setattr(libc, "openat2", below_open)

    return arm


@pytest.fixture
def directory(file: Path) -> Iterator[Directory]:
    with AllowedRoots([str(file.parent)]).open_directory(str(file.parent)) as found:
        yield found


@pytest.fixture
def state(file: Path) -> Iterator[StateDirectory]:
    found = StateDirectory.open(str(file.parent))
    yield found
    found.close()


Arm = Callable[..., None]


def test_a_file_that_is_replaced_while_it_is_opened_is_read_as_it_is_now(
    file: Path, directory: Directory, after_open: Arm
) -> None:
    after_open(file, replace)
    assert directory.read_file(NAME, 10) == b"new"


def test_a_file_that_is_removed_while_it_is_opened_is_not_there(
    file: Path, directory: Directory, after_open: Arm
) -> None:
    after_open(file, Path.unlink)
    with pytest.raises(NotFound):
        directory.read_file(NAME, 10)


def test_a_file_that_somebody_goes_on_replacing_is_busy(file: Path, directory: Directory, after_open: Arm) -> None:
    after_open(file, replace, times=1000)
    with pytest.raises(Busy, match="100 times"):
        directory.read_file(NAME, 10)


def test_a_private_file_that_is_replaced_while_it_is_opened_is_opened_as_it_is_now(
    file: Path, state: StateDirectory, after_open: Arm
) -> None:
    after_open(file, replace)
    with os.fdopen(state.open_file(NAME, os.O_RDONLY), "rb") as found:
        assert found.read() == b"new"


def test_a_private_file_that_is_removed_while_it_is_made_is_made_again(
    file: Path, state: StateDirectory, after_open: Arm
) -> None:
    after_open(file, Path.unlink)
    os.close(state.open_file(NAME, os.O_WRONLY | os.O_CREAT))
    assert file.read_bytes() == b""


@pytest.mark.parametrize("work", [replace, Path.unlink], ids=["replaced", "removed"])
def test_a_private_file_that_is_replaced_while_it_is_looked_at(
    file: Path, state: StateDirectory, monkeypatch: pytest.MonkeyPatch, work: Callable[[Path], None]
) -> None:
    """The kernel finds the inode by its name, and then reads it out: in between the name can go."""
    plain = os.stat

    def slow(name: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if name != NAME:
            return plain(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        monkeypatch.setattr(os, "stat", plain)
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=dir_fd)
        work(file)
        found = os.fstat(fd)
        os.close(fd)
        return found

    monkeypatch.setattr(os, "stat", slow)
    found = state.file_status(NAME)
    assert (found is not None and found.st_size) == (work is replace and 3)


@pytest.mark.parametrize("work", [replace, Path.unlink], ids=["replaced", "removed"])
def test_a_tier_whose_status_is_written_while_it_is_read_is_not_unreadable(
    tmp_path: Path, after_open: Arm, work: Callable[[Path], None]
) -> None:
    """`kvtier status` and `erase` look for tiers there, and so does the fence between paths of tiers."""
    files = StatusFiles(str(tmp_path))
    for name in ("a", "b"):
        files.write(
            KVCacheTier.model_validate(
                {
                    "metadata": {"name": name},
                    "spec": {
                        "path": f"/var/lib/kvtier/tiers/{name}",
                        "sizePerRank": "1Mi",
                        "ranks": 1,
                        "governance": {"owner": "me", "purpose": "test"},
                    },
                }
            )
        )
    path = Path(files.path_of("default/b"))
    content = path.read_bytes()

    def write_anew(path: Path) -> None:
        replace(path)
        path.write_bytes(content)

    after_open(path, write_anew if work is replace else work)
    found, unreadable = files.load()
    assert (sorted(found), unreadable) == (["default/a", "default/b"] if work is replace else ["default/a"], [])
