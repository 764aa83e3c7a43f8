"""Measurements of one volume in use, for its conditions: encryption from the kernel, the marker, a sample of the slots.

The slots are read through the mount: above the volume's own encryption, so that what is ciphertext here was sealed by the
engine. A measurement is small and short: while it has a file open, nobody can tell from the kernel alone that the
consumer has let go of it. What a measurement means is left to `conditions`.
"""

from __future__ import annotations

import errno
import os
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from kvtier_api.errors import KvtierError
from kvtier_api.marker import MARKER_NAME, SLOTS_DIRECTORY, check_marker
from kvtier_api.volume import BackendName
from kvtier_node.backends import BACKENDS
from kvtier_node.backends.base import Measurement
from kvtier_node.backends.seal_only import shown_by
from kvtier_node.kernel import bounded
from kvtier_node.ledger import VolumeRow
from kvtier_node.live import request_of
from kvtier_node.lost_mounts import LOST, has_lost_mount
from kvtier_node.node import Node
from kvtier_node.paths import Directory
from kvtier_node.places import MOUNT_NAME
from kvtier_node.sampling import BLOCK_BYTES, Range, SampleResult, end_of_file, merge
from kvtier_node.slots import open_consumer_file, walk_files

__all__ = ["VolumeMeasurement", "data_segments", "measure_volume"]

_LIMIT_S: Final = 20.0
_FILES: Final = 4
_WINDOWS: Final = 32
_WINDOW_BYTES: Final = 4 * BLOCK_BYTES
_SEGMENTS: Final = 4096
_GOES_ON: Final = "somebody unmounted it; who has it open goes on using it, and it is erased with their end"


@dataclass(frozen=True)
class VolumeMeasurement:
    """What was seen of a volume at `at`. `error` says why the rest is missing; `used_bytes`: what was written so far."""

    at: datetime
    encryption: Measurement | None = None
    slots: SampleResult | None = None
    marker_error: str = ""
    used_bytes: int = 0
    error: str = ""


def measure_volume(node: Node, row: VolumeRow) -> VolumeMeasurement:
    """Measure a volume that is Ready or InUse. Never raises: what failed is said in `error`."""
    now = datetime.now(UTC)
    try:
        place = node.places.open(row.place)
        if place is None:
            return VolumeMeasurement(now, error=f"{row.place} is not there")
        with place:
            if has_lost_mount(row):
                return VolumeMeasurement(now, _of_place(place, row), marker_error=f"{LOST}: {_GOES_ON}")
            marker_error = _marker_error(row)
            sample, used_bytes = _sample(place)
            encryption = shown_by(sample) if row.backend is BackendName.SEAL_ONLY else _of_place(place, row)
        return VolumeMeasurement(now, encryption, sample, marker_error, used_bytes)
    except (KvtierError, OSError) as error:
        return VolumeMeasurement(now, error=str(error))


def _of_place(place: Directory, row: VolumeRow) -> Measurement:
    return BACKENDS[row.backend].measure(place, request_of(row), row.key_id)


def _marker_error(row: VolumeRow) -> str:
    try:
        check_marker(f"{row.place}/{MOUNT_NAME}/{MARKER_NAME}", nonce=str(row.facts["nonce"]))
    except (KvtierError, OSError) as error:
        return str(error)
    return ""


def _sample(place: Directory) -> tuple[SampleResult, int]:
    """A sample: some places of some files, the end of every file. And how many bytes in all of the files were written."""
    results: list[SampleResult] = []
    used_bytes = read = 0
    with (
        place.child(MOUNT_NAME, same_device=False) as root,
        root.child(SLOTS_DIRECTORY, any_owner=True) as slots,
    ):
        for directory, name in walk_files(slots):
            fd = open_consumer_file(directory, name, os.O_RDONLY)
            if fd is None:
                continue
            try:
                segments = data_segments(fd)
                used_bytes += sum(part.length for part in segments)
                if segments and read < _FILES:
                    results, read = [*results, _read(fd, segments)], read + 1
                end = end_of_file(fd)
                if end.plaintext:
                    results.append(end)
                    used_bytes += os.fstat(fd).st_size % BLOCK_BYTES
            finally:
                os.close(fd)
    return merge(results), used_bytes


def _read(fd: int, segments: list[Range]) -> SampleResult:
    ranges = [[part.offset, part.length] for part in _windows(segments)]
    answer = bounded.call(
        "kvtier_node.children.reading:read_ranges", timeout_s=_LIMIT_S, fds={"file": fd}, ranges=ranges
    )
    return SampleResult(**answer)


def data_segments(fd: int) -> list[Range]:
    """Where the file was written (SEEK_DATA, SEEK_HOLE of lseek(2)); preallocated and not written counts as a hole.

    At most a few thousand, so that it stays short. Whole blocks only. Raises OSError.
    """
    found: list[Range] = []
    size = os.fstat(fd).st_size // BLOCK_BYTES * BLOCK_BYTES
    at = 0
    while at < size and len(found) < _SEGMENTS:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA) // BLOCK_BYTES * BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole to the end
                break
            raise
        at = os.lseek(fd, begin, os.SEEK_HOLE)
        end = min(-(-at // BLOCK_BYTES) * BLOCK_BYTES, size)
        if end > begin:
            found.append(Range(begin, end - begin))
    return found


def _windows(segments: list[Range]) -> list[Range]:
    """Some windows of a few blocks at random over the written segments, in order, none overlapping."""
    places = sorted(
        {
            (part.offset + number * _WINDOW_BYTES, min(_WINDOW_BYTES, part.length - number * _WINDOW_BYTES))
            for part, number in _picks(segments)
        }
    )
    return [Range(offset, length) for offset, length in places]


def _picks(segments: list[Range]) -> list[tuple[Range, int]]:
    chance = random.SystemRandom()
    counts = [-(-part.length // _WINDOW_BYTES) for part in segments]
    total = sum(counts)
    wanted = sorted(chance.sample(range(total), min(_WINDOWS, total)))
    picked: list[tuple[Range, int]] = []
    index = before = 0
    for number in wanted:
        while number - before >= counts[index]:
            before += counts[index]
            index += 1
        picked.append((segments[index], number - before))
    return picked
