#!/usr/bin/env python3
"""Fetch the kernel that tests/vm boots (user-mode Linux, from Debian sid) into the cache; nothing to do if it is there.

`--packages` prints the Debian packages that the host needs first, for `apt-get install`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "harness"))

from uml import kernel


def main() -> int:
    if sys.argv[1:] == ["--packages"]:
        print(" ".join(kernel.HOST_PACKAGES))
        return 0
    try:
        found = kernel.fetch()
    except kernel.KernelMissing as error:
        print(f"fetch_kernel: {error}", file=sys.stderr)
        return 1
    note = "" if found.version == kernel.TESTED_VERSION else f" (tested with {kernel.TESTED_VERSION})"
    print(f"user-mode Linux {found.version}{note} in {found.linux.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
