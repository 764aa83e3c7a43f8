"""What a hostile consumer, a bad clock or a damaged record did to the guarantees, once: each was an exploit that worked."""

from __future__ import annotations

import dataclasses
import os
import resource
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_api.errors import EraseIncomplete, InvalidResource, UnsafePath
from kvtier_api.volume import VolumeState
from kvtier_node import slots
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.event_log import configure
from kvtier_node.guarding import fulfil_requests, in_scope, look
from kvtier_node.ledger import ABANDON
from kvtier_node.live import LiveVolume
from kvtier_node.provisioning import start
from kvtier_node.recovery import guard
from kvtier_node.shared_memory import DIRECTORY, SharedMemoryWatch
from kvtier_node.threads import Threads
from kvtier_node.volume_watch import VolumeWatch
from node_host import CANARY, Consumer, Host, eventually

pytestmark = pytest.mark.root
NOBODY = 65534


def as_nobody(host: Host, live: LiveVolume, monkeypatch: pytest.MonkeyPatch) -> Consumer:
    """A consumer of another user, with the system's interpreter: ours may be in root's home."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/usr/bin/python3")
        consumer = host.consumer(live, user=NOBODY, group=NOBODY, extra_groups=[])
    consumer.do("pass")
    start(host.node, live, ProcessConsumer.of(consumer.pid))
    return consumer


# ForeignData never touched


@pytest.mark.parametrize("how", ["os.O_PATH", "os.O_RDONLY"])
def test_foreign_data_another_users_region_is_not_erased_because_the_consumer_opened_it(
    host: Host, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = Path(DIRECTORY, f"vllm_offload_{secrets.token_hex(8)}.mmap")
    host.shared.append(region)
    region.write_bytes(CANARY)
    region.chmod(0o600 if how == "os.O_PATH" else 0o644)
    live = host.provision(host.tier("SealOnly", ranks=1), uid=NOBODY, gid=NOBODY)
    consumer = as_nobody(host, live, monkeypatch)
    consumer.do(f"keep['fd'] = os.open({str(region)!r}, {how})")
    assert look(host.node, live).in_use
    consumer.kill()
    assert look(host.node, live).receipt is not None
    assert region.read_bytes() == CANARY


def test_foreign_data_no_tier_is_made_inside_a_volume_and_erased_with_it(host: Host) -> None:
    outer, _ = host.in_use(host.tier("SealOnly", ranks=1))
    for place in (f"{outer.row.place}/b", f"{outer.slots_path}/b"):
        with pytest.raises(InvalidResource, match="lies below"):
            host.provision(host.tier("SealOnly", ranks=1, name="b", path=Path(place)))
        with pytest.raises(UnsafePath, match="inside a volume"):  # also where nobody knows of the outer tier
            host.node.places.tier_directory(place, create=True)
        assert not os.path.exists(place)


# Crash-erase


@pytest.fixture
def chain() -> Iterator[int]:
    """A process below a process, 300 deep; the first one's pid."""
    code = "import os, time\nfor _ in range(300):\n    if os.fork(): break\nelse: print(flush=True)\ntime.sleep(600)"
    process = subprocess.Popen(["/usr/bin/python3", "-S", "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()  # the last one is there
    yield process.pid
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


def test_crash_erase_a_deep_tree_of_processes_neither_ends_nor_slows_its_guardian(
    chain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    real = os.listdir
    watch = SharedMemoryWatch()
    watch.look(chain)
    monkeypatch.setattr(os, "listdir", lambda path: (looked.append(str(path)), real(path))[1])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        watch.look(chain)
    finally:
        sys.setrecursionlimit(limit)
    tasks = [path for path in looked if path.endswith("/task")]
    assert len(tasks) > 300
    assert len(tasks) == len(set(tasks))


def test_crash_erase_more_files_than_descriptors_keep_no_volume_from_being_erased(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1))
    consumer.do("for i in range(150): os.close(os.open(f'{slots}/f{i}', os.O_RDWR | os.O_CREAT))")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 90, hard))
    try:
        assert look(host.node, live).error is None
        consumer.do("keep['fd'] = os.open(f'{slots}/f149', os.O_RDWR)\nif os.fork() == 0: time.sleep(600)")
        consumer.kill()
        assert look(host.node, live).in_use  # what no descriptor is kept of is asked for all the same
        os.killpg(consumer.pid, 9)
        eventually("the fork's end", lambda: not look(host.node, live).in_use)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED


