"""A mount namespace of one's own, for a child process that tries something nobody else shall see."""

from __future__ import annotations

import ctypes
import os

from kvtier_node.kernel import constants, libc

_CLONE_NEWNS = 0x20000  # linux/sched.h
__all__ = ["leave_mount_namespace"]


def leave_mount_namespace() -> None:
    """Enter a new mount namespace from which nothing propagates back. For single-threaded children. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "unshare(CLONE_NEWNS)")
    libc.mount(None, "/", None, constants.MS_REC | constants.MS_PRIVATE, None)
