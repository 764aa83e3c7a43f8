"""Tries, as root in the guest, to write to the host's files: hostfs mounted again, read-write. args: inside, outside."""

from __future__ import annotations

import errno
import os

from umlguest import blockdev, channel


def attempt(folder: str) -> str:
    """The name of the error; empty if a file could be made."""
    place = f"/mnt/{len(os.listdir('/mnt'))}"
    os.mkdir(place)
    blockdev.run("mount", "-t", "hostfs", "-o", folder, "none", place)
    try:
        with open(f"{place}/written-by-the-guest", "w") as file:
            file.write("x")
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


channel.report("tried", inside=attempt(channel.args["inside"]), outside=attempt(channel.args["outside"]))
