"""What a test leaves in the kernel: loop devices on images below its folder, cgroups, descriptors. No other test's go with them.

A number says nothing for long: by the time that it is acted on, the device may be gone, and have another test's image.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from kvtier_node.kernel import loop
from kvtier_node.kernel.loop import LoopDevice

LIMIT_S = 60.0


def loop_devices_below(base: str | Path) -> list[LoopDevice]:
    """Devices with an image below `base`, each with its image's inode: `loop.detach` takes no other's."""
    found = []
    for name, path in loop.backing_paths().items():
        if not path.startswith(f"{base}/"):
            continue
        number = int(name.removeprefix("loop"))
        now = loop.status(LoopDevice(f"/dev/{name}", number))
        device = now and LoopDevice(f"/dev/{name}", number, now.backing_dev, now.backing_ino)
        # Once more: between the first look and its status the number may have become another image's.
        if device is not None and (loop.backing_path(device) or "").startswith(f"{base}/"):
            found.append(device)
    return found


def detach_below(base: str | Path) -> None:
    for device in loop_devices_below(base):
        loop.detach(device)


def is_given_back(device: LoopDevice) -> bool:
    """Whether the device is free, or another image's by now."""
    now = loop.status(device)
    return now is None or (now.backing_dev, now.backing_ino) != (device.backing_dev, device.backing_ino)


def eventually_given_back(device: LoopDevice) -> bool:
    """Who looks through the devices (another test's agent) has it open for a moment."""
    until = time.monotonic() + LIMIT_S
    while not is_given_back(device):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def remove_cgroup(path: Path) -> None:
    """The kernel counts a process in for a moment after its end."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def open_descriptors() -> int:
    """How many this process has. What an earlier test left to the garbage collector is not closed between two counts."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
