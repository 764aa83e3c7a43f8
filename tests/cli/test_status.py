"""`kvtier status` says what is so now: nothing of a node that has ended, nothing of a ledger that this user cannot read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from requirements import need_root
from standalone import Host, has_ended, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}
UNPRIVILEGED = """
import asyncio, importlib, os, pkgutil, sys
import encodings.ascii, encodings.utf_8_sig, encodings.idna, encodings.latin_1, rich.console, rich.table, yaml
import kvtier_api, kvtier_cli, kvtier_node.kernel
for package in (kvtier_api, kvtier_cli, kvtier_node, kvtier_node.kernel):  # the interpreter may lie in root's home
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
sys.argv = ["kvtier", *sys.argv[1:]]
kvtier_cli.main.main()
"""


@pytest.fixture(scope="module")
def roots_host() -> Iterator[Host]:
    """With two state directories of root's: one that is closed itself, and one below a directory that is."""
    need_root()
    with standalone_host() as it:
        it.declare("chat", **SEALED)
        (it.base / "private").mkdir(mode=0o700)
        for state in ("state", "private/state"):
            done = it.kvtier("run", "--tier", "chat", "--state-dir", f"{it.base}/{state}", "--", "true")
            assert done.returncode == 0, done.stderr
        yield it


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        it.declare("chat", **SEALED)
        yield it


# -- another user's state directory


@pytest.mark.root
@pytest.mark.parametrize("state", ["state", "private/state"])
@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["status", "chat"],
        ["receipts", "list"],
        ["receipts", "show", "1"],
        ["receipts", "verify"],
        ["receipts", "export"],
        ["erase", "chat", "--reason", "x", "--yes"],
        ["run", "--tier", "chat", "--", "true"],
        ["node", "--listen", "off"],
    ],
    ids=" ".join,
)
def test_a_user_who_cannot_read_the_state_directory_is_told_so_by_every_command(
    roots_host: Host, command: list[str], state: str
) -> None:
    where = f"{roots_host.base}/{state}"
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, *command], env=roots_host.env | {"KVTIER_STATE_DIR": where}, cwd="/",
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 5, done.stdout + done.stderr
    assert where.startswith(done.stderr.split("object: ")[1].split("\n")[0])
    assert done.stdout == ""


# -- without a living node


def in_json(host: Host, name: str) -> dict[str, Any]:
    conditions = host.json("status", "chat")["tiers"][0]["status"]["conditions"]
    return next(item for item in conditions if item["type"] == name)


def conditions_of(host: Host) -> dict[str, dict[str, Any]]:
    """As JSON says them while nobody measures; YAML and the table must say the same."""
    found = host.json("status", "chat")["tiers"][0]
    from_yaml = yaml.safe_load(host.kvtier("status", "chat", "-o", "yaml").stdout)["tiers"][0]
    assert from_yaml["status"]["conditions"] == found["status"]["conditions"]
    conditions = {item["type"]: item for item in found["status"]["conditions"]}
    table = host.kvtier("status", "chat").stdout
    for item in conditions.values():
        assert any(line.split()[:3] == [item["type"], item["status"], item["reason"]] for line in table.splitlines())
    return conditions


def row_of(host: Host) -> dict[str, str]:
    """The tier's line in the table, by column."""
    lines = host.kvtier("status").stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("TIER"))
    names = [name.strip() for name in lines[start].split("  ") if name.strip()]
    cells = [cell.strip() for cell in lines[start + 2].split("  ") if cell.strip()]
    return dict(zip(names, cells, strict=True))