@pytest.mark.parametrize("how", ["too deep to be seen", "no descriptors to look with"])
def test_crash_erase_nothing_is_overwritten_under_a_process_that_no_look_could_see(
    host: Host, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1))
    folder = "'/d' * 40" if how.startswith("too deep") else "''"
    consumer.do(f"""
        path = slots + {folder}
        os.makedirs(path, exist_ok=True)
        fd = os.open(path + "/file", os.O_RDWR | os.O_CREAT)
        if os.fork() == 0:
            time.sleep(600)
    """)
    consumer.kill()
    if how.startswith("no descriptors"):
        host.drop_guardians()

        def fail(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(slots, "_open_to_look", fail)
            taken = guard(host.node, host.node.ledger.get(live.volume_id))
        assert taken is not None and taken.watch is None
        live = taken
        host.lives.append(live)
    seen = look(host.node, live)
    assert seen.receipt is None
    assert isinstance(seen.error, EraseIncomplete) and "another process has it open" in str(seen.error)
    os.killpg(consumer.pid, 9)
    eventually("the erasure after its end", lambda: look(host.node, live).receipt)


def test_crash_erase_who_stands_in_a_subdirectory_makes_no_more_files_behind_the_fence(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = host.provision(host.tier("SealOnly", ranks=1), uid=NOBODY, gid=NOBODY)
    consumer = as_nobody(host, live, monkeypatch)
    consumer.do("""
        os.mkdir(slots + "/sub")
        if os.fork() == 0:
            os.chdir(slots + "/sub")
            n = 0
            while True:
                n += 1
                try:
                    with open(f"f{n}", "wb") as file: file.write(b"PLAINTEXT" * 2000)
                except OSError:
                    pass
                time.sleep(0.2)
    """)
    consumer.kill()
    eventually("a file of the fork's", lambda: os.path.exists(f"{live.slots_path}/sub/f2"))
    eventually("a look between two of its files", lambda: not look(host.node, live).in_use)
    receipt = eventually(
        "the receipt", lambda: next(iter(host.node.ledger.receipts()), None) or look(host.node, live).receipt
    )
    step = next(step for step in receipt.steps if step.name == "read-back-after-overwrite")
    assert step.ok, step.detail
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED


def test_crash_erase_a_volume_in_use_is_not_abandoned_by_the_node_that_guards_it(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1))
    request = host.node.ledger.add_request("default/demo", ABANDON, "by mistake", argument=live.volume_id)
    watch = VolumeWatch(host.node, live, log=configure(), requests=host.node.ledger.open_requests, threads=Threads())
    assert not watch._turn().ended
    assert host.node.ledger.get(live.volume_id).state is VolumeState.IN_USE
    [closed] = [item for item in host.node.ledger.requests() if item.id == request.id]
    assert closed.state == "Failed" and "in use" in str(closed.result)
    consumer.kill()
    assert watch._turn().ended
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED


def test_crash_erase_a_consumers_record_that_anybody_wrote_does_not_end_the_recovery(host: Host) -> None:
    texts = ['{"kind": "process"}', '{"kind": "process", "pid": "x"}', "[1]", "[" * 100_000, '{"kind": "pod"}',
             '{"kind": "process", "pid": 1e999, "start_time": 1, "boot_id": "b"}']  # fmt: skip
    places = []
    for number, text in enumerate(texts):
        live = host.provision(host.tier("SealOnly", ranks=1, size="1Mi", name=f"t{number}"))
        consumer = host.consumer(live)
        start(host.node, live, ProcessConsumer.of(consumer.pid))
        consumer.kill()
        record = Path(live.row.place, "consumer.json")
        record.write_text(text)
        places.append(live.row.place)
    host.drop_guardians()
    host.node.ledger.close()
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        Path(host.state, name).unlink(missing_ok=True)
    host.reopen()
    found = host.recover()
    assert found.failed == []
    assert len(found.erased) == len(texts)
    assert not any(os.path.exists(place) for place in places)


# Honest


def test_honest_a_clock_that_was_set_back_puts_no_volume_out_of_a_requests_scope(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt", ranks=1))
    monkeypatch.setattr("kvtier_node.ledger.book.utc_now", lambda: "2001-01-01T00:00:00.000000Z")
    request = host.node.ledger.add_request("default/demo", "All", "customer left")
    monkeypatch.undo()
    assert in_scope(request, live.row)
    assert fulfil_requests(host.node, [live])
    assert consumer.process.wait(10) != 0
    assert host.node.ledger.get(live.volume_id).state is VolumeState.ERASED


@pytest.mark.parametrize("again", [False, True], ids=["the same agent", "after a start"])
def test_honest_a_clock_that_was_set_back_takes_no_later_volume_into_a_requests_scope(
    host: Host, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = host.tier("SealOnly", ranks=1)
    live, consumer = host.in_use(tier)
    consumer.do("keep['fd'] = os.open(f'{slots}/slot.rank_0', os.O_RDWR)\nif os.fork() == 0: time.sleep(600)")
    host.node.ledger.add_request("default/demo", "All", "customer left")
    assert fulfil_requests(host.node, [live]) == [], "what it forked holds it: the request stays open"
    for module in ("ledger.book", "provisioning"):
        monkeypatch.setattr(f"kvtier_node.{module}.utc_now", lambda: "2001-01-01T00:00:00.000000Z")
    later, other = host.in_use(tier)
    monkeypatch.undo()
    assert host.node.ledger.get(later.volume_id).created_at < host.node.ledger.get(live.volume_id).created_at
    if again:
        host.reopen()
        live, later = host.recover().adopted
    [request] = host.node.ledger.open_requests()
    assert in_scope(request, live.row) and not in_scope(request, later.row)
    os.killpg(consumer.pid, 9)
    eventually("the end of the request", lambda: fulfil_requests(host.node, [live, later]))
    assert host.node.ledger.open_requests() == []
    assert other.process.poll() is None
    assert host.node.ledger.get(later.volume_id).state is VolumeState.IN_USE


def test_honest_a_request_of_a_version_that_noted_no_order_goes_by_time(host: Host) -> None:
    live = host.provision(host.tier("SealOnly", ranks=1))
    request = dataclasses.replace(host.node.ledger.add_request("default/demo", "All", "customer left"), after=None)
    assert in_scope(request, live.row)
    assert not in_scope(request, dataclasses.replace(live.row, created_at="2999-01-01T00:00:00.000000Z"))


def test_honest_what_is_erased_is_not_reported_as_failed_for_a_strangers_file_beside_it(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1))
    junk = Path(live.row.place, "junk")
    junk.write_text("somebody's")
    consumer.kill()
    seen = look(host.node, live)
    assert seen.receipt is not None and seen.error is None
    assert junk.read_text() == "somebody's"
    assert any(event.reason == "ForeignData" and event.object == live.row.place for event in host.node.ledger.events())
    assert not os.path.exists(f"{host.state}/volumes/{live.volume_id}.lock")
    shutil.rmtree(live.row.place)
