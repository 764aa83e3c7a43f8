"""Processes cannot be mistaken for one another, numbers that are used again included."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import pytest

from kvtier_api.errors import NotFound
from kvtier_node.kernel.processes import PidFd, boot_id, new_pidfd_from_child, start_time
from leftovers import open_descriptors
from requirements import missing, need_root, need_tool


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def test_boot_id_is_one_and_the_same() -> None:
    assert str(uuid.UUID(boot_id())) == boot_id()


def test_living_process_is_not_exited_and_a_dead_one_is_before_it_is_reaped(child: subprocess.Popen[bytes]) -> None:
    with PidFd.open(child.pid) as process:
        assert (process.pid, process.start_time) == (child.pid, start_time(child.pid))
        assert not process.exited()
        assert not process.wait(0.01)
        child.kill()
        assert process.wait(30)
        assert process.exited(), "a zombie has ended"
        child.wait()
        assert process.exited()
        assert not process.send_signal(signal.SIGTERM)


def test_exact_start_time_opens_and_any_other_does_not(child: subprocess.Popen[bytes]) -> None:
    started = start_time(child.pid)
    PidFd.open(child.pid, started).close()
    for other in (started - 1, started + 1, 0):
        with pytest.raises(NotFound, match="belongs to another"):
            PidFd.open(child.pid, other)


REUSE = """
import os, subprocess, sys, time
from kvtier_api.errors import NotFound
from kvtier_node.kernel.processes import PidFd, start_time
first = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
held = PidFd.open(first.pid)
started = start_time(first.pid)
first.kill()
first.wait()
while time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK") < started + 2:
    pass  # the other starts at another tick
with open("/proc/sys/kernel/ns_last_pid", "w") as last:
    last.write(str(first.pid - 1))
second = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
assert second.pid == first.pid, "the number was not used again"
try:
    PidFd.open(second.pid, started)
except NotFound as error:
    print("told:", error)
assert held.exited()
assert not held.send_signal(9)
assert second.poll() is None
second.kill()
second.wait()
"""


@pytest.mark.root
def test_number_that_is_really_used_again_is_another_process() -> None:
    need_root()
    if not os.path.exists("/proc/sys/kernel/ns_last_pid"):
        missing("a kernel with CONFIG_CHECKPOINT_RESTORE")
    argv = [need_tool("unshare"), "-p", "-f", "--mount-proc", sys.executable, "-c", REUSE]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "belongs to another" in done.stdout


@pytest.mark.parametrize("pid", [2**22 + 1, -1, 0, 2**40])
def test_number_that_nobody_has_is_not_found(pid: int) -> None:
    with pytest.raises(NotFound):
        PidFd.open(pid)


def test_number_that_is_only_a_threads_is_no_process() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    try:
        assert thread.native_id
        with pytest.raises(NotFound):
            PidFd.open(thread.native_id)
    finally:
        leave.set()
        thread.join()


def test_reaped_process_is_not_found(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(NotFound):
        PidFd.open(child.pid)
    with pytest.raises(NotFound):
        start_time(child.pid)


def test_name_with_parentheses_and_spaces_does_not_shift_the_start_time() -> None:
    script = "import sys\nopen('/proc/self/comm', 'w').write(') S 1 2 (')\nprint('named', flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout
        before = start_time(process.pid)
        process.stdout.readline()
        assert start_time(process.pid) == before > 0
        process.kill()


def test_process_whose_first_thread_ended_lives_until_the_last_does() -> None:
    """A consumer is gone when all of its threads are: the file is open as long."""
    script = (
        "import ctypes, sys, threading\n"
        "def stay():\n    print('staying', flush=True)\n    sys.stdin.read()\n"
        "threading.Thread(target=stay).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2) is x86-64's")
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout
        child.stdout.readline()
        with new_pidfd_from_child(child.pid) as process:
            assert not process.wait(0.3)
            child.kill()
            assert process.wait(30)


def test_descriptor_is_readable_at_the_end_for_an_event_loop(child: subprocess.Popen[bytes]) -> None:
    with PidFd.open(child.pid) as process:
        seen = threading.Event()

        def watch() -> None:
            select.select([process], [], [])
            seen.set()

        watcher = threading.Thread(target=watch)
        watcher.start()
        assert not seen.is_set()
        assert process.send_signal(signal.SIGKILL)
        watcher.join(30)
        assert seen.is_set()


def test_descriptor_is_not_inherited_and_is_closed_once(child: subprocess.Popen[bytes]) -> None:
    process = PidFd.open(child.pid)
    assert not os.get_inheritable(process.fileno())
    before = open_descriptors()
    process.close()
    process.close()
    assert open_descriptors() == before - 1


def test_refusal_closes_the_descriptor(child: subprocess.Popen[bytes]) -> None:
    before = open_descriptors()
    with pytest.raises(NotFound):
        PidFd.open(child.pid, 1)
    assert open_descriptors() == before
