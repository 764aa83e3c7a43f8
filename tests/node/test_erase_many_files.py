"""Crash-erase with thousands of files in a volume: children are shared, descriptors are few, the evidence is of every file."""

from __future__ import annotations

import os
import resource
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier_api.errors import KernelError
from kvtier_node import file_batches
from kvtier_node.backends import plain
from kvtier_node.file_batches import Batch, overwrite_files, read_files
from kvtier_node.guarding import look
from kvtier_node.kernel import bounded
from kvtier_node.live import LiveVolume
from kvtier_node.receipts import Receipt, Step, Technique, utc_now
from kvtier_node.sampling import Range
from leftovers import open_descriptors
from node_host import Consumer, Host

pytestmark = pytest.mark.root
SEALED = "os.urandom(4096)"
PLAIN = "b'PLAINTEXT-OF-A-PROMPT' * 400"
BLOCK_BYTES = 4096


class Calls:
    """Every child that was started, and how many descriptors this process had open then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.functions: list[str] = []
        self.most_open = 0
        real = bounded.call

        def counted(function: str, **arguments: Any) -> dict[str, Any]:
            self.functions.append(function)
            self.most_open = max(self.most_open, len(os.listdir("/proc/self/fd")))
            return real(function, **arguments)

        monkeypatch.setattr(bounded, "call", counted)


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def filled(host: Host, count: int, content: str) -> LiveVolume:
    """A volume whose consumer wrote `count` files and ended."""
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1, size="1Mi"))
    write(consumer, count, content)
    consumer.kill()
    return live


def write(consumer: Consumer, count: int, content: str) -> None:
    consumer.do(f"for i in range({count}): open(f'{{slots}}/f{{i}}', 'wb').write({content})")


def steps(receipt: Receipt) -> dict[str, Step]:
    return {step.name: step for step in receipt.steps}


def test_the_files_of_a_volume_share_children_and_every_one_is_read_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = filled(host, 900, SEALED)
    calls = Calls(monkeypatch)
    receipt = look(host.node, live).receipt
    assert receipt is not None
    assert len(calls.functions) <= 10
    said = steps(receipt)
    assert said["read-back"].detail.startswith("900 blocks of 4096 bytes read")
    assert "900 ciphertext, 0 plaintext" in said["read-back"].detail
    assert said["remove"].detail.startswith("901 files")
    assert receipt.technique is Technique.PROCESS_DEATH
    host.assert_nothing_left(live)


def test_what_was_not_sealed_in_many_files_is_overwritten_by_few_children(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = filled(host, 500, PLAIN)
    calls = Calls(monkeypatch)
    receipt = look(host.node, live).receipt
    assert receipt is not None and receipt.technique is Technique.OVERWRITE
    assert len(calls.functions) <= 15
    said = steps(receipt)
    assert "1000 plaintext" not in said["read-back-after-overwrite"].detail
    assert said["read-back-after-overwrite"].ok and " 0 plaintext" in said["read-back-after-overwrite"].detail
    assert "of 501 files overwritten" in said["overwrite"].detail
    host.assert_nothing_left(live)


def test_one_plaintext_file_among_hundreds_of_sealed_ones_is_found(host: Host) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=1, size="1Mi"))
    write(consumer, 450, SEALED)
    consumer.do(f"open(f'{{slots}}/f301', 'wb').write({PLAIN})")
    consumer.kill()
    receipt = look(host.node, live).receipt
    assert receipt is not None and receipt.technique is Technique.OVERWRITE
    assert "450 ciphertext" not in steps(receipt)["read-back"].detail


def test_the_deadline_of_plaintext_runs_until_it_is_overwritten(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The death of the process is its erasure only where the engine had sealed."""
    live = filled(host, 2, PLAIN)
    overwritten_at = []
    real = plain.overwrite_slots

    def timed(*arguments: Any) -> Step:
        step = real(*arguments)
        overwritten_at.append(utc_now())
        return step

    monkeypatch.setattr(plain, "overwrite_slots", timed)
    receipt = look(host.node, live).receipt
    assert receipt is not None and receipt.key_destroyed_at is not None
    assert receipt.key_destroyed_at >= overwritten_at[0]


