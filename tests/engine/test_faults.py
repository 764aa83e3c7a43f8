"""Real faults under a running store: each fails its job alone, is counted, and the store goes on."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_material import SLOT_BYTES, HandClock, block
from kvtier_engine import Outcome, SlotStore
from requirements import need_root, need_tool

Opener = Callable[..., SlotStore]

# A consumer in a process of its own: stores and loads, prints what became of it, never raises.
_CONSUMER = """
import json, sys
from kvtier_engine import SlotStore, StoreConfig
path, size, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = SlotStore(StoreConfig(files=(path,), ranks=(0,), slot_size_bytes=size, tier_uid="t", volume_id="v",
    salt_policy="Required", max_age_s=3600, io_depth=1, run_bytes=size, quarantine_s=3600))
puts, gets, wrong = [], [], 0
for k in range(rounds):
    puts.append(store.put(bytes([k]), [bytes([k]) * size], tenant=b"a").value)
for k in range(rounds):
    room = bytearray(size)
    gets.append(store.get(bytes([k]), [room], tenant=b"a").value)
    wrong += gets[-1] == "loaded" and room != bytes([k]) * size
store.submit_store(1, [(b"x", [bytes(size)])], tenant=b"a")
drained = store.drain(60)
stats = store.stats()
print(json.dumps({"puts": puts, "gets": gets, "wrong": wrong, "errors": stats.errors, "drained": drained,
    "quarantined": stats.quarantined, "free": stats.free, "ready": stats.ready, "last": store.finished()[0].success}))
"""


def _consume(path: str, *prefix: str, rounds: int = 8, **options: Any) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-c", _CONSUMER, path, str(SLOT_BYTES), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == 0
    assert result["drained"]
    return result


def _injected(path: str, call: str, fault: str, tmp_path: Path) -> dict[str, Any]:
    """Run the consumer with one system call on its slot file made to fail by strace."""
    need_tool("strace")
    call = f"{call},{call}2"  # which of the two Python uses depends on the C library
    trace = ["strace", "-f", "-qq", "-o", str(tmp_path / "trace"), "-e", f"trace={call}"]
    result = _consume(path, *trace, "-P", path, "-e", f"inject={call}:{fault}")
    assert "(INJECTED)" in (tmp_path / "trace").read_text()
    return result


@pytest.mark.parametrize("error", ["EIO", "ENOSPC", "EDQUOT", "EROFS", "ENODEV"])
def test_a_failed_write_fails_that_block_alone(
    error: str, slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result = _injected(slot_files()[0], "pwritev", f"error={error}:when=3", tmp_path)
    assert [outcome for outcome in result["puts"] if outcome != "stored"] == ["io-error"]
    assert result["gets"].count("loaded") == 7
    assert result["gets"].count("miss") == 1
    assert result["errors"] == {error: 1}
    assert result["last"]
    assert result["quarantined"] == (1 if error == "EIO" else 0)
    assert result["ready"] + result["free"] + result["quarantined"] == 16


@pytest.mark.parametrize("error", ["EIO", "ENODEV"])
def test_a_failed_read_is_a_miss_and_the_block_is_forgotten(
    error: str, slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result = _injected(slot_files()[0], "preadv", f"error={error}:when=4", tmp_path)  # the first is the probe
    assert [outcome for outcome in result["gets"] if outcome != "loaded"] == ["io-error"]
    assert result["errors"] == {error: 1}
    assert result["quarantined"] == (1 if error == "EIO" else 0)


def test_every_write_failing_leaves_a_store_of_misses_that_still_answers(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result = _injected(slot_files()[0], "pwritev", "error=ENOSPC:when=1+", tmp_path)
    assert set(result["puts"]) == {"io-error"}
    assert set(result["gets"]) == {"miss"}
    assert result["free"] == 16


def test_a_short_write_is_finished_and_a_write_of_nothing_is_an_error(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    result = _injected(slot_files()[0], "pwritev", "retval=0:when=2", tmp_path)
    assert result["puts"].count("io-error") == 1
    assert result["gets"].count("loaded") == 7


def test_a_write_said_to_be_whole_that_never_happened_is_a_miss(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    """A disk that lies: the call is not executed, and all bytes are reported as written."""
    result = _injected(slot_files()[0], "pwritev", f"retval={SLOT_BYTES}:when=2", tmp_path)
    assert set(result["puts"]) == {"stored"}
    assert result["gets"].count("bad-tag") == 1
    assert result["gets"].count("loaded") == 7


def test_a_write_cut_in_half_by_the_disk_is_written_on(
    slot_files: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    """Half is reported (and not written): the store writes the rest, and the missing half fails the tag."""
    result = _injected(slot_files()[0], "pwritev", f"retval={SLOT_BYTES // 2}:when=2", tmp_path)
    assert set(result["puts"]) == {"stored"}
    assert result["gets"].count("bad-tag") == 1


def test_no_direct_io_for_this_process_falls_back(slot_files: Callable[..., tuple[str, ...]], tmp_path: Path) -> None:
    result = _injected(slot_files()[0], "preadv", "error=EINVAL:when=1", tmp_path)
    assert set(result["gets"]) == {"loaded"}


def test_beyond_the_file_size_limit_of_the_process_writes_fail_and_nothing_dies(
    slot_files: Callable[..., tuple[str, ...]],
) -> None:
    limit = 5 * SLOT_BYTES + SLOT_BYTES // 2  # the sixth slot is a short write first

    def limit_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    result = _consume(slot_files()[0], preexec_fn=limit_size)
    assert result["puts"].count("stored") == 5
    assert result["puts"].count("io-error") == 3
    assert result["errors"]["EFBIG"] >= 3
    assert result["gets"].count("loaded") == 5


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 with one sparse slot file and almost no space: real ENOSPC."""
    need_root()
    need_tool("mkfs.ext4")
    image, mount = tmp_path / "image", tmp_path / "mnt"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    mount.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        with (mount / "slot.rank_0").open("wb") as file:
            file.truncate(16 * SLOT_BYTES)  # sparse, as the stock engine does it
        left = os.statvfs(mount)
        with (mount / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_frsize - 6 * SLOT_BYTES)
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.mark.root
def test_a_disk_that_is_full_under_a_sparse_file_fails_the_blocks_that_do_not_fit(full_disk: Path) -> None:
    result = _consume(str(full_disk / "slot.rank_0"), rounds=12)
    assert result["errors"].get("ENOSPC", 0) >= 1
    assert result["puts"].count("stored") + result["puts"].count("io-error") == 12
    assert result["gets"].count("loaded") == result["puts"].count("stored") > 0


