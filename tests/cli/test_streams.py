"""stdout that nobody reads, or that is full: an exit code of its own, and never a defect of kvtier's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from standalone import KVTIER, Host, standalone_host

COMMANDS = [
    ("--help",),
    ("--version",),
    ("run", "--help"),
    ("status",),
    ("status", "-o", "json"),
    ("status", "-o", "yaml"),
    ("receipts", "list"),
    ("receipts", "export"),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with standalone_host() as it:
        it.declare("chat", encryption={"backend": "SealOnly"})
        assert it.kvtier("run", "--tier", "chat", "--", "true").returncode == 0
        yield it


def told(host: Host, command: tuple[str, ...], stdout: int) -> tuple[int, str]:
    done = subprocess.run(
        [*KVTIER, *command], env=host.env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, timeout=60,
        text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_pipe_that_nobody_reads_is_exit_code_141_and_nothing_is_said(host: Host, command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert told(host, command, writer) == (141, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_full_disk_below_stdout_is_named_and_is_no_defect(host: Host, command: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, text = told(host, command, full)
    finally:
        os.close(full)
    assert code == 10, text
    assert "error: the output cannot be written: No space left on device\n  object: stdout\n  remedy: " in text
    assert "defect" not in text


def test_a_usage_error_keeps_its_exit_code_where_nobody_reads_stderr(host: Host) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([*KVTIER, "no-such-command"], env=host.env, stderr=writer, timeout=60, check=False)
    finally:
        os.close(writer)
    assert done.returncode == 2
