"""What of this host can carry a consumer's memory or old blocks to a disk: swap, core dumps, hibernation, snapshots.

Measured from /proc and /sys (proc(5), core(5), Documentation/admin-guide/pm/interface.rst), never inferred. What cannot be
measured has no verdict, and the reason why. `proc` and `sys` are parameters so that the tables of other hosts can be read.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvtier_node.backends.host_attested import crypt_chain
from kvtier_node.kernel import files

__all__ = ["Fact", "HostFacts", "measure_host"]

_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_KEEPS_SNAPSHOTS: Final = frozenset({"btrfs", "zfs", "bcachefs", "nilfs2", "overlay"})
_SNAPSHOT_UUIDS: Final = ("-tpool", "-tdata", "-tmeta", "-cow", "-real")
"""Suffixes that LVM gives to the device mapper devices below a thin volume, a snapshot and a snapshot's origin."""
_DISCARDS_CORES: Final = frozenset({"|/bin/false", "|/usr/bin/false", "|/bin/true", "|/usr/bin/true"})


@dataclass(frozen=True)
class Fact:
    """One verdict. `ok` is None where it could not be measured; `reason` says what was seen, or why nothing was."""

    ok: bool | None
    reason: str


@dataclass(frozen=True)
class HostFacts:
    """`ok` means: this way does not lead to a disk."""

    swap: Fact
    core_dumps: Fact
    hibernation: Fact
    snapshots: Fact


def measure_host(
    roots: Sequence[str], consumers: Sequence[int] = (), *, proc: str = "/proc", sys: str = "/sys"
) -> HostFacts:
    """Measure now. `roots`: where volumes lie; `consumers`: process ids whose core limits count. Raises nothing."""
    return HostFacts(
        swap=_swap(proc, sys),
        core_dumps=_core_dumps(consumers, proc),
        hibernation=_hibernation(proc, sys),
        snapshots=_snapshots(roots, sys),
    )


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="surrogateescape").strip()


def _worst(facts: Iterable[Fact], good: str) -> Fact:
    """The bad ones if there are any, else those without a verdict, else `good`."""
    found = list(facts)
    for verdict in (False, None):
        reasons = [fact.reason for fact in found if fact.ok is verdict]
        if reasons:
            return Fact(verdict, "; ".join(reasons))
    return Fact(True, "; ".join(fact.reason for fact in found) or good)


def _swap(proc: str, sys: str) -> Fact:
    try:
        lines = _read(f"{proc}/swaps").splitlines()[1:]
    except FileNotFoundError:
        return Fact(True, "the kernel has no swap")
    except OSError as error:
        return Fact(None, f"{proc}/swaps: {error.strerror}")
    return _worst((_swap_area(line.split()[0], sys) for line in lines if line.strip()), "no swap is active")


def _swap_area(field: str, sys: str) -> Fact:
    path = _OCTAL.sub(lambda found: chr(int(found[1], 8)), field)
    try:
        info = os.stat(path)
        device = info.st_rdev or info.st_dev
        zram = _zram_disk(device, sys)
        if zram is not None:
            return (
                Fact(True, f"swap on {path} is in memory (zram)")
                if zram == "none"
                else Fact(False, f"swap on {path} (zram) is written back to {zram}, which is not known to be encrypted")
            )
        encrypted, uuids = crypt_chain(device, f"{sys}/dev/block")
    except (OSError, ValueError) as error:
        return Fact(None, f"swap on {path} cannot be looked at: {error}")
    if encrypted:
        return Fact(True, f"swap on {path} is on dm-crypt ({', '.join(uuids)})")
    return Fact(False, f"swap on {path} is not encrypted")


def _zram_disk(device: int, sys: str) -> str | None:
    """None for what is no zram; else the disk behind it, or "none"."""
    where = f"{sys}/dev/block/{os.major(device)}:{os.minor(device)}"
    if not os.path.basename(os.path.realpath(where)).startswith("zram"):
        return None
    try:
        return _read(f"{where}/backing_dev")
    except FileNotFoundError:  # a kernel without CONFIG_ZRAM_WRITEBACK
        return "none"


