"""Record-before-write: a place is on durable record, in ledger and place, before the first byte can be written there.

At each arrow of a volume's life the process is killed as soon as the arrow is durable, before its effect. Recovery, in a fresh
process, finishes what it finds: every place ends `Erased` with a receipt.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvtier_api.volume import VolumeState
from kvtier_node.receipts import read_place
from node_host import CANARY, Host
from requirements import need_tool

pytestmark = pytest.mark.root

LIFE = """
import os, signal, sys
from kvtier_api.documents import load_documents
from kvtier_api.erasure import Trigger
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import erase
from kvtier_node.provisioning import provision, start
from kvtier_node.recovery import open_node
state, root, manifest, fatal, canary = sys.argv[1:]

def observer(transition):
    if transition.after == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

node = open_node(state, [root], name="node-a", observers=[observer])
live = provision(node, load_documents(manifest)[0], uid=0, gid=0)
start(node, live, ProcessConsumer.of(os.getpid()))
with open(f"{live.slots_path}/slot.rank_0", "r+b") as file:
    file.write(canary.encode() * 1000)
    os.fsync(file.fileno())
erase(node, live, Trigger.EXIT)
"""
ARROWS = ["Planned", "Provisioning", "Ready", "InUse", "Dying", "Erasing", "Erased"]


def live_and_die(host: Host, backend: str, fatal: str) -> None:
    manifest = host.tier(backend).model_dump_json(by_alias=True, exclude_none=True)
    host.node.ledger.close()
    done = host.python(LIFE, host.state, str(host.root), manifest, fatal, CANARY.decode(), check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    host.reopen()


@pytest.mark.parametrize("backend", ["Fscrypt", "SealOnly"])
@pytest.mark.parametrize("fatal", ARROWS)
def test_sigkill_at_an_arrow_leaves_the_place_on_record_and_recovery_ends_it_erased(
    host: Host, fatal: str, backend: str
) -> None:
    live_and_die(host, backend, fatal)
    [row] = host.node.ledger.volumes()
    assert row.state == fatal
    place = Path(row.place)
    if fatal in ("Planned", "Provisioning"):
        assert not place.exists(), "the effect came before its record"
    elif fatal != "Erased":
        record = read_place((place / "place.json").read_bytes(), host.node.identity.public_key)
        assert (record.volume_id, record.place) == (row.volume_id, row.place)
    host.node.ledger.close()
    found = host.recover_elsewhere()
    assert found["failed"] == [] and found["adopted"] == []
    expected = [] if fatal == "Erased" else [row.volume_id]
    assert [volume_id for volume_id, *_ in found["erased"]] == expected
    host.reopen()
    assert host.node.ledger.get(row.volume_id).state is VolumeState.ERASED
    assert [receipt.volume_id for receipt in host.node.ledger.receipts()] == [row.volume_id]
    assert os.listdir(host.root / "demo") == []
    assert host.mounts() == [] and host.loops() == []
    if expected:
        [(_, trigger, technique)] = found["erased"]
        assert trigger == {"InUse": "Crash", "Dying": "Exit", "Erasing": "Exit"}.get(fatal, "Restart")
        if fatal in ("Planned", "Provisioning"):
            assert technique == "Nothing"
        elif fatal in ("Dying", "Erasing") and backend == "SealOnly":
            assert technique == "Overwrite", "the canary was not sealed"
    assert host.recover_elsewhere()["erased"] == [], "a second recovery finds nothing to do"


def test_every_record_is_on_the_disk_before_the_first_effect_that_it_records(host: Host) -> None:
    """The kernel's own order of calls: ledger, directory, place.json (renamed and fsynced), image, mount, slot files."""
    trace = host.base / "trace"
    manifest = host.tier("Fscrypt").model_dump_json(by_alias=True, exclude_none=True)
    code = LIFE.split("start(node", maxsplit=1)[0]
    host.node.ledger.close()
    subprocess.run(
        [need_tool("strace"), "-f", "-qq", "-y", "-s", "200", "-o", str(trace),
         "-e", "trace=fdatasync,fsync,mkdirat,mkdir,rename,renameat,renameat2,openat2,mount,ioctl",
         sys.executable, "-c", textwrap.dedent(code), host.state, str(host.root), manifest, "never", "x"],
        check=True, timeout=120,
    )  # fmt: skip
    lines = trace.read_text().splitlines()

    def first(pattern: str, after: int = -1) -> int:
        found = [number for number, line in enumerate(lines) if number > after and re.search(pattern, line)]
        assert found, f"no call matches {pattern}"
        return found[0]

    made = first(r'mkdir(at)?\(.*"kvv-[0-9a-f]{20}"')
    ledger = [
        number for number, line in enumerate(lines[:made]) if re.search(r"f(data)?sync\(\d+<.*ledger\.db-wal>", line)
    ]
    assert len(ledger) >= 2, "Planned and Provisioning"
    renamed = first(r'rename.*"\.place\.json\.[0-9a-f]+\.tmp".*"place\.json"')
    content = [
        number for number, line in enumerate(lines[:renamed]) if re.search(r"fsync\(\d+<.*\.place\.json\.", line)
    ]
    assert content, "the record's content is durable before its name"
    assert made < content[0] < renamed
    directory = first(r"fsync\(\d+<.*/kvv-[0-9a-f]{20}>\)", renamed)
    above = first(r"fsync\(\d+<.*/tiers/demo>\)", renamed)
    image = first(r'openat2\(.*"volume\.img".*O_CREAT')
    mounted = first(r"^\d+ +mount\(\"/dev/loop")
    slots = first(r'openat2\(.*"slot\.rank_0".*O_CREAT')
    assert max(directory, above) < image < mounted < slots


def test_the_consumer_is_on_record_before_it_can_run(host: Host) -> None:
    """`run_fenced` is killed at the arrow to InUse: the command never starts."""
    manifest = host.tier("SealOnly").model_dump_json(by_alias=True, exclude_none=True)
    code = """
    import os, signal, sys
    from kvtier_api.documents import load_documents
    from kvtier_node.recovery import open_node
    from kvtier_node.run import run_fenced
    def observer(transition):
        if transition.after == sys.argv[4]:
            os.kill(os.getpid(), signal.SIGKILL)
    node = open_node(sys.argv[1], [sys.argv[2]], name="node-a", observers=[observer])
    run_fenced(node, load_documents(sys.argv[3])[0], ["touch", sys.argv[5]])
    """
    for fatal in ("Planned", "Provisioning", "Ready", "InUse"):
        started = host.base / f"started-{fatal}"
        done = host.python(code, host.state, str(host.root), manifest, fatal, str(started), check=False)
        assert done.returncode == -signal.SIGKILL
        host.reopen()
        host.recover()
        assert not started.exists(), fatal
    states = {row.state for row in host.node.ledger.volumes()}
    assert states == {VolumeState.ERASED}
    rows = host.node.ledger.volumes()
    assert [row.consumer is not None for row in rows] == [False, False, False, True]


def test_a_kill_between_the_arrow_and_its_next_is_told_by_the_transitions(host: Host) -> None:
    live_and_die(host, "SealOnly", "Ready")
    host.recover()
    [row] = host.node.ledger.volumes()
    told = [transition.after for transition in host.node.ledger.transitions(row.volume_id)]
    assert told == ["Planned", "Provisioning", "Ready", "Erasing", "Erased"]
    assert json.loads(host.node.ledger.receipt_lines()[0])["trigger"] == "Restart"
