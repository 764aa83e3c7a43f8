"""The command line as a whole: help with examples, exit codes, errors for people, output for programs, a quick start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from kvtier_api import errors
from requirements import need_root
from standalone import KVTIER, Host, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}
TEXT_NODE = ["node", "--log", "text", "--listen", "off"]
COMMANDS = [
    ("node",),
    ("run",),
    ("status",),
    ("erase",),
    ("demo",),
    ("receipts", "list"),
    ("receipts", "show"),
    ("receipts", "verify"),
    ("receipts", "export"),
]


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_examples_of_the_command_itself(host: Host, command: tuple[str, ...]) -> None:
    done = host.kvtier(*command, "--help")
    assert done.returncode == 0
    examples = re.findall(r"\$ (kvtier .*)", done.stdout)
    assert any(example.startswith(" ".join(("kvtier", *command))) for example in examples), done.stdout
    assert host.kvtier(*command, "-h").stdout == done.stdout


def test_the_version_is_the_distributions(host: Host) -> None:
    from importlib.metadata import version

    assert host.kvtier("--version").stdout.strip() == f"kvtier {version('kvtier')}"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom kvtier_cli.main import app\n"
        "try:\n app(['--help'], standalone_mode=False)\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'aiohttp', 'pydantic', 'cryptography', 'structlog', 'prometheus_client', 'yaml'}"
        " & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kvtier status ch", "chat"),
        ("kvtier erase ch", "chat"),
        ("kvtier run --tier ch", "chat"),
        ("kvtier receipts list --tier ch", "chat"),
        ("kvtier receipts show kvr-", "RECEIPT"),
        ("kvtier receipts show kvv-", "VOLUME"),
    ],
)
def test_the_shell_completes_tiers_and_receipts(host: Host, line: str, wanted: str) -> None:
    _used(host)
    receipt = host.receipts()[0]
    names = {"RECEIPT": receipt["id"], "VOLUME": receipt["volume_id"]}
    env = {"_KVTIER_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    done = host.kvtier(env=env)
    assert done.stdout.split() == [names.get(wanted, wanted)], done.stderr
    nowhere = {"KVTIER_STATE_DIR": "/nonexistent", "KVTIER_MANIFESTS": "/nonexistent"}
    assert host.kvtier(env=env | nowhere).stdout.split() == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_each_shell(host: Host, shell: str) -> None:
    done = host.kvtier(env={"_KVTIER_COMPLETE": f"complete_{shell}", "COMP_WORDS": "kvtier rec", "COMP_CWORD": "1",
                            "_TYPER_COMPLETE_ARGS": "kvtier rec", "_TYPER_COMPLETE_FISH_ACTION": "get-args"})  # fmt: skip
    assert "receipts" in done.stdout, done.stderr
    assert "erase" not in done.stdout  # no page of help


# -- exit codes: one case for each that a person can cause on any host


def _used(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.kvtier("run", "--tier", "chat", "--", "true")


def _foreign(host: Host) -> None:
    host.declare("chat", **SEALED)
    (host.root / "chat").mkdir(mode=0o755)
    (host.root / "chat" / "notes.txt").write_text("somebody's")


def _damaged(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.kvtier("run", "--tier", "chat", "--", "true")
    (host.state / "ledger.db").write_bytes(b"no ledger")


def _forged(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.kvtier("run", "--tier", "chat", "--", "true")
    host.kvtier("receipts", "export", f"{host.base}/chain")
    content = (host.base / "chain").read_bytes()
    (host.base / "chain").write_bytes(content.replace(b'"Exit"', b'"Crash"'))


def _id(value: object) -> str | None:
    """Not of functions: their addresses differ from one worker to the next."""
    return None if callable(value) else str(value)[:40]


EXIT_CODES = [
    (2, ["run", "--tier", "chat"], None),
    (2, ["no-such-command"], None),
    (2, ["run", "--no-such-option", "--", "true"], None),
    (2, ["run", "--", "true"], None),
    (2, ["node", "--listen", "everywhere"], None),
    (2, ["receipts", "verify", "/dev/null", "--public-key", "/dev/null"], None),
    (2, ["receipts", "verify", "/dev/null", "--public-key", "BASE/manifests"], None),
    (3, ["run", "--tier-file", "BASE/manifests/bad.yaml", "--", "true"], lambda host: host.write("bad.yaml", "{")),
    (4, ["run", "--tier", "chat", "--", "true"], None),
    (4, ["run", "--tier-file", "BASE/empty.yaml", "--", "true"], lambda host: (host.base / "empty.yaml").touch()),
    (4, ["run", "--tier-file", "BASE/nofile.yaml", "--", "true"], None),
    (4, ["receipts", "list"], None),
    (4, ["receipts", "list", "--tier", "nope"], lambda host: _used(host)),
    (4, ["receipts", "export", "BASE/nowhere/chain"], lambda host: _used(host)),
    (4, ["receipts", "verify", "/dev/null", "--public-key", "BASE/node.pub"], None),
    (5, ["receipts", "export", "BASE/manifests/chat.yaml"], lambda host: _used(host)),
    (10, ["node", "--listen", "off", "--state-dir", "/proc/kvtier"], None),
    (4, ["erase", "chat", "--reason", "x", "--yes"], None),
    (5, ["run", "--tier", "chat", "--", "true"], lambda host: host.declare("chat", path="/nowhere/chat", **SEALED)),
    (6, ["run", "--tier", "chat", "--", "true"], _foreign),
    (7, ["run", "--tier", "chat", "--", "true"], lambda host: host.declare("chat", sizePerRank="900Ti", **SEALED)),
    (9, ["node", "--listen", "off"], lambda host: host.node()),
    (12, ["status"], _damaged),
    (13, ["receipts", "verify", "BASE/chain"], _forged),
    (126, ["run", "--tier", "chat", "--", "/etc/passwd"], lambda host: host.declare("chat", **SEALED)),
    (127, ["run", "--tier", "chat", "--", "no-such-program"], lambda host: host.declare("chat", **SEALED)),
    (137, ["run", "--tier", "chat", "--", "sh", "-c", "kill -9 $$"], lambda host: host.declare("chat", **SEALED)),
]


@pytest.mark.parametrize(("code", "arguments", "prepare"), EXIT_CODES, ids=_id)
def test_each_failure_has_its_exit_code_and_no_traceback(
    host: Host, code: int, arguments: list[str], prepare: object
) -> None:
    if callable(prepare):
        prepare(host)
    done = host.kvtier(*(word.replace("BASE", str(host.base)) for word in arguments))
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if 3 <= code <= 12:
        assert re.search(r"^error: .+\n  object: .+\n  remedy: .+$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said", "not_said"),
    [
        (["status", "-o", "xml"], "'xml' is not one of 'table', 'json', 'yaml'", "Value error"),
        (["run", "--tier-file", "BASE/empty.yaml", "--", "true"], "remedy: write a KVCacheTier manifest", "names in it"),
        (["run", "--tier-file", "BASE/manifests/chat.yaml", "--tier", "x", "--", "true"], "remedy: one of: default/chat", ""),
        (["node", "--state-dir", "/proc/kvtier"], "remedy: give --state-dir", "start 'kvtier node' once"),
        (["receipts", "export", "BASE/manifests/chat.yaml"], "is there already", ""),
        (["receipts", "export", "BASE/nowhere/chain"], "its directory does not exist", "new file"),
        (["receipts", "list", "--tier", "nope"], "remedy: one of: default/chat", ""),
        (["receipts", "verify", "/dev/null", "--public-key", "BASE/node.pub"], "no file of this name", ""),
    ],
    ids=_id,
)  # fmt: skip
def test_a_mistake_is_named_as_what_it_is(host: Host, arguments: list[str], said: str, not_said: str) -> None:
    _used(host)
    (host.base / "empty.yaml").touch()
    done = host.kvtier(*(word.replace("BASE", str(host.base)) for word in arguments))
    assert done.returncode != 0
    assert said in done.stderr
    assert not not_said or not_said not in done.stderr


def test_no_backend_is_exit_code_8_with_each_ones_reason() -> None:
    with standalone_host(65534 if os.geteuid() == 0 else None) as host:
        host.declare("chat", encryption={"backend": "Fscrypt"})
        done = host.kvtier("run", "--tier", "chat", "--", "true")
    assert done.returncode == 8, done.stderr
    assert "needs root" in done.stderr


def test_the_exit_codes_are_those_of_the_tree_and_do_not_change() -> None:
    kinds = {name: getattr(errors, name).exit_code for name in errors.__all__}
    assert kinds == {
        "KvtierError": 1, "UsageError": 2, "InvalidResource": 3, "NotFound": 4, "NotPermitted": 5, "UnsafePath": 5,
        "ForeignData": 6, "InsufficientSpace": 7, "BackendUnavailable": 8, "Busy": 9, "KernelError": 10,
        "EraseIncomplete": 11, "LedgerError": 12, "VerificationFailed": 13, "EngineError": 14,
    }  # fmt: skip


@pytest.mark.parametrize("debug", [False, True])
def test_a_defect_is_one_line_and_a_traceback_only_on_demand(debug: bool) -> None:
    code = (
        "import sys, kvtier_cli.status as status\n"
        "def broken(*a, **k): raise ZeroDivisionError('oops')\n"
        "status._gather = broken\n"
        "from kvtier_cli.main import main\n"
        f"sys.argv = ['kvtier', *{['--debug'] if debug else []}, 'status']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == ((1, True) if debug else (70, False))
    assert "oops" in done.stderr


def test_the_state_directory_of_another_user_is_an_error_and_not_an_empty_answer(host: Host) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to have another user")
    host.declare("chat", **SEALED)
    host.kvtier("run", "--tier", "chat", "--", "true")
    other = Host(host.base, 65534)
    done = other.kvtier("status")
    assert done.returncode == 5, done.stderr


# -- output for programs


@pytest.fixture
def used(host: Host) -> Host:
    host.declare("chat", **SEALED)
    assert host.kvtier("run", "--tier", "chat", "--", "true").returncode == 0
    return host


@pytest.mark.parametrize(
    "command", [("status",), ("status", "chat"), ("receipts", "list"), ("receipts", "show", "1"), ("receipts", "verify")],
    ids=" ".join,
)  # fmt: skip
def test_json_and_yaml_say_the_same_and_stdout_holds_nothing_else(used: Host, command: tuple[str, ...]) -> None:
    from_json = json.loads(used.kvtier(*command, "-o", "json").stdout)
    from_yaml = yaml.safe_load(used.kvtier(*command, "-o", "yaml").stdout)
    assert from_json == from_yaml
    assert used.kvtier(*command).stdout


def test_status_of_a_host_where_nothing_ran_shows_what_is_declared(host: Host) -> None:
    host.declare("chat", **SEALED)
    found = host.json("status")
    assert [tier["metadata"]["name"] for tier in found["tiers"]] == ["chat"]
    assert (found["volumes"], found["node"]["running"]) == ([], None)
    assert not host.state.exists()


def test_status_says_which_node_runs(used: Host) -> None:
    node = used.node()
    assert used.json("status")["node"]["running"] == node.pid
    node.sigkill()
    assert used.json("status")["node"]["running"] is None


def test_a_receipt_is_shown_with_its_steps_and_what_it_does_not_cover(used: Host) -> None:
    text = used.kvtier("receipts", "show", "1").stdout
    assert "process-death" in text
    assert "Not covered" in text
    receipt = used.receipts()[0]
    for name in (receipt["id"], receipt["volume_id"]):
        assert json.loads(used.kvtier("receipts", "show", name, "-o", "json").stdout) == receipt


# -- verification away from the node


def test_an_exported_chain_verifies_without_a_state_directory(used: Host) -> None:
    chain = used.base / "chain.jsonl"
    exported = used.kvtier("receipts", "export", str(chain))
    key = exported.stderr.split()[-1]
    away = {"KVTIER_STATE_DIR": "/nonexistent"}
    done = used.kvtier("receipts", "verify", str(chain), "--public-key", key, "-o", "json", env=away)
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"], found["key_pinned"], found["count"]) == (0, True, True, 1)
    head = found["head"]
    assert used.kvtier("receipts", "verify", str(chain), "--expect-head", head, env=away).returncode == 0
    assert used.kvtier("receipts", "verify", str(chain), "--expect-head", "0" * 64, env=away).returncode == 13
    assert used.kvtier("receipts", "verify", str(chain), "--public-key", "0" * 64, env=away).returncode == 13
    assert used.kvtier("receipts", "export", str(chain)).returncode == 5  # an existing file stays


@pytest.mark.root
def test_an_export_onto_a_full_disk_leaves_no_part_of_a_chain(used: Host) -> None:
    need_root()
    full = used.base / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4096", "none", str(full)], check=True)
    (full / "filler").write_bytes(b"x" * 4096)
    done = used.kvtier("receipts", "export", f"{full}/chain")
    assert (done.returncode, "cannot be written: No space left" in done.stderr) == (10, True), done.stderr
    assert [path.name for path in full.iterdir()] == ["filler"]


def test_the_examples_of_the_help_verify_a_chain_as_they_are_written(used: Host) -> None:
    examples = re.findall(r"\$ kvtier (receipts .*)", used.kvtier("receipts", "verify", "--help").stdout)
    assert len(examples) == 3
    for example in examples:
        done = used.kvtier(*example.split(), cwd=used.base)
        assert done.returncode == 0, done.stderr
    assert "verified" in done.stdout
    assert "pin it" not in done.stdout
    used.kvtier("run", "--tier", "chat", "--", "true")  # a later chain, under the key that was kept
    again = used.kvtier("receipts", "export", "later.jsonl", "--public-key", "node.pub", cwd=used.base)
    assert again.returncode == 0, again.stderr
    (used.base / "node.pub").write_text("0" * 64)
    other = used.kvtier("receipts", "export", "last.jsonl", "--public-key", "node.pub", cwd=used.base)
    assert other.returncode == 5
    assert (used.base / "node.pub").read_text() == "0" * 64
    assert not (used.base / "last.jsonl").exists()


def test_a_pipe_from_export_to_verify_works(used: Host) -> None:
    exported = used.kvtier("receipts", "export")
    done = used.kvtier("receipts", "verify", "-", input=exported.stdout, stdin=None)
    assert done.returncode == 0, done.stderr
    cut = used.kvtier("receipts", "verify", "-", input=exported.stdout.splitlines(keepends=True)[0], stdin=None)
    assert cut.returncode == 13
    assert "the head line is missing" in cut.stdout


def test_the_ledgers_own_chain_is_verified_under_the_nodes_key(used: Host) -> None:
    found = used.json("receipts", "verify")
    assert (found["ok"], found["key_pinned"]) == (True, True)


def test_a_text_log_has_colours_on_a_terminal_only_and_not_with_no_color(host: Host) -> None:
    import pty

    def log_of(no_color: str) -> bytes:
        ours, theirs = pty.openpty()
        node = subprocess.Popen(
            [*KVTIER, *TEXT_NODE],
            env=host.env | {"NO_COLOR": no_color}, stdin=subprocess.DEVNULL, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        said = b""
        try:
            while b"ready" not in said:
                said += os.read(ours, 1000)
        finally:
            node.kill()
            node.wait()
            os.close(ours)
        return said

    assert b"\x1b[" in log_of("")
    assert b"\x1b[" not in log_of("1")
    node = host.start(*TEXT_NODE)
    wait_for(lambda: "ready" in node.text(), "the log")
    assert "\x1b" not in node.text()


def test_the_unit_starts_the_command_that_is_here_and_waits_for_its_word() -> None:
    unit = (Path(__file__).parents[2] / "docs" / "kvtier-node.service").read_text()
    assert "ExecStart=/usr/bin/env kvtier node\n" in unit
    assert "Type=notify\n" in unit
    assert "LimitCORE=0\n" in unit


def test_systemd_is_told_after_recovery_and_before_the_end(host: Host) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(host.base / "notify"))
        receiver.settimeout(60)
        node = host.start("node", "--listen", "off", env={"NOTIFY_SOCKET": str(host.base / "notify")})
        assert receiver.recv(100) == b"READY=1"
        node.popen.terminate()
        assert receiver.recv(100) == b"STOPPING=1"
