"""A child with a time limit: it can hang, die, talk too much or be orphaned, and its caller is told and goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import EraseIncomplete, KernelError, NotFound
from kvtier_node.kernel import bounded, libc, loop
from kvtier_node.kernel import constants as c
from kvtier_node.kernel.processes import PidFd
from leftovers import open_descriptors
from requirements import need_root, need_tool

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
SECRET = b"0123456789abcdef-the-key"

PROBES = """
import os, sys, time
from kvtier_api.errors import EraseIncomplete
def echo(*, fds, **arguments): return {"fds": sorted(fds), "arguments": arguments}
def read(*, fds): return {"text": os.read(fds["file"], 100).decode()}
def open_descriptors(*, fds): return {"fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))}
def environment(*, fds): return {"environ": dict(os.environ), "argv": sys.argv, "flags": [sys.flags.isolated], "cwd": os.getcwd()}
def whoami(*, fds): return {"pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0)}
def no_dict(*, fds): return 7
def no_json(*, fds): return {"value": object()}
def missing_file(*, fds): os.stat("/no/such/file")
def bare_oserror(*, fds): raise OSError("told " + str(fds))
def typed(*, fds): raise EraseIncomplete("the kernel still has it", obj="key 1", remedy="wait")
def leak(*, fds, secret): raise ValueError("the secret is " + secret)
def noisy(*, fds, secret): sys.stderr.write("the secret is " + secret + "\\\\n"); sys.stderr.flush(); os._exit(3)
def print_it(*, fds): print("to stdout"); os.write(1, b"raw"); return {}
def big(*, fds, size): return {"text": "x" * size}
def quit(*, fds): sys.exit(0)
def vanish(*, fds): os.kill(os.getpid(), 9)
def sleep(*, fds): time.sleep(1000); return {}
def tell_and_sleep(*, fds, path):
    with open(path + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(path + ".new", path); time.sleep(1000)
def orphan(*, fds):
    pid = os.fork()
    if pid == 0:
        time.sleep(1000)
    return {"grandchild": pid}
def write_to(*, fds, path):
    with open(path, "wb") as file: file.write(bytes(1 << 20))
    return {}
"""


@pytest.fixture(autouse=True)
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make functions of this test importable in the isolated child, which otherwise imports only what is installed."""
    (tmp_path / "bounded_probes.py").write_text(PROBES.replace("\\\\n", "\\n"))
    real = bounded._isolated

    def with_probes(*arguments: str) -> list[str]:
        if arguments[:2] != ("-m", "kvtier_node.kernel.child"):
            return real(*arguments)
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from kvtier_node.kernel.child import main; main()"
        return real("-c", code, *arguments[2:])

    monkeypatch.setattr(bounded, "_isolated", with_probes)


def call(
    name: str, *, timeout_s: float = 60, fds: dict[str, int] | None = None, **arguments: object
) -> dict[str, object]:
    return bounded.call(f"bounded_probes:{name}", timeout_s=timeout_s, fds=fds or {}, **arguments)


# Functions


def test_function_of_kvtier_is_called_in_a_fresh_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(KernelError, match="TypeError"):
        bounded.call("json:dumps", timeout_s=60)
    with pytest.raises(KernelError, match="ModuleNotFoundError"):
        bounded.call("bounded_probes:echo", timeout_s=60)


def test_arguments_and_result_travel(tmp_path: Path) -> None:
    arguments = {"text": "é\n", "number": 2**60, "nested": [[1, 2], {"a": None}], "flag": True}
    assert call("echo", **arguments) == {"fds": [], "arguments": arguments}


def test_descriptors_are_handed_over_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    other = os.open(tmp_path / "file", os.O_RDONLY)
    os.set_inheritable(other, True)
    before = open_descriptors()
    try:
        assert call("read", fds={"file": fd}) == {"text": "content"}
        found = call("open_descriptors", fds={"file": fd})["fds"]
        assert isinstance(found, list)
        assert len(found) <= 6, "0, 1, 2, the reply, the file, and the listing itself"
        assert other not in found
    finally:
        os.close(fd)
        os.close(other)
    assert open_descriptors() == before - 2, "nothing is left open here"


def test_child_sees_neither_our_environment_nor_its_input_in_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TEST_SECRET", "x")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    found = call("environment")
    environ = found["environ"]
    assert isinstance(environ, dict)
    assert set(environ) <= {"PATH", "LC_ALL", "LC_CTYPE", "DM_DISABLE_UDEV"}
    assert found["flags"] == [1]
    assert found["cwd"] == "/"
    assert "environment" not in str(found["argv"])


def test_child_has_a_process_group_and_session_of_its_own() -> None:
    found = call("whoami")
    assert found["pid"] == found["group"] == found["session"] != os.getpid()


def test_system_errors_come_back_as_they_were() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        call("missing_file")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "/no/such/file")


def test_errors_of_kvtier_come_back_as_their_class() -> None:
    with pytest.raises(EraseIncomplete) as caught:
        call("typed")
    assert (caught.value.cause, caught.value.obj, caught.value.remedy) == ("the kernel still has it", "key 1", "wait")


@pytest.mark.parametrize("name", ["leak", "noisy"])
def test_no_error_repeats_an_argument(name: str) -> None:
    with pytest.raises(KernelError) as caught:
        call(name, secret=SECRET.decode())
    assert SECRET.decode() not in repr(caught.value)
    assert SECRET.decode() not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_dict", "returned int, not a dict"),
        ("no_json", "TypeError"),
        ("bare_oserror", "OSError"),
        ("nothing_of_the_kind", "AttributeError"),
        ("quit", "SystemExit"),
        ("vanish", "killed by SIGKILL"),
    ],
)
def test_what_is_no_result_is_an_error(name: str, told: str) -> None:
    with pytest.raises(KernelError, match=told) as caught:
        call(name)
    assert caught.value.obj == f"bounded_probes:{name}"


