"""What a privileged agent keeps of root's rights (capabilities(7)), and that it gives up all others.

A container that makes Bidirectional mounts must be privileged, which is every right. So the agent bounds itself: what is not
in `KEPT` can be had neither by it nor by anything that it starts, in a container and on a host alike.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_node.kernel import libc

__all__ = ["KEPT", "give_up_others"]

KEPT: Final = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_LINUX_IMMUTABLE": 9,
    "CAP_IPC_LOCK": 14,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_MKNOD": 27,
    "CAP_LEASE": 28,
}
"""By the numbers of linux/capability.h. What each is for is said in the chart's DaemonSet."""

_VERSION_3: Final = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32)]


def give_up_others() -> None:
    """For this thread and what it starts from now on: call it before there are other threads. It cannot be undone.

    A process that may not narrow its bounding set (no CAP_SETPCAP, as under systemd's CapabilityBoundingSet=) keeps that set,
    and gives up the rest all the same. Raises KernelError.
    """
    wanted = sum(1 << number for number in KEPT.values())
    try:
        last = int(Path("/proc/sys/kernel/cap_last_cap").read_text(encoding="ascii"))
        for number in range(last + 1):
            if not wanted >> number & 1 and libc.in_bounding_set(number):
                _narrow(number)
        libc.clear_ambient_set()
        _keep(wanted)
    except OSError as error:
        raise KernelError(
            f"rights that are not needed could not be given up: {os.strerror(error.errno or 0)}", obj="capabilities"
        ) from error


def _narrow(number: int) -> None:
    try:
        libc.drop_from_bounding_set(number)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise


def _keep(wanted: int) -> None:
    header, sets = _Header(_VERSION_3, 0), (_Sets * 2)()
    libc.capget(header, sets)
    for half, one in enumerate(sets):
        mask = wanted >> 32 * half & 0xFFFFFFFF
        one.effective &= mask
        one.permitted &= mask
        one.inheritable = 0
    libc.capset(header, sets)
