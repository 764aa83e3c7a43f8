"""Where raw keys are, as the kernel and other processes see it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_material import SLOT_BYTES, block
from kvtier_api.errors import EngineError
from kvtier_engine import SlotStore, kernel_calls
from kvtier_engine.key_memory import KeyMemory
from requirements import need_root

ENGINE = str(Path(__file__).parents[2] / "engine")


def _memory_hits(pid: int, needle: memoryview) -> int:
    """How often the needle stands in a process's memory, what no one can have written excepted."""
    hits = 0
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            span, access = line.split()[:2]
            if not access.startswith("rw") or "[v" in line:
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            try:
                memory.seek(start)
                data = memory.read(end - start)
            except OSError:
                continue
            hits += data.count(needle)
    return hits


@contextmanager
def _forked_child(act: Callable[[], None] = lambda: None) -> Iterator[int]:
    """A child by os.fork that runs `act`, then sleeps until the test kills it."""
    pid = os.fork()
    if not pid:
        try:
            act()
            while True:
                signal.pause()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _flags_of_mapping(pid: int, address: int) -> tuple[dict[str, int], set[str]]:
    sizes: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        header = re.match(r"^([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return sizes, set(line.split()[1:])
        elif inside and line.endswith("kB"):
            name, size = line.split(":")
            sizes[name] = int(size.split()[0])
    raise AssertionError("no such mapping")


def test_the_kernel_says_that_key_memory_is_locked_undumpable_and_wiped_on_fork() -> None:
    memory = KeyMemory()
    memory.new()
    sizes, flags = _flags_of_mapping(os.getpid(), kernel_calls.address_of_view(memory.view(0)))
    assert {"lo", "dd", "wf"} <= flags
    assert sizes["Locked"] > 0


def test_memory_that_cannot_be_locked_is_refused_and_not_used_unlocked() -> None:
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
        "import os\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "from kvtier_engine.key_memory import KeyMemory\n"
        "from kvtier_api.errors import EngineError\n"
        "try: KeyMemory()\n"
        "except EngineError as error: sys.exit(0 if 'RLIMIT_MEMLOCK' in str(error) else 4)\n"
        "sys.exit(3)\n"
    )
    need_readable = "import kvtier_engine.key_memory\n" + script
    done = subprocess.run([sys.executable, "-c", need_readable], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_key_memory_grows_and_a_wiped_cell_is_zeros_and_is_used_again() -> None:
    memory = KeyMemory()
    cells = [memory.new() for _ in range(3000)]
    assert len({bytes(memory.view(cell)) for cell in cells}) == 3000
    memory.wipe(cells[5])
    assert bytes(memory.view(cells[5])) == bytes(32)
    assert memory.new() == cells[5]


def _used_key(store: SlotStore) -> memoryview:
    ring = store._keys
    return ring._memory.view(next(iter(ring._by_number.values())).cell)


def test_a_forked_child_holds_no_key_while_its_parent_does(open_store: Callable[..., SlotStore]) -> None:
    store = open_store()
    assert store.put(b"k", [block(1)], tenant=b"a").ok
    secret = store._keys._secret
    with _forked_child() as child:
        assert _memory_hits(child, _used_key(store)) == 0
        assert _memory_hits(child, secret) == 0
    assert _memory_hits(os.getpid(), _used_key(store)) >= 1  # the search is able to find it
    assert store.get(b"k", [bytearray(SLOT_BYTES)], tenant=b"a").ok


def test_a_child_forked_in_the_midst_of_sealing_holds_no_expanded_key(open_store: Callable[..., SlotStore]) -> None:
    store = open_store(slots=8, slot_size_bytes=1 << 20)
    stop = threading.Event()

    def keep_sealing(name: bytes) -> None:
        data, number = block(name, 1 << 20), 0
        while not stop.is_set():
            number += 1
            store.put(name + bytes([number % 5]), [data], tenant=b"a", replace=True)

    threads = [threading.Thread(target=keep_sealing, args=(name,)) for name in (b"x", b"y", b"z")]
    for thread in threads:
        thread.start()
    try:
        while not store._keys.keys:
            time.sleep(0.01)
        for _ in range(8):
            with _forked_child() as child:
                assert _memory_hits(child, _used_key(store)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_forked_child_is_refused_and_keeps_no_slot_file_open(open_store: Callable[..., SlotStore]) -> None:
    store = open_store()
    store.put(b"k", [block(1)], tenant=b"a")
    read, write = os.pipe()

    def try_all() -> None:
        held = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        verdicts = [str(store.config.files[0] in held)]
        for act in (
            lambda: store.get(b"k", [bytearray(SLOT_BYTES)], tenant=b"a"),
            lambda: store.put(b"k2", [block(2)], tenant=b"a"),
            lambda: store._keys.current(bytes(16), 1),
            store.close,
        ):
            try:
                act()
                verdicts.append("accepted")
            except EngineError:
                verdicts.append("refused")
        os.write(write, " ".join(verdicts).encode())

    def guarded() -> None:
        try:
            try_all()
        except BaseException as error:
            os.write(write, repr(error).encode())

    with _forked_child(guarded):
        assert os.read(read, 1000).decode() == "False refused refused refused refused"
    os.close(read)
    os.close(write)


def test_erasing_leaves_the_key_nowhere_in_the_process(tmp_path: Path) -> None:
    """The engine's process is searched from outside, before and after: expanded copies count too."""
    need_root()
    script = (
        "import os, sys\n"
        "from kvtier_engine import SlotStore, StoreConfig\n"
        "store = SlotStore(StoreConfig(files=(sys.argv[1],), ranks=(0,), slot_size_bytes=65536, tier_uid='t',\n"
        "    volume_id='v', salt_policy='Required', max_age_s=3600))\n"
        "for n in range(32): assert store.put(bytes([n]), [bytes(65536)], tenant=b'a').ok\n"
        "for n in range(32): assert store.get(bytes([n]), [bytearray(65536)], tenant=b'a').ok\n"
        "from kvtier_engine import kernel_calls\n"
        "key = next(iter(store._keys._by_number.values()))\n"
        "print(kernel_calls.address_of_view(store._keys._memory.view(key.cell)), flush=True)\n"
        "sys.stdin.readline(); store.erase(b'a'); print('erased', flush=True); sys.stdin.readline()\n"
    )
    path = tmp_path / "slot.rank_0"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 * 65536)
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        address = int(child.stdout.readline())
        with open(f"/proc/{child.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            key = memoryview(memory.read(32))
        assert bytes(key) != bytes(32)
        assert _memory_hits(child.pid, key) == 1  # its cell, and no copy: no cipher outlives its task
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "erased\n"
        assert _memory_hits(child.pid, key) == 0
        assert _memory_hits(child.pid, key[:16]) == 0
    finally:
        child.kill()
        child.wait()


def test_a_hardened_process_leaves_no_core_and_cannot_be_read_by_its_own_user(
    tmp_path: Path, slot_files: Callable[..., tuple[str, ...]]
) -> None:
    script = (
        "import ctypes, os, sys\n"
        "from kvtier_engine import SlotStore, StoreConfig\n"
        "store = SlotStore(StoreConfig(files=(sys.argv[1],), ranks=(0,), slot_size_bytes=8192, tier_uid='t',\n"
        "    volume_id='v', salt_policy='Required', max_age_s=3600))\n"
        "assert store.stats().hardened\n"
        "print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, slot_files()[0]], capture_output=True, text=True, check=False)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("harden", [True, False])
def test_statistics_say_whether_the_process_was_hardened(
    harden: bool, slot_files: Callable[..., tuple[str, ...]]
) -> None:
    script = (
        "import sys\n"
        "from kvtier_engine import SlotStore, StoreConfig\n"
        "with SlotStore(StoreConfig(files=(sys.argv[1],), ranks=(0,), slot_size_bytes=8192, tier_uid='t',\n"
        f"    volume_id='v', salt_policy='Required', max_age_s=3600, harden_process={harden})) as store:\n"
        "    print(store.stats().hardened)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, slot_files()[0]], capture_output=True, text=True, check=True)
    assert done.stdout == f"{harden}\n"
