"""The process between the harness and the kernel: namespaces in which a guest can harm nothing, and the power switch.

Run as `python -I -S launcher.py CONFIG` by `machine`; CONFIG is JSON (`uml.machine._launch_config`). Standard library.

- Mount namespace: everything is read-only save the one work folder. Root in the guest can remount hostfs read-write,
  so the mount option `ro` alone protects nothing.
- /dev/shm is a tmpfs of this namespace: the guest's memory (keys in it) lies there, reaches no disk, and goes with
  the last process, even if this one and the harness are killed.
- PID namespace: its first process dies, all die; the kernel reports that death only when none is left. So the end of
  this process means that the power is off.
- Without root the same inside a user namespace.

The power switch is standard input: end of file cuts the power. A harness that was killed cuts it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

_LIBC = ctypes.CDLL(None, use_errno=True)
# linux/sched.h, sys/mount.h, linux/mount.h, linux/prctl.h
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG = 1


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def main() -> int:
    config: dict[str, Any] = json.loads(sys.argv[1])
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWPID | (CLONE_NEWUSER if uid else 0)
    _check(_LIBC.unshare(flags), f"unshare({flags:#x})")
    if uid:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {uid} 1")
        _write("/proc/self/gid_map", f"0 {gid} 1")
    work: str = config["work"]
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount(work, work, None, MS_BIND)
    _set_read_only("/", set_=True, recursive=True)
    _set_read_only(work, set_=False, recursive=False)
    _mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0700,size={config['shm_mib']}m")
    launcher = os.pidfd_open(os.getpid())
    child = os.fork()
    if child == 0:
        _first_process(config, launcher)
    for fd in config["guest_fds"]:
        os.close(fd)
    return _watch(child)


def _watch(child: int) -> int:
    """Wait for the machine's own end or for the switch; returns the exit status, 128 + n for signal n."""
    pidfd = os.pidfd_open(child)
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(pidfd, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if 0 in ready and not os.read(0, 4096):
            os.kill(child, signal.SIGKILL)
            break
        if pidfd in ready:
            break
    _, status = os.waitpid(child, 0)
    return _exit_code(status)


def _first_process(config: dict[str, Any], launcher: int) -> NoReturn:
    """Process 1 of the PID namespace: its death is the power cut. It only starts the kernel and reaps."""
    code = 126
    try:
        _check(_LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PDEATHSIG)")
        if select.select([launcher], [], [], 0)[0]:
            os._exit(code)  # it died before the line above
        # Descriptor 0 must never be free: the kernel's stubs put a pipe there, over whatever took the number.
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 0)
        _mount("proc", "/proc", "proc", 0)
        kernel = os.fork()
        if kernel == 0:
            _become_kernel(config)
        while True:
            pid, status = os.wait()
            if pid == kernel:
                code = _exit_code(status)
                break
    except BaseException as error:  # there is nobody above to tell
        print(f"launcher: {error!r}", file=sys.stderr, flush=True)
    os._exit(code)


def _become_kernel(config: dict[str, Any]) -> NoReturn:
    try:
        os.dup2(2, 1)  # the kernel's own first words and the guest's console, in order
        # Descriptors 10 and 11 are the serial line: what the guest reads, what it writes (see `machine`).
        # Out of the way first: one of them may have the other's number.
        copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in config["guest_fds"]]
        for target, fd in zip((10, 11), copies, strict=True):
            os.dup2(fd, target)
        os.closerange(12, 4096)
        with contextlib.suppress(OSError):
            os.closerange(3, 10)
        os.chdir(config["work"])
        os.execve(config["argv"][0], config["argv"], {"TMPDIR": "/dev/shm", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    except BaseException as error:  # a forked child must not return
        print(f"launcher: {error!r}", file=sys.stderr, flush=True)
    os._exit(127)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _set_read_only(path: str, *, set_: bool, recursive: bool) -> None:
    attr = _MountAttr(MOUNT_ATTR_RDONLY if set_ else 0, 0 if set_ else MOUNT_ATTR_RDONLY, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = _LIBC.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR), AT_FDCWD, path.encode(), flags, ctypes.byref(attr), ctypes.sizeof(attr)
    )
    _check(result, f"mount_setattr({path})")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    data = options.encode() or None
    result = _LIBC.mount(source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data)
    _check(result, f"mount({target})")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    sys.exit(main())
