"""For tests of the node: a node on the real kernel with its folder, its tiers and its consumers; all of it taken away again.

What a test starts or makes through `Host` is ended, unmounted and detached afterwards, also when the test failed. A mount, loop
device or process that is still there then fails the test.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtier_api.documents import load_documents
from kvtier_api.erasure import Trigger
from kvtier_api.tier import KVCacheTier
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import Death, erase
from kvtier_node.kernel import libc, mounts
from kvtier_node.kernel.loop import LoopDevice
from kvtier_node.ledger import Observer
from kvtier_node.live import LiveVolume
from kvtier_node.node import Node
from kvtier_node.provisioning import provision, start
from kvtier_node.receipts import Receipt
from kvtier_node.recovery import Recovered, open_node, recover
from leftovers import detach_below, is_given_back, loop_devices_below
from requirements import need_tool

MIB = 1 << 20
LIMIT_S = 120.0
"""How long a test waits for what must come. Not what is claimed of speed: the machine may be busy."""
CANARY = b"KVTIER-CANARY-of-a-prompt-that-nobody-must-find-again-0123456789"


def eventually(what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Wait until `condition()` is true, and return it."""
    until = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            pytest.fail(f"did not come within {limit_s:g} s: {what}")
        time.sleep(0.02)


def raw_count(path: str | Path, needle: bytes = CANARY) -> int:
    """How often `needle` is in the file's raw bytes on the disk, read past the page cache."""
    os.sync()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        size = os.fstat(fd).st_size
        content = bytearray()
        with mmap.mmap(-1, 4 * MIB) as buffer:
            offset = 0
            while offset < size:
                got = os.preadv(fd, [buffer], offset)
                content += buffer[:got]
                offset += got
        return content.count(needle)
    finally:
        os.close(fd)


@dataclass
class Consumer:
    """A process that a test controls by lines: each line of its stdin is Python that it runs; it answers with one line."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, code: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().rstrip("\n")
        assert answer, "the consumer has ended"
        assert not answer.startswith("error:"), answer
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


CONSUMER = """
import json, os, sys, mmap, fcntl, signal, subprocess, time
slots, keep = sys.argv[1], {}

def map_alone(path, size, content=b""):
    "Map a file, with no descriptor of it left (Python's mmap keeps one)."
    import ctypes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    fd = os.open(path, os.O_RDWR)
    address = libc.mmap(None, ctypes.c_size_t(size), 3, 1, fd, ctypes.c_long(0))
    os.close(fd)
    ctypes.memmove(address, content, len(content))

for line in sys.stdin:
    answer = "ok"
    try:
        scope = globals(); scope["answer"] = "ok"; exec(json.loads(line), scope); answer = str(scope["answer"])
    except BaseException as error:
        answer = f"error: {error!r}"
    print(answer.replace(chr(10), " "), flush=True)
"""


AS_NOBODY = """
import json, os, sys
from kvtier_node.kernel import libc
from kvtier_node.kernel.namespaces import leave_mount_namespace

def closed(path):
    "The topmost directory on the way to `path` that others may not pass."
    names = path.split("/")[1:]
    for depth in range(1, len(names)):
        above = "/" + "/".join(names[:depth])
        if not os.stat(above).st_mode & 1:
            return above
    return None

leave_mount_namespace()
behind = {}
for path in json.loads(sys.argv[1]):
    if closed(path):
        behind.setdefault(closed(path), []).append((path, os.open(path, os.O_PATH)))
