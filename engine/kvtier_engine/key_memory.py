"""Memory for raw keys: locked, undumpable, wiped in forked children, zeroed when a key is dropped.

What is covered, and what is not (docs/limitations.md quotes this):

* The raw bytes of every key live in cells of anonymous private mappings: mlock(2) (never in swap, though a
  hibernation image does contain locked pages), MADV_DONTDUMP (in no core dump), MADV_WIPEONFORK (a child of fork(2)
  sees zeros, whoever called fork), and are overwritten with zeros when the key is dropped. They are drawn from
  /dev/urandom straight into their cell and never exist as a Python `bytes` object.
* To use a key, OpenSSL expands it into a context on the ordinary heap, which is neither locked nor excluded from
  dumps. The engine makes such a context for one task (at most one staging buffer of slots) and drops it at once;
  OpenSSL cleanses it when it is freed. So expanded keys exist on the heap only during the microseconds to
  milliseconds of sealing or opening; `KeyRing.drop` and `fork` wait until none does.
* `harden_process` switches core dumps of the whole process off, and with them ptrace and /proc/PID/mem by processes
  of the same user. It does not stop root, a hypervisor, a debugger of the hardware, or a memory image of the machine.
* Processor registers and the stack of the encrypting thread may keep key material until they are overwritten. Python
  gives no means to clear them.
* Plaintext blocks in the caller's memory (GPU, pinned buffers, /dev/shm) are the caller's. They are not protected here.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from kvtier_api.errors import EngineError
from kvtier_engine import kernel_calls

__all__ = ["KEY_BYTES", "KeyMemory", "harden_process"]

KEY_BYTES: Final = 32
_ARENA_BYTES: Final = 64 * 1024
_CELLS: Final = _ARENA_BYTES // KEY_BYTES
_ZERO: Final = bytes(KEY_BYTES)


def harden_process() -> None:
    """Make this process undumpable (PR_SET_DUMPABLE 0). Undone by execve(2) or a change of credentials.

    A side effect to know of: other processes of the same user can no longer use ptrace, process_vm_readv or
    pidfd_getfd on this one, which some GPU libraries do between ranks. Raises OSError.
    """
    kernel_calls.set_dumpable(False)


class KeyMemory:
    """Cells of 32 bytes in locked memory. Not thread-safe: the key ring calls it under its lock."""

    def __init__(self) -> None:
        self._arenas: list[mmap.mmap] = []
        self._views: list[memoryview] = []
        self._free: list[int] = []
        self._grow()

    def _grow(self) -> None:
        arena = mmap.mmap(-1, _ARENA_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            kernel_calls.lock_memory(arena)
            arena.madvise(mmap.MADV_DONTDUMP)
            arena.madvise(kernel_calls.MADV_WIPEONFORK)
        except OSError as error:
            arena.close()
            raise EngineError(
                f"no locked memory for keys: {error.strerror or error}",
                obj=f"mlock of {_ARENA_BYTES} bytes",
                remedy="raise RLIMIT_MEMLOCK (ulimit -l) of this process, or have fewer tenants at a time",
            ) from error
        first = len(self._arenas) * _CELLS
        self._arenas.append(arena)
        self._views.append(memoryview(arena))
        self._free.extend(range(first + _CELLS - 1, first - 1, -1))

    def new(self) -> int:
        """Draw a random key into a free cell and return the cell's number.

        Raises EngineError when no more memory can be locked or the random source fails.
        """
        if not self._free:
            self._grow()
        cell = self._free.pop()
        view = self.view(cell)
        random = os.open("/dev/urandom", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.readv(random, [view]) != KEY_BYTES or view == _ZERO:
                raise EngineError("no random key", obj="/dev/urandom", remedy="check the random device of this machine")
        finally:
            os.close(random)
        return cell

    def view(self, cell: int) -> memoryview:
        """The 32 bytes of a cell: a view of the locked memory, not a copy."""
        start = cell % _CELLS * KEY_BYTES
        return self._views[cell // _CELLS][start : start + KEY_BYTES]

    def wipe(self, cell: int) -> None:
        """Overwrite a key with zeros and free its cell."""
        self.view(cell)[:] = _ZERO
        self._free.append(cell)

    def wipe_all(self) -> None:
        """Overwrite every cell with zeros. The memory stays mapped and locked until the process drops it."""
        for view in self._views:
            view[:] = bytes(len(view))

    @property
    def locked_bytes(self) -> int:
        return _ARENA_BYTES * len(self._arenas)
