"""Crash tests: a folder of real ext4 each, cleaned up with everything that a killed agent left attached to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import claims
from scenario import below

from leftovers import detach_below


@pytest.fixture
def bases() -> Iterator[list[Path]]:
    """Folders that a test made; what is still mounted or attached below them is taken away and is an error."""
    made: list[Path] = []
    yield made
    for base in made:
        discard(base)


def new_base(made: list[Path]) -> Path:
    base = Path(tempfile.mkdtemp(prefix="kvtier-crash-", dir=os.environ.get("KVTIER_TEST_DIR", "/var/tmp")))
    base.chmod(0o755)
    (base / "tiers").mkdir(mode=0o755)
    made.append(base)
    return base


def discard(base: Path) -> None:
    """Take everything below `base` away, whatever state a failed test left it in."""
    claims.end_consumer(base)
    for line in list(below(base)):
        kind, _, what = line.partition(": ")
        if kind == "mount":
            subprocess.run(["umount", "-l", what.split()[4]], check=False)
    detach_below(base)
    subprocess.run(["rm", "-rf", str(base)], check=True)
