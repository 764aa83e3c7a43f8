"""The gate before a pod's files, by itself: who goes through, who waits, and who is refused."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from csi_agent import Kubelet, Pod, waits_in_open
from kvtier_node.kernel import libc
from kvtier_node.kernel.processes import PidFd
from kvtier_node.pods.gate import Gate
from kvtier_node.pods.members import PodMembers
from leftovers import open_descriptors

pytestmark = pytest.mark.root

UID = "0000aaaa-0000-4000-8000-000000000000"
OPENER = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
os.execvp("unshare", ["unshare", "-m", "--propagation", "private", sys.executable, "-c", '''
import sys
try:
    with open(sys.argv[1], "rb") as file:
        print(len(file.read(4)), flush=True)
except PermissionError as error:
    print(f"refused: {error.errno}", flush=True)
sys.stdin.read()
''', sys.argv[2]])
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with a file that is longer than what 31 bits count."""
    libc.mount("tmpfs", str(tmp_path), "tmpfs", 0, None)
    try:
        with (tmp_path / "slot.rank_0").open("wb") as file:
            file.truncate(3 << 30)
        yield tmp_path
    finally:
        libc.umount2(str(tmp_path), 0)


@pytest.fixture
def gate(files: Path) -> Iterator[Callable[..., Gate]]:
    made: list[Gate] = []

    def before(**options: float) -> Gate:
        fd = os.open(files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            made.append(Gate.before(fd, PodMembers(UID), **options))
        finally:
            os.close(fd)
        return made[-1]

    try:
        yield before
    finally:
        for each in made:
            each.close()


@pytest.fixture
def opener(files: Path, cgroup: Callable[[Pod], Path]) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts a container of the pod that opens the file once."""
    procs = cgroup(Pod(uid=UID, name="engine"))
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", OPENER, str(procs), str(files / "slot.rank_0")]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.kill()
            process.wait()


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_first_container_goes_through_an_empty_volume(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    assert it.in_use() is None
    it.begin([], empty=True)
    first = opener()
    assert said(first) == b"4", "a file of 3 GiB is opened like another"
    assert it.in_use() is True
    assert it.users == [first.pid]
    first.kill()
    first.wait()
    Kubelet.wait("its end is seen", lambda: it.in_use() is False)


def test_nobody_goes_through_before_it_begins_and_while_it_is_shut(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    it.begin([], empty=True)
    assert said(first) == b"4"
    with it.shut():
        second = opener()
        Kubelet.wait("it waits", it.waiting)
    waiting = it.waiting()
    assert waiting, "another one is inside: that is for the guardian to look at"
    third = opener()
    Kubelet.wait("another one came since", lambda: len(it.waiting()) == 2)
    it.let_in(waiting)
    assert said(second) == b"4"
    assert len(it.waiting()) == 1
    it.let_in(it.waiting())
    assert said(third) == b"4"


def test_who_waits_too_long_is_refused(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate(held_s=0.5)
    it.begin([], empty=False)
    assert said(opener()) == b"refused: 1"
    assert it.in_use() is None, "it never came in"


def test_who_waits_when_it_closes_is_refused(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    it.begin([], empty=False)
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    it.close()
    assert said(first) == b"refused: 1"


def test_processes_that_are_not_the_pods_never_wait(gate: Callable[..., Gate], files: Path) -> None:
    gate()  # shut
    assert (files / "slot.rank_0").open("rb").read(4) == bytes(4), "this process itself"
    subprocess.run(["head", "-c", "4", str(files / "slot.rank_0")], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_the_number_of_a_dead_containers_namespace_lets_nobody_in(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """The kernel gives the lowest free number: the next container's namespace often has the old one's."""
    it = gate()
    it.begin([], empty=True)
    numbers = set()
    for _ in range(6):
        process = opener()
        Kubelet.wait("it came", lambda: bool(it.waiting()) or it.in_use())
        assert bool(it.waiting()) is bool(numbers), "the first one alone goes through"
        numbers.add(os.stat(f"/proc/{process.pid}/ns/mnt").st_ino)
        process.kill()
        process.wait()
        Kubelet.wait("nobody is inside", lambda: it.in_use() is False)
    assert len(numbers) < 6, "a number was used again"


def test_nothing_is_kept_of_who_was_killed_while_it_waited(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate(held_s=3600)
    it.begin([], empty=False)
    before = open_descriptors()
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    first.kill()
    first.wait()
    first.communicate()
    Kubelet.wait("its descriptors are closed", lambda: open_descriptors() == before)


def test_who_came_since_is_not_let_in_by_the_number_of_one_that_was_killed_while_it_waited(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_node.pods.gate.mount_namespace", lambda pid: 4026531841)
    it = gate()
    it.begin([], empty=False)
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    waiting = it.waiting()
    first.kill()
    first.wait()
    Kubelet.wait("it waits no more", lambda: not it.waiting())
    second = opener()
    Kubelet.wait("the next one waits", it.waiting)
    it.let_in(waiting)
    assert it.in_use() is None
    it.let_in(it.waiting())
    assert said(second) == b"4"


def test_a_number_that_changes_hands_while_its_container_is_let_in_is_nobodys(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed just then, and the next container has its number when the guardian looks who has it."""
    it = gate()
    it.begin([], empty=False)
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    waiting, number = it.waiting(), os.stat(f"/proc/{first.pid}/ns/mnt").st_ino
    second = opener()
    Kubelet.wait("the next one waits", lambda: len(it.waiting()) == 2)

    def looked_at(pid: int) -> int | None:
        if first.returncode is None:
            first.kill()
            first.wait()
        return number if pid == second.pid else None

    monkeypatch.setattr("kvtier_node.pods.gate.mount_namespace", looked_at)
    it.let_in(waiting)
    assert it.in_use() is None
    monkeypatch.undo()
    it.let_in(it.waiting())
    assert said(second) == b"4"


def test_after_it_was_emptied_the_next_container_goes_through(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    it.begin([], empty=False)
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    with it.shut():
        it.emptied()
    assert said(first) == b"4"


def test_a_later_process_of_a_container_goes_through_and_keeps_others_out_when_the_first_one_has_ended(
    gate: Callable[..., Gate],
    opener: Callable[[], subprocess.Popen[bytes]],
    files: Path,
    cgroup: Callable[[Pod], Path],
) -> None:
    it = gate()
    it.begin([], empty=True)
    first = opener()
    assert said(first) == b"4"
    join = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execvp(sys.argv[2], sys.argv[2:])"
    read = f"exec 3< {files}/slot.rank_0 && exec 3<&- && echo read && exec cat"
    enter = ["nsenter", "-t", str(first.pid), "-m", "sh", "-c", read]
    later = subprocess.Popen(
        [sys.executable, "-c", join, str(cgroup(Pod(uid=UID, name="engine"))), *enter],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert said(later) == b"read"
        first.kill()
        first.wait()
        opener()
        Kubelet.wait("the next container waits", it.waiting)
        assert it.in_use() is True
    finally:
        later.kill()
        later.wait()
    Kubelet.wait("the last one's end is seen", lambda: it.in_use() is False)


def test_a_container_that_was_there_before_the_gate_is_inside(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    first = opener()
    Kubelet.wait("it waits", it.waiting)
    it.begin([PidFd.open(first.pid)], empty=False)
    assert said(first) == b"4"


def test_a_defect_of_the_gate_leaves_nobody_waiting(
    gate: Callable[..., Gate], opener: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    it = gate()

    def fail(self: PodMembers, pid: int) -> bool:
        raise RuntimeError("a defect")

    monkeypatch.setattr(PodMembers, "has", fail)
    first = opener()
    said(first)
    Kubelet.wait("the thread has ended", lambda: it.failure)
    monkeypatch.undo()


TOLD_WHEN = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
print("ready", flush=True)
sys.stdin.readline()
try:
    open(sys.argv[2], "rb").close()
    print("opened", flush=True)
except PermissionError:
    print("refused", flush=True)
"""


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """In this process, for as long as the block runs."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(old[0], 1024), old[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(2))
        for fd in taken[-count:]:
            os.close(fd)
        del taken[-count:]
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def test_an_open_is_refused_where_it_cannot_be_told_whose_it_is(
    gate: Callable[..., Gate], files: Path, cgroup: Callable[[Pod], Path]
) -> None:
    """Two descriptors are left to the agent: the kernel takes them for the file and the process, none is left to ask who it is."""
    it = gate()
    it.begin([], empty=False)
    command = [sys.executable, "-c", TOLD_WHEN, str(cgroup(Pod(uid=UID, name="engine"))), str(files / "slot.rank_0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert said(process) == b"ready"
            assert process.stdin is not None
            with descriptors_left(2):
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert said(process) == b"refused"
            assert it.failure is None
        finally:
            process.kill()


HOSTILE = """
import fcntl, os, sys, time
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
fd = os.open(sys.argv[2], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETSIG, 23)
while True:
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        break
    except BlockingIOError:  # the agent closes its own descriptor of the file after its answer
        time.sleep(0.01)
os.mkfifo(sys.argv[2] + ".fifo")
if os.fork() == 0:
    os.open(sys.argv[2] + ".fifo", os.O_RDONLY)
try:
    os.open(sys.argv[2], os.O_RDONLY)
except PermissionError:
    print("refused", flush=True)
sys.stdin.read()
"""


def test_what_blocks_whoever_opens_it_blocks_nobody_elses_open(
    gate: Callable[..., Gate], files: Path, cgroup: Callable[[Pod], Path]
) -> None:
    """A lease of the consumer's own, and a FIFO: the kernel opens each file for the agent too."""
    it = gate()
    it.begin([], empty=True)
    (files / "other").touch()
    command = [sys.executable, "-c", HOSTILE, str(cgroup(Pod(uid=UID, name="engine"))), str(files / "slot.rank_0")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert said(process) == b"refused"
            subprocess.run(["cat", str(files / "other")], check=True, timeout=30)
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
            process.kill()


MANY = """
import os, sys, threading
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
refused = []
def read():
    try:
        open(sys.argv[2], "rb").close()
    except PermissionError:
        refused.append(1)
threads = [threading.Thread(target=read) for _ in range(400)]
for thread in threads:
    thread.start()
print("started", flush=True)
for thread in threads:
    thread.join()
print(len(refused), flush=True)
"""


def test_those_who_wait_take_no_more_than_so_many_descriptors_of_the_agent(
    gate: Callable[..., Gate], files: Path, cgroup: Callable[[Pod], Path]
) -> None:
    """The others are refused: one pod must not keep the agent from erasing for another one."""
    it = gate()
    command = [sys.executable, "-c", MANY, str(cgroup(Pod(uid=UID, name="engine"))), str(files / "slot.rank_0")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert said(process) == b"started"
            Kubelet.wait("256 threads wait, and the others were refused", lambda: waiting_threads(process.pid) == 256)
            it.begin([], empty=True)
            assert int(said(process)) == 400 - 256
        finally:
            process.kill()


def waiting_threads(pid: int) -> int:
    """How many threads beside the first one there are, if all of them wait in open(2); otherwise 0."""
    threads = [path for path in Path(f"/proc/{pid}/task").iterdir() if path.name != str(pid)]
    try:
        return len(threads) if all(waits_in_open(thread) for thread in threads) else 0
    except (FileNotFoundError, ProcessLookupError):  # it ended a moment ago
        return 0


def test_it_answers_many_opens_at_once(
    gate: Callable[..., Gate], files: Path, opener: Callable[[], subprocess.Popen[bytes]]
) -> None:
    it = gate()
    it.begin([], empty=True)
    counted = []

    def read() -> None:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            (files / "slot.rank_0").open("rb").close()
            counted.append(1)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert said(opener()) == b"4"
    for thread in threads:
        thread.join()
    assert len(counted) > 8