def test_what_the_function_prints_is_not_its_result() -> None:
    assert call("print_it") == {}


def test_result_larger_than_a_pipe_arrives_and_one_without_end_does_not() -> None:
    assert call("big", size=2**20) == {"text": "x" * 2**20}
    with pytest.raises(KernelError, match="output"):
        call("big", size=2**25)


def test_request_larger_than_a_pipe_arrives() -> None:
    assert call("echo", text="x" * 2**20)["arguments"] == {"text": "x" * 2**20}


def children() -> set[str]:
    """Of this process, zombies included; another test of the worker may have left some."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_function_over_its_limit_is_killed() -> None:
    before = children()
    with pytest.raises(KernelError, match=r"timed out after 0\.5 s"):
        call("sleep", timeout_s=0.5)
    assert bounded.unreaped() == []
    assert children() <= before


def test_grandchild_that_holds_every_pipe_delays_nothing_and_does_not_outlive_the_call() -> None:
    grandchild = call("orphan")["grandchild"]
    assert isinstance(grandchild, int)
    with contextlib.suppress(NotFound), PidFd.open(grandchild) as process:
        assert process.wait(30)


# Tools


def test_tool_gives_its_output_and_gets_its_input() -> None:
    assert bounded.run_tool(["cat"], timeout_s=60, stdin=b"x" * 2**20) == "x" * 2**20
    assert bounded.run_tool(["true"], timeout_s=60, stdin=b"x" * 2**20) == "", "a tool need not read it"
    assert bounded.run_tool(["/bin/echo", "a b"], timeout_s=60) == "a b\n"


def test_tool_gets_a_minimal_environment_and_default_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TEST_SECRET", "x")
    told = dict(line.split("=", 1) for line in bounded.run_tool(["env"], timeout_s=60).splitlines())
    assert told["LC_ALL"] == "C"
    assert "/usr/sbin" in told["PATH"]
    assert set(told) <= {"PATH", "LC_ALL", "LC_CTYPE", "DM_DISABLE_UDEV"}
    status = bounded.run_tool(["grep", "SigIgn", "/proc/self/status"], timeout_s=60)
    assert int(status.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_tool_gets_the_descriptors_it_is_given() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"through")
    os.close(writer)
    assert bounded.run_tool(["cat", f"/proc/self/fd/{reader}"], timeout_s=60, pass_fds=[reader]) == "through"
    os.close(reader)


def test_missing_tool_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "_ENVIRONMENT", {"PATH": "/nowhere"})
    with pytest.raises(KernelError) as caught:
        bounded.run_tool(["mkfs.ext4", "/dev/null"], timeout_s=60)
    assert "missing" in caught.value.cause
    assert "e2fsprogs" in caught.value.remedy


def test_failure_tells_status_and_the_last_lines() -> None:
    script = "for i in 1 2 3 4 5 6 7 8; do echo line $i >&2; done; printf 'a\\033[31mb\\n' >&2; exit 7"
    with pytest.raises(KernelError) as caught:
        bounded.run_tool(["sh", "-c", script], timeout_s=60)
    assert "exit status 7" in caught.value.cause
    assert "line 8" in caught.value.cause
    assert "line 4 " not in caught.value.cause
    assert caught.value.cause.isprintable()
    with pytest.raises(KernelError, match="killed by SIGTERM"):
        bounded.run_tool(["sh", "-c", "kill $$"], timeout_s=60)


@pytest.mark.parametrize("filter_", ["cat", "od -An -v -tx1 | tr -d ' \\n'"])
def test_error_of_a_tool_that_repeats_its_input_is_withheld(filter_: str) -> None:
    with pytest.raises(KernelError) as caught:
        bounded.run_tool(["sh", "-c", f"{filter_} >&2; exit 1"], timeout_s=60, stdin=SECRET)
    assert SECRET.decode() not in str(caught.value)
    assert SECRET.hex() not in str(caught.value)
    assert "withheld" in caught.value.cause


def test_tool_over_its_limit_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/started; echo waiting >&2; wait"
    for limit_s in (2, 8, 32):  # longer where the machine is so busy that it does not come so far
        with pytest.raises(KernelError, match=f"timed out after {limit_s} s") as caught:
            bounded.run_tool(["sh", "-c", script], timeout_s=limit_s)
        if "waiting" in str(caught.value):
            break
    assert f"timed out after {limit_s} s: waiting" in str(caught.value)
    grandchild = int((tmp_path / "started").read_text())
    with contextlib.suppress(NotFound), PidFd.open(grandchild) as process:
        assert process.wait(30)


def test_output_without_end_is_stopped() -> None:
    with pytest.raises(KernelError, match="bytes of output"):
        bounded.run_tool(["cat", "/dev/zero"], timeout_s=60)
    with pytest.raises(KernelError, match="timed out"):
        bounded.run_tool(["sh", "-c", "cat /dev/zero >&2"], timeout_s=1)


STARTS_A_TOOL = """
import sys
from kvtier_node.kernel import bounded
script = 'echo $$ > "$0.new" && mv "$0.new" "$0" && exec sleep 1000'
bounded.run_tool(["sh", "-c", script, sys.argv[1]], timeout_s=1000)
"""
STARTS_A_FUNCTION = """
import sys
from kvtier_node.kernel import bounded
real = bounded._isolated
child = f"import sys; sys.path.insert(0, {sys.argv[2]!r}); from kvtier_node.kernel.child import main; main()"
bounded._isolated = lambda *arguments: real("-c", child, *arguments[2:])
bounded.call("bounded_probes:tell_and_sleep", timeout_s=1000, path=sys.argv[1])
"""


@pytest.mark.parametrize("script", [STARTS_A_TOOL, STARTS_A_FUNCTION], ids=["tool", "function"])
def test_child_dies_with_its_caller(tmp_path: Path, script: str) -> None:
    """A killed agent's mkfs or cryptsetup must not go on after recovery has looked."""
    told = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", script, str(told), str(tmp_path)]) as caller:
        while not told.exists():
            assert caller.poll() is None
        with PidFd.open(int(told.read_text())) as child:
            assert not child.exited()
            caller.kill()
            assert child.wait(30)


