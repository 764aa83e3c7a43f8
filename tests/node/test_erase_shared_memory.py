"""/dev/shm/vllm_offload_*: erased after its consumer's end if the kernel showed it in that consumer's process tree; else left."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_node.guarding import look
from kvtier_node.live import LiveVolume
from kvtier_node.receipts import Receipt, Step
from kvtier_node.shared_memory import DIRECTORY, FACT
from node_host import CANARY, Consumer, Host, eventually

pytestmark = pytest.mark.root


def shared(receipt: Receipt) -> Step | None:
    return next((step for step in receipt.steps if step.name == "shared-memory"), None)


@pytest.fixture
def region() -> Iterator[Path]:
    path = Path(DIRECTORY, f"vllm_offload_{secrets.token_hex(8)}.mmap")
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def used(host: Host) -> tuple[LiveVolume, Consumer]:
    return host.in_use(host.tier("SealOnly"))


def make(region: Path) -> str:
    """What vLLM does: make it, map it, close the descriptor."""
    return f"""
        fd = os.open({str(region)!r}, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(fd, 8 << 20)
        os.close(fd)
        map_alone({str(region)!r}, 8 << 20, {CANARY!r})
    """


def test_a_region_that_a_killed_consumer_left_is_overwritten_and_removed(
    host: Host, used: tuple[LiveVolume, Consumer], region: Path
) -> None:
    live, consumer = used
    consumer.do(make(region))
    assert look(host.node, live).in_use
    [found] = host.node.ledger.get(live.volume_id).facts[FACT]
    assert found["name"] == region.name and found["users"][0][0] == consumer.pid
    keeper = os.open(region, os.O_PATH)
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None
    step = shared(receipt)
    assert step is not None and step.ok and region.name in step.detail
    assert not region.exists()
    assert os.stat(f"/proc/self/fd/{keeper}").st_blocks == 0
    os.close(keeper)


def test_the_record_outlives_the_guardian(host: Host, used: tuple[LiveVolume, Consumer], region: Path) -> None:
    live, consumer = used
    consumer.do(make(region))
    look(host.node, live)
    host.drop_guardians()
    consumer.kill()
    host.reopen()
    [receipt] = host.recover().erased
    assert shared(receipt) is not None
    assert not region.exists()


def test_a_worker_of_the_consumers_tree_counts(host: Host, used: tuple[LiveVolume, Consumer], region: Path) -> None:
    """The region is a grandchild's alone; it outlives the consumer, and the volume is in use for as long as it does."""
    live, consumer = used
    worker = int(
        consumer.do(f"""
            answer = os.fork()
            if answer == 0:
                fd = os.open({str(region)!r}, os.O_RDWR | os.O_CREAT)
                os.ftruncate(fd, 1 << 20)
                os.close(fd)
                map_alone({str(region)!r}, 1 << 20, {CANARY!r})
                open(f"{{slots}}/made", "w").close()
                while True:
                    time.sleep(60)
        """)
    )
    eventually("made", lambda: os.path.exists(f"{live.slots_path}/made"))
    assert look(host.node, live).in_use
    consumer.kill()
    seen = look(host.node, live)
    assert seen.in_use and str(worker) in seen.why
    os.kill(worker, signal.SIGKILL)
    receipt = eventually("erased", lambda: look(host.node, live).receipt)
    assert shared(receipt).ok and not region.exists()


def test_a_region_of_another_process_is_not_touched_whatever_its_name_and_age(
    host: Host, used: tuple[LiveVolume, Consumer], region: Path
) -> None:
    live, consumer = used
    region.write_bytes(CANARY)
    look(host.node, live)
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None and shared(receipt) is None
    assert region.read_bytes() == CANARY


def test_a_file_with_another_name_is_not_a_region(host: Host, used: tuple[LiveVolume, Consumer]) -> None:
    live, consumer = used
    path = Path(DIRECTORY, f"psm_{secrets.token_hex(8)}")
    consumer.do(make(path))
    look(host.node, live)
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None and shared(receipt) is None
    path.unlink()


def test_a_region_that_somebody_else_has_open_is_left_and_the_receipt_says_so(
    host: Host, used: tuple[LiveVolume, Consumer], region: Path
) -> None:
    live, consumer = used
    consumer.do(make(region))
    look(host.node, live)
    other = host.popen(
        [sys.executable, "-c", "import sys, time; f = open(sys.argv[1], 'rb'); print('open', flush=True); time.sleep(300)",
         str(region)],
        stdout=-1, text=True,
    )  # fmt: skip
    assert other.stdout is not None and other.stdout.readline()
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None, "the volume's own erasure does not wait for it"
    step = shared(receipt)
    assert step is not None and step.ok is None and "has it open" in step.detail
    assert region.read_bytes().startswith(CANARY)


def test_another_file_under_the_name_by_now_is_not_touched(
    host: Host, used: tuple[LiveVolume, Consumer], region: Path
) -> None:
    """The consumer removed its own, and the next engine made one of the same name: inode and device tell them apart."""
    live, consumer = used
    consumer.do(make(region))
    look(host.node, live)
    region.unlink()
    region.write_bytes(b"the next engine's")
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None
    step = shared(receipt)
    assert step is not None and step.ok and "another file" in step.detail
    assert region.read_bytes() == b"the next engine's"


def test_a_link_under_the_name_is_not_followed(host: Host, used: tuple[LiveVolume, Consumer], region: Path) -> None:
    live, consumer = used
    victim = host.base / "victim"
    victim.write_bytes(b"somebody's")
    consumer.do(make(region))
    look(host.node, live)
    region.unlink()
    region.symlink_to(victim)
    consumer.kill()
    assert look(host.node, live).receipt is not None
    assert victim.read_bytes() == b"somebody's" and region.is_symlink()
