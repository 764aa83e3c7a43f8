"""One file made durable, one only written, on the file system and under the device that the test names; then a halt.

args: kind (file system), device ("plain", "lying"), seen ("write": first boot; "read": after the cut).
"""

from __future__ import annotations

import time

from umlguest import blockdev, channel

DISK = "/dev/ubdb"
kind = channel.args["kind"]
# The guest's kernel would write everything after 30 s; ext4 commits after 5 s. Neither may happen by chance.
options = ["commit=300"] if kind == "ext4" else []


def flakey(behaviour: str) -> str:
    return f"flakey {DISK} 0 {behaviour}"


def write() -> None:
    blockdev.make_file_system(kind, DISK)
    device, length = DISK, blockdev.sectors(DISK)
    if channel.args["device"] == "lying":
        blockdev.load("dm-flakey")
        device = blockdev.dm_create("flaky", flakey("60000 0"), length)
    with blockdev.mounted(device, options, kind) as volume:
        blockdev.write_durably(volume / "before", b"before the lie")
        if channel.args["device"] == "lying":
            # From here on the disk says yes to every write and every flush, and keeps none.
            blockdev.dm_reload("flaky", flakey("0 60000 1 drop_writes"), length)
        blockdev.write_durably(volume / "durable", b"fsynced")
        (volume / "loose").write_bytes(b"not fsynced")
        channel.barrier("written", here=sorted(path.name for path in volume.iterdir() if path.is_file()))
        time.sleep(3600)


def read() -> None:
    with blockdev.mounted(DISK, options, kind) as volume:
        files = {path.name: path.read_text() for path in volume.iterdir() if path.is_file()}
    channel.report("found", files=files)


write() if channel.args["seen"] == "write" else read()
