"""What a test's pod runs: an engine that keeps blocks in its tier, and one that never heard of kvtier, in one process.

It says what it does in JSON lines: first what it found of an earlier process's texts, then that everything is on the disk. Then it
stays, with a slot file open. `SEED` makes the texts; `PLAIN` set: it also writes in the clear, as an unmodified engine would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from canaries import KINDS, canary, filled

from kvtier_engine import Outcome, SlotStore

TENANT = b"tenant-a"
SLOTS = Path(os.environ["KVTIER_SLOT_DIR"])
MARKER = Path(os.environ["KVTIER_MARKER"])


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def found() -> dict[str, int]:
    """How often the texts stand in the slot files, before this process writes anything."""
    content = b"".join(path.read_bytes() for path in sorted(SLOTS.iterdir()) if path.is_file())
    return {kind: content.count(canary(os.environ["SEED"], kind)) for kind in KINDS}


def write_and_sync(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    say(files=sorted(path.name for path in SLOTS.iterdir()), found=found())
    seed = os.environ["SEED"]
    marker = json.loads(MARKER.read_text())
    store = SlotStore.from_environment()
    size, ranks = marker["slot_size_bytes"], marker["ranks"]
    block = filled(canary(seed, "prompt"), size)
    stored = [store.put(bytes([number]), [block] * ranks, tenant=TENANT) for number in range(12)]
    room = [bytearray(size) for _ in range(ranks)]
    loaded = store.get(b"\x05", room, tenant=TENANT)
    right = loaded is Outcome.LOADED and all(bytes(each) == block for each in room)
    write_and_sync(Path("/outside/control"), filled(canary(seed, "control"), 1 << 16))
    if os.environ.get("PLAIN"):
        write_and_sync(SLOTS / "plain.bin", filled(canary(seed, "plain"), 1 << 18))
    os.sync()
    say(
        written=all(outcome is Outcome.STORED for outcome in stored) and right,
        uid=os.getuid(),
        volume=marker["volume_id"],
    )
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
