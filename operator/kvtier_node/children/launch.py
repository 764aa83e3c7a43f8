"""The consumer's first instant: wait until the consumer is on record, then become it. The pid stays the same.

`python -I -m kvtier_node.children.launch GATE_FD UID GID COMMAND [ARGUMENT...]`. Nothing runs before a byte comes through the
gate; an end of file there means that the guardian died first, and then the command never starts. Environment,
descriptors 0 to 2 and working directory are the caller's. Exit codes as a shell's: 127 not found, 126 not executable.
"""

from __future__ import annotations

import os
import signal
import sys

_NOT_FOUND = 127
_NOT_EXECUTABLE = 126


def main() -> int:
    gate, uid, gid, command = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    if os.read(gate, 1) != b"g":
        return 1
    os.close(gate)
    if (uid, gid) != (os.geteuid(), os.getegid()):
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606  this process becomes the command
    except FileNotFoundError:
        sys.stderr.write(f"kvtier run: {command[0]}: command not found\n")
        return _NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"kvtier run: {command[0]}: {error.strerror}\n")
        return _NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main())
