"""The machine itself: it boots, reports, can harm nothing, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.vm


def processes_of(work: Path) -> list[int]:
    """Live processes whose command line names the work folder: launcher and kernel do."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if f"{work}/" in line and ("launcher.py" in line or "rootfstype=hostfs" in line):
                found.append(int(entry.name))
    return found


def test_a_guest_reports_that_it_is_up_and_goes_off_cleanly(boot, make_disk):
    machine = boot("hello.py", disks=[make_disk(8)])
    up = machine.wait_for("up")
    assert up["uid"] == 0
    machine.wait_off()
    assert not machine.is_on


def test_a_guest_that_fails_tells_its_traceback(boot):
    from uml.machine import MachineEnded

    machine = boot("hello.py", args={"then": "fail"})
    with pytest.raises(MachineEnded, match="RuntimeError: this guest was told to fail"):
        machine.wait_for("never")


def test_waiting_for_a_guest_that_hangs_ends_in_time(boot):
    from uml.machine import MachineTimeout

    machine = boot("hello.py", args={"then": "hang"})
    machine.wait_for("up")
    with pytest.raises(MachineTimeout, match="no 'never'"):
        machine.wait_for("never", timeout_s=0.2)


def test_a_cut_leaves_no_process_and_no_file_in_shared_memory(boot, tmp_path):
    before = set(os.listdir("/dev/shm"))
    machine = boot("hello.py", args={"then": "hang"})
    machine.wait_for("up")
    assert processes_of(tmp_path)
    machine.cut()
    assert processes_of(tmp_path) == []
    deadline = time.monotonic() + 120  # another process's file goes by itself; what a machine left would stay
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == set()


def test_a_harness_that_is_killed_takes_its_machine_with_it(uml_kernel, tmp_path):
    here = Path(__file__).resolve().parent
    program = (
        "import sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from uml import kernel; from uml.machine import Machine\n"
        "machine = Machine(Path(sys.argv[2]), Path(sys.argv[3]), kernel.find(), args={'then': 'hang'}).__enter__()\n"
        "machine.wait_for('up'); print('up', flush=True); time.sleep(3600)\n"
    )
    command = [sys.executable, "-c", program, str(here / "harness"), str(tmp_path), str(here / "guests/hello.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        assert harness.stdout.readline() == "up\n"
        harness.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while (left := processes_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def test_root_in_the_guest_can_write_to_the_work_folder_only(boot, tmp_path):
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    machine = boot("hostfs_writer.py", work=work, args={"inside": str(work), "outside": str(outside)})
    tried = machine.wait_for("tried")
    machine.wait_off()
    assert tried["inside"] == ""  # else the test proves nothing of the other
    assert tried["outside"] == "EROFS"
    assert list(outside.iterdir()) == []


def test_two_machines_run_at_once_each_in_its_own_folder(boot, make_disk, tmp_path):
    def cycle(name: str) -> int:
        work = tmp_path / name
        work.mkdir()
        machine = boot("hello.py", work=work, disks=[make_disk(8, folder=work)], args={"then": "wait"})
        machine.wait_for("up")
        machine.tell(name)
        assert machine.wait_for("word")["word"] == name
        machine.power_off()
        return 1

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(cycle, ["first", "second"])) == [1, 1]


def test_a_disk_outside_the_work_folder_is_refused(boot, make_disk, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    with pytest.raises(ValueError, match="outside the work folder"):
        boot("hello.py", work=work, disks=[make_disk(8)])
