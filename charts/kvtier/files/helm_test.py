"""`helm test`: every replica of the controller answers, exactly one leads, and every node agent is ready.

Asks addresses of the two headless services; no right at the API server is needed.
"""

import os
import socket
import sys
import time
import urllib.error
import urllib.request


def addresses(name, port):
    try:
        found = socket.getaddrinfo(name, port, proto=socket.IPPROTO_TCP)
    except socket.gaierror as error:
        raise SystemExit(f"{name}: {error}") from error
    return sorted({each[4][0] for each in found})


def ask(host, port, path):
    shown = f"[{host}]" if ":" in host else host
    try:
        with urllib.request.urlopen(f"http://{shown}:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def problems():
    port = int(os.environ["CONTROLLER_PORT"])
    leading = 0
    for host in addresses(os.environ["CONTROLLER"], port):
        code, text = ask(host, port, "/healthz")
        if code != 200:
            yield f"controller {host}: /healthz {code}: {text.strip()}"
        leading += "\nkvtier_leading 1.0" in ask(host, port, "/metrics")[1]
    if leading != 1:
        yield f"{leading} controllers lead, and one should"
    port = int(os.environ["NODE_PORT"])
    for host in addresses(os.environ["NODE"], port):
        code, text = ask(host, port, "/readyz")
        if code != 200:
            yield f"node agent {host}: /readyz {code}: {text.strip()}"


until = time.monotonic() + 60
while True:
    found = list(problems())
    if not found:
        print("one controller leads, and every node agent is ready")
        sys.exit(0)
    if time.monotonic() > until:
        sys.exit("\n".join(found))
    time.sleep(2)
