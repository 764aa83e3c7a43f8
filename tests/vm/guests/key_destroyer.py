"""Destroys the key of a dm-crypt volume that cannot be unmounted, and reports what the kernel says at each step.

The volume is mounted, a file of it is open, and a process in another mount namespace has its mount and file too.
args: lines.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import time
from pathlib import Path

from canary_writer import key_in_table, open_crypt  # a guest's own folder is on its path
from umlguest import blockdev, channel

CLONE_NEWNS = 0x00020000
libc = ctypes.CDLL(None, use_errno=True)


def leak_the_mount(volume: Path) -> int:
    """A process in a mount namespace of its own that keeps a file of the volume open. Its pid."""
    ready_read, ready_write = os.pipe()
    child = os.fork()
    if child == 0:
        if libc.unshare(CLONE_NEWNS) != 0:
            os._exit(1)
        os.open(volume / "slot.0", os.O_RDWR)
        os.write(ready_write, b"x")
        time.sleep(3600)
        os._exit(0)
    os.read(ready_read, 1)
    return child


def attempt(*command: str) -> dict[str, object]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"ok": done.returncode == 0, "said": (done.stdout + done.stderr).strip()}


def read_error(fd: int) -> str:
    """The name of the error that reading gives; empty if it can be read. `fd` is O_DIRECT: no cached page answers."""
    try:
        os.preadv(fd, [mmap.mmap(-1, 4096)], 0)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


key = os.urandom(64)
channel.report("key", hex=key.hex())
device = open_crypt(key)
length = blockdev.sectors(device)
blockdev.make_file_system("ext4", device)
os.makedirs("/mnt/vault")
blockdev.run("mount", "-t", "ext4", device, "/mnt/vault")
volume = Path("/mnt/vault")
blockdev.write_durably(volume / "slot.0", "".join(channel.args["lines"]).encode())
held = os.open(volume / "slot.0", os.O_RDWR | os.O_DIRECT)
holder = leak_the_mount(volume)
channel.report("before", key=key_in_table(), read=read_error(held))
channel.report("umount", **attempt("umount", "/mnt/vault"))
channel.report("close", **attempt("cryptsetup", "close", "vault"))
channel.report("early_wipe", **attempt("dmsetup", "message", "vault", "0", "key", "wipe"))
channel.report("suspend", **attempt("dmsetup", "suspend", "--nolockfs", "--noflush", "vault"))
channel.report("wipe", **attempt("dmsetup", "message", "vault", "0", "key", "wipe"))
channel.report("wiped", key=key_in_table())
channel.report("resume_without_key", **attempt("dmsetup", "resume", "vault"))
channel.report("load_error", **attempt("dmsetup", "load", "vault", "--table", f"0 {length} error"))
channel.report("resume", **attempt("dmsetup", "resume", "vault"))
channel.report("after", read=read_error(held), table=blockdev.run("dmsetup", "table", "vault").strip())
channel.barrier("done", holder=holder)
