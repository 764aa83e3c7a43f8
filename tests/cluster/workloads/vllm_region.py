"""As vLLM's offloading does: a region in /dev/shm under a name that is the same after each restart, made anew or not at all.

Then what `engine_writer` does, with the region mapped.
"""

from __future__ import annotations

import mmap
import os

import engine_writer
from canaries import canary, filled

REGION = "/dev/shm/vllm_offload_kvtier-test.mmap"


def main() -> None:
    fd = os.open(REGION, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, 1 << 20)
    with mmap.mmap(fd, 1 << 20) as region:
        region[: 1 << 16] = filled(canary(os.environ["SEED"], "plain"), 1 << 16)
        engine_writer.main()


if __name__ == "__main__":
    main()
