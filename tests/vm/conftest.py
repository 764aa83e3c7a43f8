"""What every test of this folder shares: the harness on the path, the kernel, a machine in a work folder of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from requirements import missing, need_tool

_HERE = Path(__file__).resolve().parent
if str(_HERE / "harness") not in sys.path:
    sys.path.insert(0, str(_HERE / "harness"))

if TYPE_CHECKING:
    from uml.agentnode import AgentNode
    from uml.kernel import Kernel
    from uml.machine import Machine

GUESTS = _HERE / "guests"


@pytest.fixture(scope="session")
def uml_kernel() -> Kernel:
    """The kernel in the cache. Fetching it is `make test`'s work: a test that downloads hides what it needs."""
    from uml import kernel

    for tool in ("cryptsetup", "dmsetup", "mkfs.ext4", "mkfs.xfs", "kmod"):
        need_tool(tool)
    try:
        return kernel.find()
    except kernel.KernelMissing as error:
        missing(f"user-mode Linux ({error})")


@pytest.fixture
def boot(uml_kernel: Kernel, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """`boot("hello.py", disks=[...], args={...})`: a machine that is on. It is cut at the end of the test at the latest."""
    from uml.machine import Machine

    with ExitStack() as machines:

        def start(guest: str, *, work: Path | None = None, **options: Any) -> Machine:
            machine = Machine(work or tmp_path, GUESTS / guest, uml_kernel, **options)
            return machines.enter_context(machine)

        yield start


@pytest.fixture
def make_disk(tmp_path: Path) -> Callable[..., Path]:
    """`make_disk(64)`: a new image of that many MiB, all holes."""

    def make(size_mib: int, name: str = "disk.img", folder: Path | None = None) -> Path:
        path = (folder or tmp_path) / name
        with open(path, "xb") as file:
            file.truncate(size_mib << 20)
        return path

    return make


@pytest.fixture
def new_node(boot: Callable[..., Machine], tmp_path: Path) -> Callable[..., AgentNode]:
    """`new_node(kind="ext4")`: a node for the agent, with an empty disk, not yet booted."""
    from uml.agentnode import AgentNode, make_node_disk

    def make(kind: str = "ext4", **options: Any) -> AgentNode:
        return AgentNode(make_node_disk(tmp_path / "node.img", kind), boot, kind=kind, **options)

    return make


_COUNT = "kvtier count: "


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[[str, int], None]:
    """`count("cuts at random", 5)`: what a test did, summed over all tests and told at the end of the run."""

    def add(what: str, number: int) -> None:
        request.node.user_properties.append((_COUNT + what, number))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    sums: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, number in getattr(report, "user_properties", []):
                if report.when == "call" and name.startswith(_COUNT):
                    sums[name.removeprefix(_COUNT)] += number
    if sums:
        terminalreporter.section("what was cut, killed and replayed")
        for what, number in sorted(sums.items()):
            terminalreporter.line(f"{number:6} {what}")
