"""Block devices inside the guest: device mapper tables, file systems, mounts. Each failure says what the tool said."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

BLKGETSIZE64, BLKFLSBUF = 0x80081272, 0x1261  # linux/fs.h
_SECTOR = 512


def run(*command: str, data: bytes | None = None, timeout_s: float = 60) -> str:
    """Run a tool; its output. Raises RuntimeError with its words if it fails."""
    done = subprocess.run(command, input=data, capture_output=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).decode(errors="replace").strip()
        raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}): {said}")
    return done.stdout.decode(errors="replace")


def load(*modules: str) -> None:
    modprobe = Path("/proc/sys/kernel/modprobe").read_text().strip()
    for module in modules:
        run(modprobe, module)


def sectors(device: str) -> int:
    """Size of a block device in 512-byte sectors, as device mapper counts."""
    fd = os.open(device, os.O_RDONLY)
    try:
        buffer = bytearray(8)
        fcntl.ioctl(fd, BLKGETSIZE64, buffer)
        return int(struct.unpack("=Q", buffer)[0]) // _SECTOR
    finally:
        os.close(fd)


def drop_buffers(device: str) -> None:
    """Forget the device's cached pages, so that the next reader asks the disk."""
    fd = os.open(device, os.O_RDONLY)
    try:
        os.fsync(fd)
        fcntl.ioctl(fd, BLKFLSBUF)
    finally:
        os.close(fd)


def dm_create(name: str, target: str, length: int) -> str:
    """Map `/dev/mapper/NAME` over `length` sectors with one target (`flakey /dev/ubdb 0 60 0`); its path."""
    run("dmsetup", "create", name, "--table", f"0 {length} {target}")
    return f"/dev/mapper/{name}"


def dm_reload(name: str, target: str, length: int, *suspend: str) -> None:
    """Put another target under a device that may be in use. `suspend`: options such as `--noflush`, `--nolockfs`."""
    run("dmsetup", "suspend", *suspend, name)
    run("dmsetup", "load", name, "--table", f"0 {length} {target}")
    run("dmsetup", "resume", name)


def make_file_system(kind: str, device: str) -> None:
    quick = {"ext4": ["-q", "-F", "-E", "nodiscard,lazy_itable_init=0"], "xfs": ["-q", "-f", "-K"]}[kind]
    run(f"mkfs.{kind}", *quick, device)


@contextlib.contextmanager
def mounted(device: str, options: Sequence[str] = (), kind: str = "ext4", name: str = "volume") -> Iterator[Path]:
    """Mount at /mnt/NAME for the block. After an error it stays mounted: the error counts, and the guest ends."""
    place = Path("/mnt") / name
    place.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", ",".join(["noatime", *options]), device, str(place))
    yield place
    run("umount", str(place))


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and fsync it and its folder."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
