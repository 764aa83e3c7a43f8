"""What a test needs of the machine. Missing: a named skip for a user, a failure in CI."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def missing(what: str) -> NoReturn:
    """Skip with the reason, or fail where CI is set: a green CI must not hide a missing piece."""
    if os.environ.get("CI"):
        pytest.fail(f"needs {what}: install it in `make test` (CI skips nothing)")
    pytest.skip(f"needs {what}")


def need_root() -> None:
    if os.geteuid() != 0:
        missing("root")


def need_tool(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        missing(f"the program {name}")
    return path


def need_module(name: str) -> None:
    try:
        __import__(name)
    except ImportError:
        missing(f"the Python module {name}")