def _core_dumps(consumers: Sequence[int], proc: str) -> Fact:
    try:
        pattern = _read(f"{proc}/sys/kernel/core_pattern")
        with_pid = _read(f"{proc}/sys/kernel/core_uses_pid")
    except OSError as error:
        return Fact(None, f"core_pattern cannot be read: {error.strerror}")
    if pattern.startswith("|"):
        if pattern.split()[0] in _DISCARDS_CORES:
            return Fact(True, f"core dumps go to {pattern[1:]}, which drops them")
        return Fact(False, f"core dumps are piped to {pattern[1:]!r}, whatever a process's core limit is")
    if not pattern and with_pid == "0":
        return Fact(True, "core_pattern is empty: the kernel writes no core")
    return _core_limits(consumers, proc)


def _core_limits(consumers: Sequence[int], proc: str) -> Fact:
    """With core files, a process's own limit decides: the consumers', or what a consumer started from here would inherit."""
    limits = [fact for pid in consumers if (fact := _core_limit(pid, proc)) is not None]
    if not limits:
        soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
        limits = [Fact(soft == 0, f"core limit {_limit(soft)} for what is started from here")]
    return _worst(limits, "")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _core_limit(pid: int, proc: str) -> Fact | None:
    """The soft limit of a process; None if it has ended."""
    try:
        lines = _read(f"{proc}/{pid}/limits").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        return Fact(None, f"the limits of process {pid} cannot be read: {error.strerror}")
    for line in lines:
        if line.startswith("Max core file size"):
            soft = line.removeprefix("Max core file size").split()[0]
            return Fact(soft == "0", f"core limit {soft} of process {pid}")
    return Fact(None, f"process {pid} shows no core limit")


def _hibernation(proc: str, sys: str) -> Fact:
    try:
        states = _read(f"{sys}/power/state").split()
    except FileNotFoundError:
        return Fact(True, "the kernel has no sleep states")
    except OSError as error:
        return Fact(None, f"{sys}/power/state: {error.strerror}")
    if "disk" not in states:
        return Fact(True, f"the kernel cannot write memory to disk (states: {' '.join(states) or 'none'})")
    try:
        return _suspend_to_disk(proc, sys)
    except OSError as error:
        return Fact(None, f"hibernation cannot be measured: {error}")


def _suspend_to_disk(proc: str, sys: str) -> Fact:
    if "[disabled]" in _read(f"{sys}/power/disk"):
        return Fact(True, "hibernation is disabled (/sys/power/disk)")
    swaps = [line for line in _read(f"{proc}/swaps").splitlines()[1:] if "/zram" not in line]
    if not swaps and _read(f"{sys}/power/resume") == "0:0":
        return Fact(True, "hibernation has nowhere to write: no swap on a disk, no resume device")
    return Fact(False, "the node can write its memory, keys included, to disk (hibernation)")


def _snapshots(roots: Sequence[str], sys: str) -> Fact:
    return _worst((_snapshots_below(root, sys) for root in roots), "no root to look at")


def _snapshots_below(root: str, sys: str) -> Fact:
    path = root
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            kind, device = files.filesystem_type(fd), os.fstat(fd).st_dev
        finally:
            os.close(fd)
        if kind in _KEEPS_SNAPSHOTS:
            return Fact(False, f"{kind} below {root} can keep old blocks")
        kept = [uuid for uuid in _dm_uuids(device, sys) if uuid.startswith("LVM-") and uuid.endswith(_SNAPSHOT_UUIDS)]
    except OSError as error:
        return Fact(None, f"what is below {root} cannot be looked at: {error}")
    if kept:
        return Fact(False, f"a thin or snapshot volume below {root} can keep old blocks ({', '.join(kept)})")
    return Fact(True, f"{kind} below {root}: no snapshot of it is here")


def _dm_uuids(device: int, sys: str) -> Iterator[str]:
    """Every device mapper uuid from a block device down."""
    where = f"{sys}/dev/block/{os.major(device)}:{os.minor(device)}"
    try:
        yield _read(f"{where}/dm/uuid")
    except (FileNotFoundError, NotADirectoryError):
        pass  # no device mapper device: it may still have slaves
    try:
        slaves = sorted(os.listdir(f"{where}/slaves"))
    except (FileNotFoundError, NotADirectoryError):
        return
    for slave in slaves:
        major, minor = _read(f"{where}/slaves/{slave}/dev").split(":")
        yield from _dm_uuids(os.makedev(int(major), int(minor)), sys)
