"""The second reader: reads a sample of raw bytes back with a descriptor of its own, past the page cache where it can."""

from __future__ import annotations

import os
from dataclasses import asdict

from kvtier_node.sampling import Range, sample

__all__ = ["read_files", "read_ranges"]


def read_ranges(*, fds: dict[str, int], ranges: list[list[int]]) -> dict[str, object]:
    """Reopen `fds["file"]` and sample `ranges` of it ([[offset, length], ...] in bytes); a SampleResult as a dict."""
    path = f"/proc/self/fd/{fds['file']}"
    direct = True
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:  # tmpfs and others refuse O_DIRECT; the result says which way it was read
        direct = False
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return asdict(sample(fd, [Range(offset, length) for offset, length in ranges], direct=direct))
    finally:
        os.close(fd)


def read_files(*, fds: dict[str, int], ranges: list[list[list[int]]]) -> dict[str, object]:
    """The same for every file of `fds`, with its own ranges, in the same order; an OSError has the name that it has there."""
    samples = []
    for (name, fd), wanted in zip(fds.items(), ranges, strict=True):
        try:
            samples.append(read_ranges(fds={"file": fd}, ranges=wanted))
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from error
    return {"samples": samples}
