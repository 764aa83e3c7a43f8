"""`python -m kvtier_operator --all-namespaces --lease-namespace kvtier-system`: the controller's process."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from kvtier_api.errors import KvtierError
from kvtier_operator.application import run
from kvtier_operator.logs import configure
from kvtier_operator.settings import parse_settings

__all__ = ["main"]


def main() -> int:
    try:
        settings = parse_settings()
    except KvtierError as error:
        print(f"kvtier_operator: {error}", file=sys.stderr)
        return error.exit_code
    if settings.kubeconfig:
        os.environ["KUBECONFIG"] = settings.kubeconfig  # kopf reads its file from nowhere else
    configure(settings.log_format, settings.log_level)
    return asyncio.run(run(settings))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A term that is stuck in its thread must not keep the process: the Lease is lost, another replica acts.
    os._exit(code)