@pytest.mark.parametrize("content", [SEALED, PLAIN])
def test_many_files_take_no_more_descriptors_than_a_process_may_have(
    host: Host, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = filled(host, 600, content)
    live.close_watch()
    calls = Calls(monkeypatch)
    with descriptors_left(60):
        limit = open_descriptors() + 60
        seen = look(host.node, live)
    assert seen.error is None and seen.receipt is not None
    assert calls.most_open < limit - 10, "others in this process need some, too"


def test_a_batch_of_large_files_is_no_longer_open_than_it_takes_to_sample_one_or_two(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, consumer = host.in_use(host.tier("SealOnly", ranks=6, size="16Mi"))
    for rank in range(6):
        consumer.do(f"f = open(f'{{slots}}/slot.rank_{rank}', 'r+b'); f.write(os.urandom(16 << 20)); f.close()")
    consumer.kill()
    calls = Calls(monkeypatch)
    receipt = look(host.node, live).receipt
    assert receipt is not None
    assert len(calls.functions) == 6
    blocks = int(steps(receipt)["read-back"].detail.split()[0])
    assert blocks >= 6 * 2000, "each file is sampled as if it were alone"


def test_files_that_the_consumer_removed_are_overwritten_together(
    host: Host, encrypted_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, consumer = host.in_use(host.tier("HostAttested", path=encrypted_root / "demo", ranks=1, size="1Mi"))
    write(consumer, 150, PLAIN)
    assert live.watch is not None
    live.watch.refresh()
    keepers = [os.open(f"{live.slots_path}/f{number}", os.O_RDONLY) for number in (0, 149)]
    consumer.do("for i in range(150): os.unlink(f'{slots}/f{i}')")
    calls = Calls(monkeypatch)
    assert live.watch.refresh() == 148, "two are still open elsewhere"
    assert calls.functions == ["kvtier_node.children.overwriting:overwrite_files"]
    for keeper in keepers:
        assert b"PLAINTEXT" in os.pread(keeper, 100, 0)
        os.close(keeper)
    assert live.watch.refresh() == 2
    consumer.kill()
    host.erase(live)


# The batches themselves


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[int, int], list[tuple[str, int]]]]:
    """Files with random content, open; closed again if the test did not."""
    made: list[int] = []

    def make(count: int, flags: int = os.O_RDWR) -> list[tuple[str, int]]:
        found = []
        for number in range(count):
            path = tmp_path / f"file-{secrets.token_hex(4)}-{number}"
            path.write_bytes(os.urandom(2 * BLOCK_BYTES))
            found.append((str(path), os.open(path, flags)))
        made.extend(fd for _, fd in found)
        return found

    yield make
    for fd in made:
        try:
            os.close(fd)
        except OSError:
            pass  # a batch closed it


def test_what_fails_in_a_child_is_said_with_the_path_of_the_file(
    opened: Callable[..., list[tuple[str, int]]],
) -> None:
    good, bad = opened(2), opened(1, os.O_RDONLY)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        overwrite_files([good[0], bad[0], good[1]])
    assert caught.value.filename == bad[0][0]
    beyond = {fd: [Range(0, BLOCK_BYTES)] for _, fd in good} | {good[1][1]: [Range(8 * BLOCK_BYTES, BLOCK_BYTES)]}
    with pytest.raises(OSError, match="read 0 of 4096") as caught:
        read_files(good, beyond)
    assert caught.value.filename == good[1][0]


def test_every_descriptor_of_a_batch_is_closed_whatever_happens(opened: Callable[..., list[tuple[str, int]]]) -> None:
    before = open_descriptors()

    def fail(_: object) -> None:
        raise KernelError("hangs")

    def weigh(fd: int) -> int:
        raise OSError(5, "an I/O error")

    with pytest.raises(KernelError, match="hangs"), Batch(fail) as batch:
        for path, fd in opened(3):
            batch.add(path, fd)
    with pytest.raises(OSError, match="an I/O error"), Batch(lambda _: None, weigh=weigh) as batch:
        [(path, fd)] = opened(1)
        batch.add(path, fd)
    with pytest.raises(KernelError, match="hangs"), Batch(fail, weigh=lambda _: file_batches.MOST_PLACES) as batch:
        for path, fd in opened(2):  # the second does not fit, and what makes room for it fails
            batch.add(path, fd)
    with pytest.raises(KeyError), Batch(lambda _: None) as batch:
        [(path, fd)] = opened(1)
        batch.add(path, fd)
        raise KeyError
    assert open_descriptors() == before


def test_a_batch_is_full_by_files_or_by_places_to_read(opened: Callable[..., list[tuple[str, int]]]) -> None:
    sizes: list[int] = []
    weights = iter([1, 1, file_batches.MOST_PLACES, 1, 1])
    with Batch(lambda files: sizes.append(len(files)), weigh=lambda _: next(weights)) as batch:
        for path, fd in opened(5):
            batch.add(path, fd)
    assert sizes == [2, 1, 2]
    sizes.clear()
    with Batch(lambda files: sizes.append(len(files))) as batch:
        for path, fd in opened(file_batches.MOST_FILES + 1):
            batch.add(path, fd)
    assert sizes == [file_batches.MOST_FILES, 1]


def test_a_read_back_reads_each_file_by_its_own_ranges(opened: Callable[..., list[tuple[str, int]]]) -> None:
    one, other = opened(2)
    os.pwrite(one[1], b"text " * 819 + b"!", BLOCK_BYTES)
    os.fsync(one[1])
    found = read_files([one, other], {one[1]: [Range(BLOCK_BYTES, BLOCK_BYTES)], other[1]: [Range(0, 2 * BLOCK_BYTES)]})
    assert [(result.plaintext, result.ciphertext) for result in found] == [(1, 0), (0, 2)]
    assert found[0].plaintext_at == [BLOCK_BYTES]
