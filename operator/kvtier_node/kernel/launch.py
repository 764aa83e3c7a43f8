"""Becomes a tool that cannot outlive its starter: `python -I -S launch.py <starter's pid> <tool> <argument>...`.

A file to run, never to import, without kvtier's or site's modules: it takes ten milliseconds. The death signal survives
exec. Without it, a killed agent's mkfs or cryptsetup would go on after recovery had looked.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    starter, tool, *arguments = sys.argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(starter):
        sys.exit("the starter is gone")
    # Python ignores these two; a tool expects their defaults.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(tool, [tool, *arguments])  # noqa: S606  the caller's own list, never a shell