@pytest.mark.parametrize("harm", ["unlink", "truncate"])
def test_a_file_that_vanishes_turns_everything_into_misses_and_is_not_made_anew(open_store: Opener, harm: str) -> None:
    store = open_store()
    assert store.put(b"k", [block(1)], tenant=b"a").ok
    path = store.config.files[0]
    if harm == "unlink":
        os.unlink(path)
    else:
        os.truncate(path, SLOT_BYTES)
    assert store.get(b"k", [bytearray(SLOT_BYTES)], tenant=b"a") is Outcome.IO_ERROR
    assert store.put(b"k2", [block(2)], tenant=b"a") is Outcome.IO_ERROR
    assert store.stats().errors == {"ESTALE": 2}
    if harm == "unlink":
        assert not os.path.exists(path)
    else:
        assert os.stat(path).st_size == SLOT_BYTES
    store.submit_load(1, [(b"k", [bytearray(SLOT_BYTES)])], tenant=b"a")
    assert store.drain(60)


def test_a_quarantined_slot_comes_back_after_its_time(open_store: Opener, clock: HandClock) -> None:
    store = open_store(slots=1, clock=clock, quarantine_s=10.0)
    file, failing = store._files[0], [True]
    write = file.write

    def sick(offset: int, views: Any) -> None:
        if failing[0]:
            raise OSError(5, "Input/output error")
        write(offset, views)

    file.write = sick  # type: ignore[method-assign]
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.IO_ERROR
    failing[0] = False
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.NO_SPACE
    assert store.stats().quarantined == 1
    clock.now += 11
    store._book.end_quarantines()
    assert store.put(b"k", [block(1)], tenant=b"a") is Outcome.STORED


def test_an_error_that_nobody_foresaw_fails_the_job_and_not_the_thread(open_store: Opener) -> None:
    store = open_store(io_depth=1)
    write = store._files[0].write

    def broken(offset: int, views: Any) -> None:
        raise ZeroDivisionError("a bug")

    store._files[0].write = broken  # type: ignore[method-assign]
    store.submit_store(1, [(b"k", [block(1)])], tenant=b"a")
    assert store.drain(60)
    (result,) = store.finished()
    assert result.outcomes == (Outcome.IO_ERROR,)
    assert "a bug" in result.error
    store._files[0].write = write  # type: ignore[method-assign]
    store.submit_store(2, [(b"k", [block(1)])], tenant=b"a")
    assert store.drain(60)
    assert store.finished()[0].success
    assert store.stats().errors == {"ZeroDivisionError": 1}
