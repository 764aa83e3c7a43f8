"""Process 1 inside the machine: mounts what a system has, runs the script in a child, reports its end, powers off.

Called by the kernel as `python -I -S -B init.py BOOT`, BOOT being the JSON that `uml.machine` wrote. It reaps orphans,
as process 1 must. Leaves all the rest to the script.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import traceback
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from umlguest import channel

_LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 2, 4, 8, 4096
#: Folders that a guest may write and that start empty.
_FRESH = (("/dev/shm", "1777"), ("/tmp", "1777"), ("/run", "0755"), ("/mnt", "0755"))
RB_POWER_OFF = 0x4321FEDC  # linux/reboot.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1


def main() -> NoReturn:
    status = 125
    try:
        with open(sys.argv[1]) as file:
            boot: dict[str, Any] = json.load(file)
        _prepare(boot)
        channel.open_line()
        status = _run_child(boot)
    except BaseException:  # process 1 must reach the power-off
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        channel.report("exit", status=status)
    except BaseException:
        traceback.print_exc()
    os.sync()
    _LIBC.reboot(RB_POWER_OFF)
    os._exit(status)


def _prepare(boot: dict[str, Any]) -> None:
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # The kernel mounted devtmpfs on /dev already.
    os.makedirs("/dev/shm", exist_ok=True)
    os.makedirs("/dev/pts", exist_ok=True)
    _mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC)
    # What the script needs may lie under the host's /tmp: held by descriptors, and bound back over the empty folder.
    kept = [(path, os.open(path, os.O_PATH)) for path in boot["keep"]]
    for path, mode in _FRESH:
        _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")
    for path, fd in kept:
        if any(path.startswith(fresh + "/") for fresh, _ in _FRESH):
            os.makedirs(path, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", path, "none", MS_BIND)
        os.close(fd)
    _mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # dm-crypt loads its cipher through the kernel's own request for a module, so the kernel must know this modprobe.
    with open("/proc/sys/kernel/modprobe", "w") as file:
        file.write(boot["modprobe"])
    socket.sethostname("kvtier-vm")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(sock, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def _run_child(boot: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        _become_script(boot)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _become_script(boot: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/tmp", "TERM": "dumb"}
        # No udevd runs here, so dmsetup must make the nodes in /dev/mapper itself; it does so only if told.
        env |= {"LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "DM_DISABLE_UDEV": "1"}
        os.environ.clear()
        os.environ.update(env | boot["env"])
        os.environ["PYTHONPATH"] = os.pathsep.join(boot["path"])  # for Python processes that the script starts
        sys.path[:] = [os.path.dirname(boot["script"]), *boot["path"]]
        channel.args.update(boot["args"])
        os.chdir("/tmp")
        import runpy

        runpy.run_path(boot["script"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # a forked child must not return
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _LIBC.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount {kind} on {target}: {os.strerror(error)}")


if __name__ == "__main__":
    main()
