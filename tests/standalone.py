"""A host of its own for tests of `kvtier node` and `kvtier run`: directories, real processes, and an end that leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from leftovers import detach_below
from live_logs import json_lines
from requirements import need_tool

KVTIER = [sys.executable, "-m", "kvtier_cli.main"]
LIMIT_S = 120.0


def wait_for(what: Callable[[], Any], text: str, limit_s: float = LIMIT_S) -> Any:
    """Poll until `what()` is true, and return it. No claim about time: the limit only ends a test that hangs."""
    until = time.monotonic() + limit_s
    while not (found := what()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {limit_s:.0f} s in vain: {text}")
        time.sleep(0.05)
    return found


def has_ended(pid: int) -> bool:
    """Whether every thread of it has; its parent need not have reaped it."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@dataclass
class Process:
    """A running kvtier with its log."""

    popen: subprocess.Popen[str]
    log_path: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log(self) -> list[dict[str, Any]]:
        return list(json_lines(self.log_path))

    def text(self) -> str:
        return self.log_path.read_text()

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for a log line."""

        def found() -> dict[str, Any] | None:
            if self.popen.poll() is not None and not self._lines(name, fields):
                raise AssertionError(f"ended with {self.popen.returncode}: {self.text()}")
            lines = self._lines(name, fields)
            return lines[0] if lines else None

        return wait_for(found, f"log line {name} {fields}\n{self.text()}")

    def _lines(self, name: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == name and fields.items() <= line.items()]

    def terminate(self) -> int:
        self.popen.terminate()
        return self.popen.wait(LIMIT_S)

    def sigkill(self) -> None:
        self.popen.kill()
        self.popen.wait(LIMIT_S)


@dataclass
class Host:
    """`base` holds state, tiers and manifests. `user`: uid and gid that everything runs as; None for the test's own."""

    base: Path
    user: int | None = None
    started: list[Process] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    @property
    def state(self) -> Path:
        return self.base / "state"

    @property
    def root(self) -> Path:
        return self.base / "tiers"

    @property
    def manifests(self) -> Path:
        return self.base / "manifests"

    @property
    def _as_user(self) -> list[str]:
        """An ordinary user, but for reading: the interpreter may lie in root's home."""
        if self.user is None:
            return []
        caps = "-all,+dac_read_search"
        who = ["--reuid", str(self.user), "--regid", str(self.user), "--clear-groups"]
        return [need_tool("setpriv"), *who, "--inh-caps", caps, "--ambient-caps", caps, "--"]

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        return kept | {
            "KVTIER_STATE_DIR": str(self.state),
            "KVTIER_ROOT": str(self.root),
            "KVTIER_MANIFESTS": str(self.manifests),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }

    def declare(self, name: str, *, file: str | None = None, **spec: Any) -> Path:
        """Write a manifest, as an editor does: a new file in the old one's place."""
        wanted = {"path": str(self.root / name), "sizePerRank": "8Mi", "ranks": 1, **spec}
        manifest = {
            "apiVersion": "kvtier.dev/v1alpha1",
            "kind": "KVCacheTier",
            "metadata": {"name": name},
            "spec": wanted,
        }
        return self.write(file or f"{name}.yaml", yaml.safe_dump(manifest))

    def write(self, file: str, text: str) -> Path:
        path = self.manifests / file
        temporary = self.manifests / f".{file}.new"
        temporary.write_text(text)
        temporary.rename(path)
        return path

    def kvtier(
        self, *arguments: str, env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._as_user, *KVTIER, *arguments],
            env=self.env | (env or {}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            **({"stdin": subprocess.DEVNULL, "cwd": "/"} | options),
        )

    def json(self, *arguments: str) -> Any:
        done = self.kvtier(*arguments, "-o", "json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> Process:
        log_path = self.base / f"log-{len(self.started)}"
        with open(log_path, "w") as log:
            popen = subprocess.Popen(
                [*self._as_user, *KVTIER, *arguments],
                env=self.env | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                text=True,
                cwd="/",
                start_new_session=True,
            )
        process = Process(popen, log_path)
        self.started.append(process)
        return process

    def node(self, *arguments: str) -> Process:
        """A `kvtier node`, ready."""
        process = self.start("node", "--listen", "127.0.0.1:0", *arguments)
        process.event("ready")
        return process

    def run(self, tier: str, script: str, *options: str) -> tuple[Process, dict[str, str], int]:
        """A `kvtier run` of a shell script: the process, what its command was told, and the command's pid.

        The script begins after its environment is noted; `$NOTE` is a directory for what it wants to tell.
        """
        notes = Path(tempfile.mkdtemp(prefix="notes-", dir=self.base))
        if self.user is not None:
            os.chown(notes, self.user, self.user)
        tell = f"env -0 > {notes}/.env && echo $$ > {notes}/.pid && mv {notes}/.pid {notes}/pid; NOTE={notes}; {script}"
        process = self.start("run", "--tier", tier, *options, "--", "sh", "-c", tell)

        def begun() -> bool:
            if process.popen.poll() is not None and not (notes / "pid").exists():
                raise AssertionError(f"ended with {process.popen.returncode}: {process.text()}")
            return (notes / "pid").exists()

        wait_for(begun, "the command's start")
        pairs = (pair.partition("=") for pair in (notes / ".env").read_text().split("\0") if pair)
        pid = int((notes / "pid").read_text())
        self.pids.append(pid)
        return process, {name: value for name, _, value in pairs}, pid

    def volume(self, volume_id: str) -> dict[str, Any]:
        found = [item for item in self.json("status", "--all")["volumes"] if item["volume"] == volume_id]
        return found[0]

    def wait_state(self, volume_id: str, state: str) -> None:
        wait_for(lambda: self.volume(volume_id)["state"] == state, f"{volume_id} {state}")

    def receipts(self) -> list[dict[str, Any]]:
        return self.json("receipts", "list", "--limit", "0")

    def status_file(self, name: str) -> Path:
        return self.state / "status" / f"default_{name}.json"

    def condition(self, name: str, type_: str) -> dict[str, Any]:
        if not self.status_file(name).exists():
            return {}
        conditions = json.loads(self.status_file(name).read_text())["status"]["conditions"]
        return next((item for item in conditions if item["type"] == type_), {})

    def wait_condition(self, name: str, type_: str, status: str, reason: str) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            seen = self.condition(name, type_)
            return seen if (seen.get("status"), seen.get("reason")) == (status, reason) else None

        try:
            return wait_for(found, "")
        except AssertionError:
            raise AssertionError(f"{type_} is {self.condition(name, type_)}, not {status} {reason}") from None

    def mounts(self) -> list[str]:
        return [
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.base) in line
        ]

    def close(self) -> None:
        """End every process that was started, and whatever device or mount is left below `base`."""
        for pid in self.pids:
            _kill(pid)
        for process in self.started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.popen.wait(LIMIT_S)
        if os.geteuid() != 0:
            return
        for point in reversed(self.mounts()):
            subprocess.run(["umount", "-l", point], check=False)
        detach_below(self.base)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@contextmanager
def standalone_host(user: int | None = None) -> Iterator[Host]:
    """A host in a directory of its own below /tmp; as `user`, with everything in it theirs."""
    with tempfile.TemporaryDirectory(prefix="kvtier-host-", ignore_cleanup_errors=True) as name:
        base = Path(os.path.realpath(name))
        base.chmod(0o755)
        host = Host(base, user)
        for directory in (host.root, host.manifests):
            directory.mkdir(mode=0o755)
        if user is not None:
            for directory in (base, host.root, host.manifests):
                os.chown(directory, user, user)
        try:
            yield host
        finally:
            host.close()
