"""A word to systemd (sd_notify(3)): that the agent is ready, or stops. Nothing where systemd did not start it."""

from __future__ import annotations

import os
import socket

__all__ = ["tell_systemd"]


def tell_systemd(state: str) -> None:
    """Send `state` (such as `READY=1`) to $NOTIFY_SOCKET, if it is set. Raises OSError where that fails."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket: its name begins with a zero byte
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.sendto(state.encode(), address)