# A child that hangs in the kernel and cannot be killed


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A file on a frozen file system (FIFREEZE): who writes to it hangs in state D, SIGKILL or not, until it thaws."""
    need_root()
    mnt = tmp_path / "frozen"
    mnt.mkdir()
    image = os.open(tmp_path / "image", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(image, 0, 16 * 2**20)
    device = loop.attach(image, direct_io=False)
    os.close(image)
    with contextlib.ExitStack() as last:
        last.callback(loop.detach, device)
        subprocess.run([need_tool("mkfs.ext4"), "-q", "-O", "^has_journal", device.path], check=True)
        libc.mount(device.path, str(mnt), "ext4", 0, None)
        last.callback(libc.umount2, str(mnt), c.MNT_DETACH)
        (mnt / "file").write_bytes(b"")
        fd = os.open(mnt, os.O_RDONLY)
        last.callback(os.close, fd)
        state = {"frozen": True}

        def thaw() -> None:
            if state.pop("frozen", False):
                libc.ioctl(fd, FITHAW)

        libc.ioctl(fd, FIFREEZE)
        last.callback(thaw)
        yield mnt / "file", thaw


def state_of(pid: int) -> str:
    raw = Path(f"/proc/{pid}/stat").read_text()
    return raw[raw.rindex(")") + 2]


@pytest.mark.root
@pytest.mark.parametrize("kind", ["tool", "function"])
def test_child_that_cannot_be_killed_is_left_behind_and_reaped_later(
    frozen: tuple[Path, Callable[[], None]], kind: str
) -> None:
    path, thaw = frozen
    for limit_s in (2, 8, 32):  # longer where the machine is so busy that it does not come to its write
        with pytest.raises(KernelError, match="timed out"):
            if kind == "tool":
                bounded.run_tool(["dd", "if=/dev/zero", f"of={path}", "bs=1M", "count=1"], timeout_s=limit_s)
            else:
                call("write_to", timeout_s=limit_s, path=str(path))
        if bounded.unreaped():
            break
    (left,) = bounded.unreaped()
    assert state_of(left) == "D", "the kernel really holds it"
    assert call("echo") == {"fds": [], "arguments": {}}, "the next call goes on"
    assert bounded.unreaped() == [left]
    thaw()
    with PidFd.open(left) as process:
        assert process.wait(30)
    assert bounded.unreaped() == []