def test_after_a_sigkill_of_node_run_and_consumer_no_condition_is_shown_as_of_now(host: Host) -> None:
    node = host.node()
    run, told, pid = host.run("chat", "sleep 600")
    seen = host.wait_condition("chat", "Scrubbed", "True", "NothingLeft")
    wait_for(lambda: host.condition("chat", "Provisioned").get("status") == "True", "a measurement")
    assert in_json(host, "Scrubbed") == seen  # while it lives, its word counts
    for process in (node, run):
        process.sigkill()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: has_ended(pid), "the consumer's end")

    found = conditions_of(host)
    assert {item["status"] for item in found.values()} == {"Unknown"}
    assert {item["reason"] for item in found.values()} == {"NodeUnreachable"}
    message = found["Scrubbed"]["message"]
    assert message.startswith("no 'kvtier node' runs; as of 20")
    assert "True (NothingLeft)" in message

    volume = host.json("status")["volumes"][0]
    assert (volume["volume"], volume["consumerLives"]) == (told["KVTIER_VOLUME_ID"], False)
    done = host.kvtier("status")
    assert f"pid {pid} (has ended)" in done.stdout
    assert "1 volume of ended consumers" in done.stderr
    assert (row_of(host)["READY"], row_of(host)["IN USE"]) == ("Unknown", "1")


def test_counts_and_the_last_erasure_are_the_ledgers_when_only_the_node_was_killed(host: Host) -> None:
    node = host.node()
    run, told, _ = host.run("chat", "while [ ! -e $NOTE/end ]; do sleep 0.1; done")
    assert host.volume(told["KVTIER_VOLUME_ID"])["consumerLives"] is True
    wait_for(lambda: json.loads(host.status_file("chat").read_text())["status"]["volumes"]["inUse"] == 1, "the count")
    node.sigkill()
    (next(host.base.glob("notes-*")) / "end").touch()
    assert run.popen.wait(60) == 0

    status = host.json("status")["tiers"][0]["status"]
    receipt = host.receipts()[-1]
    assert (status["volumes"]["total"], status["volumes"]["inUse"], status["residualBytes"]) == (0, 0, 0)
    assert status["lastErasure"]["receiptId"] == receipt["id"]
    assert (row_of(host)["VOLUMES"], row_of(host)["IN USE"]) == ("0", "0")
    assert host.json("status")["volumes"] == []


def test_the_last_erasure_is_shown_where_no_node_ever_ran(host: Host) -> None:
    assert host.kvtier("run", "--tier", "chat", "--", "true").returncode == 0
    receipt = host.receipts()[0]
    assert host.json("status")["tiers"][0]["status"]["lastErasure"]["receiptId"] == receipt["id"]
    assert row_of(host)["LAST ERASURE"] == receipt["end"]
    assert "1 receipt;" in host.kvtier("status").stdout


def test_a_node_that_has_not_written_its_status_yet_does_not_vouch_for_the_last_ones(host: Host) -> None:
    host.node()
    written = host.wait_condition("chat", "Scrubbed", "True", "NothingLeft")
    assert in_json(host, "Scrubbed") == written
    lock = (host.state / "node.lock").stat()
    os.utime(host.state / "node.lock", ns=(lock.st_atime_ns, lock.st_mtime_ns + 10**12))  # as of a later start
    found = in_json(host, "Scrubbed")
    assert (found["status"], found["reason"]) == ("Unknown", "NodeUnreachable")
    assert "has not written its status yet" in found["message"]


def test_yaml_of_a_tier_begins_as_people_write_it(host: Host) -> None:
    found = yaml.safe_load(host.kvtier("status", "-o", "yaml").stdout)["tiers"][0]
    assert list(found)[:4] == ["apiVersion", "kind", "metadata", "spec"]


def test_a_tier_whose_volumes_have_all_ended_can_still_be_asked_for_and_no_other(host: Host) -> None:
    file = host.declare("once", **SEALED)
    aside = host.base / "once.yaml"
    file.rename(aside)
    assert host.kvtier("run", "--tier-file", str(aside), "--", "true").returncode == 0
    assert [item["state"] for item in host.json("status", "once", "--all")["volumes"]] == ["Erased"]
    assert host.json("status", "once")["volumes"] == []
    done = host.kvtier("status", "never")
    assert done.returncode == 4
    assert "one of: default/chat, default/once" in done.stderr