for above, paths in behind.items():
    libc.mount("tmpfs", above, "tmpfs", 0, "mode=755")
    for path, fd in sorted(paths):
        os.makedirs(path, exist_ok=True)
        libc.mount(f"/proc/self/fd/{fd}", path, None, 0x1000 | 0x4000, None)  # MS_BIND | MS_REC
        os.close(fd)
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[2:]])
"""


@dataclass
class Host:
    """One node. `base` holds everything: `tiers` (the allowed root) and `state`."""

    base: Path
    node: Node
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)
    lives: list[LiveVolume] = field(default_factory=list)
    shared: list[Path] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.base / "tiers"

    @property
    def state(self) -> str:
        return str(self.base / "state")

    # What a test works with

    def tier(
        self,
        backend: str,
        *,
        name: str = "demo",
        size: str = "4Mi",
        ranks: int = 2,
        path: Path | None = None,
        **spec: Any,
    ) -> KVCacheTier:
        body = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "sizePerRank": size,
                "ranks": ranks,
                "path": str(path or self.root / name),
                "encryption": {"backend": backend},
                **spec,
            },
        }
        tier = load_documents(json.dumps(body))[0]
        assert isinstance(tier, KVCacheTier)
        return tier

    def provision(self, tier: KVCacheTier, *, uid: int = 0, gid: int = 0) -> LiveVolume:
        live = provision(self.node, tier, uid=uid, gid=gid)
        self.lives.append(live)
        return live

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        process = subprocess.Popen(argv, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def consumer(self, live: LiveVolume, *, prefix: tuple[str, ...] = (), **options: Any) -> Consumer:
        process = self.popen(
            [*prefix, sys.executable, "-c", CONSUMER, live.slots_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        return Consumer(process)

    def in_use(self, tier: KVCacheTier) -> tuple[LiveVolume, Consumer]:
        """A volume with a living consumer on record, which has done nothing yet."""
        live = self.provision(tier)
        consumer = self.consumer(live)
        consumer.do("pass")
        start(self.node, live, ProcessConsumer.of(consumer.pid))
        return live, consumer

    def write_canary(self, consumer: Consumer, name: str = "slot.rank_0", *, keep_open: bool = False) -> None:
        consumer.do(f"""
            fd = os.open(f"{{slots}}/{name}", os.O_RDWR | os.O_CREAT)
            os.pwrite(fd, {CANARY!r} * 4096, 0)
            os.fsync(fd)
            {"keep['fd'] = fd" if keep_open else "os.close(fd)"}
        """)

    def erase(self, live: LiveVolume, trigger: Trigger = Trigger.CRASH) -> Receipt:
        return erase(self.node, live, trigger, death=Death.now())

    def image(self, live: LiveVolume) -> Path:
        return Path(live.row.place) / "volume.img"

    def drop_guardians(self) -> None:
        """What the end of the process does: no lock and no descriptor of the agent's is left."""
        for live in self.lives:
            live.close_watch()
            live.guardian.close()
        self.lives.clear()

    def reopen(self, observers: tuple[Observer, ...] = ()) -> Node:
        """A new start on the same state."""
        self.drop_guardians()
        self.node.ledger.close()
        self.node = open_node(self.state, [str(self.root)], name="node-a", observers=observers)
        return self.node

    def recover(self) -> Recovered:
        found = recover(self.node)
        self.lives += found.adopted + [live for live, _ in found.failed]
        return found

    def python(
        self, code: str, *arguments: str, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own."""
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            check=check, text=True, capture_output=True, timeout=120, **options,
        )  # fmt: skip

    def python_as_nobody(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python as a user without any privilege.

        In a mount namespace of its own, where the interpreter and the sources are reachable: they may be in root's home.
        """
        needed = {sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isdir(path))}
        return self.python(AS_NOBODY, json.dumps(sorted(needed)), textwrap.dedent(code), *arguments)

    def recover_elsewhere(self) -> dict[str, Any]:
        """A recovery in a fresh process; what it did, with the volumes' ids."""
        done = self.python(
            """
            import json, sys
            from kvtier_node.recovery import open_node, recover
            found = recover(open_node(sys.argv[1], [sys.argv[2]], name="node-a"))
            print(json.dumps({
                "erased": [[receipt.volume_id, receipt.trigger, receipt.technique] for receipt in found.erased],
                "adopted": [live.volume_id for live in found.adopted],
                "failed": [[live.volume_id, str(error)] for live, error in found.failed],
                "elsewhere": found.guarded_elsewhere,
            }))
            """,
            self.state,
            str(self.root),
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    # What is left

    def mounts(self) -> list[str]:
        return [entry.mount_point for entry in mounts.mountinfo() if entry.mount_point.startswith(f"{self.base}/")]

    def loops(self) -> list[str]:
        """Loop devices on our images, but for those that only a mount namespace of a stranger's holds.

        A namespace that anybody makes on this machine meanwhile has copies of our mounts, for as long as it lasts.
        """
        return [device.path for device in loop_devices_below(self.base) if not self._is_only_strangers(device)]

    def _is_only_strangers(self, device: LoopDevice) -> bool:
        own = {process.pid for process in self.processes}
        number = os.stat(device.path).st_rdev
        held = not mounts.mounts_of_device(number) and any(pid not in own for pid, _ in mounts.mounts_elsewhere(number))
        return held or is_given_back(device)  # by the end of the look: its number may be another's

    def assert_nothing_left(self, live: LiveVolume | None = None) -> None:
        """No mount, no loop device, no lock, and of the place not even its directory.

        A device may be seen for a moment more: while another test's agent, which looks through all devices, has it open.
        """
        assert self.mounts() == []
        eventually("no loop device", lambda: self.loops() == [])
        if live is not None:
            assert not os.path.lexists(live.row.place)
            assert not os.path.lexists(f"{self.state}/volumes/{live.volume_id}.lock")

    def clean_up(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # what it forked, too
            except ProcessLookupError:
                pass
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.drop_guardians()
        self.node.ledger.close()
        for path in self.shared:
            path.unlink(missing_ok=True)
        for point in reversed(self.mounts()):
            libc.umount2(point, 2)  # MNT_DETACH
        detach_below(self.base)
        self._unprotect()
        eventually("every loop device given back", lambda: not self.loops())
        assert self.mounts() == []
        shutil.rmtree(self.base)

    def _unprotect(self) -> None:
        subprocess.run([need_tool("chattr"), "-R", "-f", "-i", "-a", str(self.base)], check=False, capture_output=True)


def make_host() -> Host:
    """In a folder that consumers of another user reach, too: pytest's own is closed to them."""
    base = Path(tempfile.mkdtemp(prefix="kvtier-test-"))
    base.chmod(0o755)
    (base / "tiers").mkdir()
    return Host(base, open_node(str(base / "state"), [str(base / "tiers")], name="node-a"))
