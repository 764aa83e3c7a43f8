"""The guardian's lock: one holder, dropped by the kernel with its holder, and never on a file that lost its name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier_api.errors import KernelError, UnsafePath
from kvtier_node.guardian import Guardian

VOLUME = "kvv-0123456789abcdef0123"
HOLDER = """
import sys
from kvtier_node.guardian import Guardian
guardian = Guardian.try_acquire(sys.argv[1], sys.argv[2])
print("held" if guardian else "refused", flush=True)
sys.stdin.read()
"""


def holder(state: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state), VOLUME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_two_in_one_process_and_two_processes_exclude_each_other(tmp_path: Path) -> None:
    first = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert first is not None
    assert Guardian.try_acquire(str(tmp_path), VOLUME) is None
    first.close()
    process = holder(tmp_path)
    try:
        assert Guardian.try_acquire(str(tmp_path), VOLUME) is None
        assert Guardian.try_acquire(str(tmp_path), VOLUME[:-1] + "4") is not None
    finally:
        end(process)


def test_sigkill_of_the_holder_frees_the_lock(tmp_path: Path) -> None:
    process = holder(tmp_path)
    end(process)
    taken = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert taken is not None
    taken.close()


def test_a_child_that_the_holder_started_does_not_keep_the_lock(tmp_path: Path) -> None:
    guardian = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert guardian is not None
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        guardian.close()
        again = Guardian.try_acquire(str(tmp_path), VOLUME)
        assert again is not None
        again.close()
    finally:
        child.kill()
        child.wait()


def test_the_end_of_a_volume_takes_the_lock_file_away(tmp_path: Path) -> None:
    guardian = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert guardian is not None
    path = tmp_path / "volumes" / f"{VOLUME}.lock"
    assert path.stat().st_mode & 0o777 == 0o600
    guardian.close(ended=True)
    guardian.close(ended=True)
    assert not path.exists()


def test_a_lock_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    guardian = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert guardian is not None
    (tmp_path / "volumes" / f"{VOLUME}.lock").unlink()
    guardian.close(ended=True)
    with Guardian.try_acquire(str(tmp_path), VOLUME) or pytest.fail("not free") as again:
        assert again.volume_id == VOLUME


def test_nobody_guards_by_a_lock_on_a_file_without_a_name(tmp_path: Path) -> None:
    """Many takers, each of which unlinks the file as it lets go: at every moment at most one believes that it guards."""
    inside, most, rounds = 0, 0, 0
    guard = threading.Lock()
    stop = threading.Event()

    def take() -> None:
        nonlocal inside, most, rounds
        while not stop.is_set():
            guardian = Guardian.try_acquire(str(tmp_path), VOLUME)
            if guardian is None:
                continue
            with guard:
                inside += 1
                most = max(most, inside)
                rounds += 1
            with guard:
                inside -= 1
                if rounds > 2000:
                    stop.set()
            guardian.close(ended=True)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert rounds > 2000
    assert most == 1


LATE = """
import fcntl, sys
lock = fcntl.fcntl
def late(*arguments):
    print("opened", flush=True)
    sys.stdin.readline()
    return lock(*arguments)
fcntl.fcntl = late
from kvtier_node.guardian import Guardian
guardian = Guardian.try_acquire(sys.argv[1], sys.argv[2])
print("held" if guardian else "refused", flush=True)
"""
"""Its lock comes when it is told so, by a line."""


def test_a_lock_that_came_too_late_for_the_name_is_given_up(tmp_path: Path) -> None:
    """It opened the file; the guardian ended the volume and unlinked it; another made it anew. Then its lock came."""
    first = Guardian.try_acquire(str(tmp_path), VOLUME)
    assert first is not None
    command = [sys.executable, "-c", LATE, str(tmp_path), VOLUME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as late:
        assert late.stdin is not None and late.stdout is not None
        assert late.stdout.readline() == "opened\n"
        first.close(ended=True)
        second = Guardian.try_acquire(str(tmp_path), VOLUME)
        assert second is not None
        late.stdin.write("\n\n")
        late.stdin.flush()
        assert late.stdout.readline() == "opened\n", "the file that has the name now"
        assert late.stdout.readline() == "refused\n"
        second.close()


@pytest.mark.parametrize("name", ["", "kvv-", "../etc", "kvv-0123456789abcdef012g", "kvv-0123456789abcdef01234", "x/y"])
def test_what_is_no_volume_id_makes_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(KernelError):
        Guardian.try_acquire(str(tmp_path), name)
    assert os.listdir(tmp_path) == []


def test_a_symbolic_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / f"{VOLUME}.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePath, match="symbolic link"):
        Guardian.try_acquire(str(tmp_path), VOLUME)
    assert not (tmp_path / "elsewhere").exists()
