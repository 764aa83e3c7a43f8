"""The other end of `kernel.bounded.call`: one function call in a fresh interpreter that dies with its caller.

`python -I -m kvtier_node.kernel.child <reply descriptor> <starter's pid>`, the request as JSON on stdin. The function
is called with `fds` (name to descriptor) and its own arguments, all by keyword, and returns a dict. The reply is one
JSON object: `result`, `os_error`, `kvtier_error`, or `failure` (an exception's type and place, never its text: that may
quote an argument). Nothing is imported here that the call does not need.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any

from kvtier_api.errors import KvtierError
from kvtier_node.kernel import libc


def _place(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else f"{os.path.basename(at.tb_frame.f_code.co_filename)}:{at.tb_lineno}"


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        module, _, name = request["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(fds=request["fds"], **request["args"])
        if not isinstance(result, dict):
            return {"failure": f"{request['function']} returned {type(result).__name__}, not a dict"}
        json.dumps(result)
    except KvtierError as error:
        fields = {"cause": error.cause, "obj": error.obj, "remedy": error.remedy}
        return {"kvtier_error": {"class": type(error).__name__, **fields}}
    except OSError as error:
        if error.errno is None:
            return {"failure": f"{type(error).__name__} at {_place(error)}"}
        name = error.filename if isinstance(error.filename, str) else None
        return {"os_error": {"errno": error.errno, "strerror": error.strerror, "filename": name}}
    except BaseException as error:  # noqa: BLE001  sent to the caller, which raises it
        return {"failure": f"{type(error).__name__} at {_place(error)}"}
    return {"result": result}


def main() -> None:
    reply_fd, starter = int(sys.argv[1]), int(sys.argv[2])
    libc.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != starter:
        return
    request = json.loads(sys.stdin.buffer.read())
    with open(reply_fd, "wb") as reply:
        reply.write(json.dumps(_answer(request)).encode())


if __name__ == "__main__":
    main()
