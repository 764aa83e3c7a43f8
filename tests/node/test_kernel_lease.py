"""The lease answers exactly: every way to hold a file counts, and no probe can end the prober."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import Busy, KernelError, NotPermitted
from kvtier_node.kernel import lease
from requirements import need_root, need_tool

HOLDER = """
import mmap, os, sys
path, how = sys.argv[1:]
flags = {"read": os.O_RDONLY, "path": os.O_PATH}.get(how, os.O_RDWR)
fd = os.open(path, flags)
if how in ("shared", "private"):
    held = mmap.mmap(fd, 4096, mmap.MAP_SHARED if how == "shared" else mmap.MAP_PRIVATE)
    os.close(fd)
elif how == "orphan":
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    os.close(fd)
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "slot.rank_0"
    file.write_bytes(bytes(8192))
    return file


@pytest.fixture
def own(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def holder(path: Path, how: str, prefix: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], int]]:
    argv = [*prefix, sys.executable, "-I", "-S", "-c", HOLDER, str(path), how]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def eventually_free(fd: int) -> bool:
    for _ in range(6000):
        if lease.sole_holder(fd):
            return True
        threading.Event().wait(0.01)
    return False


def test_alone_is_alone_again_and_again(own: int) -> None:
    assert all(lease.sole_holder(own) for _ in range(100))


def test_probe_keeps_nobody_out(path: Path, own: int) -> None:
    assert lease.sole_holder(own)
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("how", ["read", "write", "shared", "private"])
def test_another_process_that_holds_it_in_any_way_is_seen_until_it_ends(path: Path, own: int, how: str) -> None:
    with holder(path, how) as (process, _):
        assert not lease.sole_holder(own)
        process.kill()
        process.wait()
        assert eventually_free(own)


def test_forked_child_that_inherited_it_counts_after_its_parent_is_gone(path: Path, own: int) -> None:
    with holder(path, "orphan") as (process, child):
        process.wait()
        assert not lease.sole_holder(own)
        os.kill(child, signal.SIGKILL)
        assert eventually_free(own)


@pytest.mark.root
def test_holder_behind_a_bind_mount_in_other_mount_and_pid_namespaces_is_seen(
    path: Path, own: int, tmp_path: Path
) -> None:
    need_root()
    unshare = need_tool("unshare")
    (tmp_path / "elsewhere").mkdir()
    script = 'mount --bind "$0" "$1" && exec "$2" -I -S -c "$3" "$1/slot.rank_0" write'
    argv = [
        unshare,
        "-m",
        "-p",
        "-f",
        "--kill-child",
        "sh",
        "-c",
        script,
        str(tmp_path),
        str(tmp_path / "elsewhere"),
        sys.executable,
        HOLDER,
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline()
        assert not lease.sole_holder(own)
        process.kill()
        process.wait()
        assert eventually_free(own)


def test_second_description_in_this_process_is_seen(path: Path, own: int) -> None:
    other = os.open(path, os.O_RDONLY)
    assert not lease.sole_holder(own)
    os.close(other)
    assert lease.sole_holder(own)


def test_mapping_of_this_process_is_seen_after_its_descriptor_was_closed(path: Path, own: int) -> None:
    other = os.open(path, os.O_RDWR)
    mapping = mmap.mmap(other, 4096)
    os.close(other)
    assert not lease.sole_holder(own)
    mapping.close()
    assert lease.sole_holder(own)


def test_unlinked_file_can_still_be_asked_for(path: Path, own: int) -> None:
    path.unlink()
    assert lease.sole_holder(own)


def test_descriptor_that_cannot_read_does_not_count(path: Path, own: int) -> None:
    with holder(path, "path"):
        assert lease.sole_holder(own)


def test_probing_while_others_open_it_never_ends_the_prober(path: Path) -> None:
    """The break signal of a lease, SIGIO, ends a process by default; a probe races with opens by its nature."""
    opener = "import os, sys\nwhile True:\n    os.close(os.open(sys.argv[1], os.O_RDONLY))\n"
    prober = (
        "import os, sys, time\n"
        "from kvtier_node.kernel import lease\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "seen, until = set(), time.monotonic() + 120\n"
        "while len(seen) < 2 and time.monotonic() < until:\n"  # the other may not have its turn for a while
        "    seen |= {lease.sole_holder(fd) for _ in range(20000)}\n"
        "print(sorted(seen))\n"
    )
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", opener, str(path)]) as noise:
        try:
            done = subprocess.run([sys.executable, "-c", prober, str(path)], capture_output=True, text=True)
        finally:
            noise.kill()
    assert done.returncode == 0, done
    assert done.stdout == "[False, True]\n"


def test_held_lease_keeps_others_out_and_lets_them_in_afterwards(path: Path, own: int) -> None:
    with lease.hold(own):
        assert not lease.wanted_by_another(own)
        with pytest.raises(BlockingIOError):
            os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        assert lease.wanted_by_another(own)
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    with lease.hold(own):
        opened = threading.Event()

        def open_it() -> None:
            os.close(os.open(path, os.O_RDONLY))
            opened.set()

        waiter = threading.Thread(target=open_it)
        waiter.start()
        while not lease.wanted_by_another(own):
            pass
        assert not opened.is_set()
    waiter.join(30)
    assert opened.is_set()


def test_lease_cannot_be_held_while_another_has_the_file(path: Path, own: int) -> None:
    with holder(path, "read"), pytest.raises(Busy), lease.hold(own):
        pass
    assert eventually_free(own)


def test_what_cannot_be_leased_is_an_error_and_not_an_answer(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(KernelError):
            lease.sole_holder(fd)
    finally:
        os.close(fd)


@pytest.mark.root
def test_another_users_file_needs_the_capability(path: Path) -> None:
    need_root()
    os.chmod(path, 0o666)
    fd = os.open(path, os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setresuid(65534, 65534, 65534)
            lease.sole_holder(fd)
        except NotPermitted:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(fd)
