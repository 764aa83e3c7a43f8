"""What a dm-crypt device is, and the end of its key, in a child: suspending can hang, and the kernel tells keys with tables.

A table is read into one locked page, which is wiped; no key leaves this process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from kvtier_node.kernel import device_mapper, libc, memory

__all__ = ["describe", "destroy_key"]


@contextmanager
def _locked_page() -> Iterator[memoryview]:
    libc.no_core_dumps()
    libc.set_dumpable(False)
    with memory.secret_page(mmap.PAGESIZE) as page:
        yield page


def describe(*, fds: dict[str, int], name: str) -> dict[str, object]:
    """The live table as `device_mapper.Table` has it, or `{"table": None}`."""
    del fds
    with _locked_page() as page, device_mapper.control() as control:
        table = None if control is None else device_mapper.live_table(control, name, page)
    return {"table": None if table is None else asdict(table)}


def destroy_key(*, fds: dict[str, int], name: str) -> dict[str, object]:
    """Make the kernel forget the key, whoever has the device mounted or open, and what the kernel then says.

    `found`: the target that was live (None: no such device; "": none was live). `wiped`: the key was seen to be zeros.
    `left`: the target now. `inactive`: a loaded table is left, which may hold a key. Can be run again after a crash at any
    point. Raises OSError.
    """
    del fds
    with _locked_page() as page, device_mapper.control() as control:
        table = None if control is None else device_mapper.live_table(control, name, page)
        if control is None or table is None:
            return {"found": None, "wiped": False, "left": None, "inactive": False}
        found, wiped = table.target, False
        if found not in (
            "",
            "crypt",
            "error",
        ):  # no device of kvtier's: its name is a volume's by chance, or by somebody's will
            return {"found": found, "wiped": False, "left": found, "inactive": table.inactive}
        if found == "crypt":
            # Refused unless suspended; whatever is on its way to the disk under the old key may still get there.
            device_mapper.suspend(control, name)
            device_mapper.message(control, name, "key wipe")
            table = device_mapper.live_table(control, name, page) or device_mapper.Table()
            wiped = table.wiped
        if table.inactive:
            device_mapper.clear(control, name)
        if found == "crypt":
            device_mapper.load_error(control, name, table.sectors)
        if found:
            device_mapper.resume(control, name)
        left = device_mapper.live_table(control, name, page) or device_mapper.Table()
    return {"found": found, "wiped": wiped, "left": left.target, "inactive": left.inactive}
