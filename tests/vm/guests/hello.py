"""The smallest guest: says that it is up, then does what the test asks by its arguments."""

from __future__ import annotations

import os
import sys
import time

from umlguest import channel

with open("/proc/uptime") as file:
    channel.report("up", pid=os.getpid(), uid=os.getuid(), uptime_s=float(file.read().split()[0]), python=sys.version)
match channel.args.get("then"):
    case "fail":
        raise RuntimeError("this guest was told to fail")
    case "hang":
        time.sleep(3600)
    case "wait":
        channel.report("word", word=channel.listen())
        channel.listen()
