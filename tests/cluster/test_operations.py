"""docs/operations.md where a node can show it: its commands are run, with pods in use, and nothing is lost."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import Installed, Use
from pages import ROOT, Block, Reader, blocks

from node import NODE

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture
def reader(installed: Installed, tmp_path: Path) -> Reader:
    installed.settle()
    reader = Reader.of(installed, tmp_path)
    (reader.folder / "charts").symlink_to(ROOT / "charts")
    return reader


@pytest.fixture
def use(installed: Installed, reader: Reader) -> Iterator[Use]:
    with installed.use(plain=False) as use:
        use.declare()
        use.start()
        yield use


def commands(heading: str, **more: str) -> list[str]:
    """Lines of the section's sh blocks, each with what `more` appends to lines that begin so; `helm test` needs a cluster's DNS."""
    page = (ROOT / "docs" / "operations.md").read_text().replace("worker-7", NODE)
    lines = [
        line
        for block in blocks(page)
        if (block.heading, block.kind) == (heading, "sh")
        for line in block.text.splitlines()
    ]
    found = []
    for line in lines:
        if line.startswith("helm test"):
            continue
        command, _, comment = line.partition("#")
        added = next((text for start, text in more.items() if command.startswith(start.replace("_", " "))), "")
        found.append(f"{command} {added} {'#' if comment else ''}{comment}".strip())
    return found


def run(reader: Reader, lines: list[str]) -> str:
    return reader.run(Block("", "sh", "", "\n".join(lines) + "\n", ""))


def test_agents_are_replaced_by_an_upgrade_and_pods_run_on(use: Use, installed: Installed, reader: Reader) -> None:
    before = installed.agent_pod()
    assert before is not None
    change = f"--set node.podAnnotations.round=r{secrets.token_hex(4)}"  # or there is nothing to replace
    run(reader, commands("Upgrade", helm_upgrade=change))
    installed.wait_agent()
    after = installed.agent_pod()
    assert after is not None
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert use.refreshed()["status"]["phase"] == "Running"
    assert use.refreshed()["status"]["containerStatuses"][0]["restartCount"] == 0
    assert use.look_up()["status"]["state"] == "InUse"
    use.node.kill(use.container_pid())
    use.expect_erased("Crash")


def test_a_drained_node_has_nothing_left_of_its_pods(use: Use, installed: Installed, reader: Reader) -> None:
    """Of the pods that use tiers: kvtier's own controllers have no other node here to go to."""
    drain, wait, uncordon = commands(
        "Node drain", kubectl_drain="--pod-selector=kvtier.dev/tier --force --delete-emptydir-data"
    )
    agent = installed.agent_pod() or {}
    try:
        run(reader, [drain, wait])
        assert use.api.find("pods", use.pod_name) is None
        installed.wait_agent()  # it stays
        assert (installed.agent_pod() or {})["metadata"]["uid"] == agent["metadata"]["uid"]
    finally:
        run(reader, [uncordon])
    use.expect_erased("Exit", "Crash")


LOOKS = ("agent=", "kubectl get ", "kubectl describe ", "kubectl events ", "kubectl -n kvtier-system ")
CHANGES = (" rollout restart ", " create ", " delete ", " rollout status ")


def looking() -> list[str]:
    """Every command of the page that only looks at the cluster, in its order. `--previous` is of an agent that ended."""
    page = (ROOT / "docs" / "operations.md").read_text()
    lines = [line for block in blocks(page) if block.kind == "sh" for line in block.text.splitlines()]
    return [
        line
        for line in lines
        if line.startswith(LOOKS) and not any(word in line for word in CHANGES) and "--previous" not in line
    ]


def test_each_command_that_only_looks_is_one(use: Use, installed: Installed, reader: Reader) -> None:
    use.node.kill(use.container_pid())
    record = use.expect_erased("Crash")
    lines = looking()
    assert len(lines) > 20
    text = "\n".join(lines)
    for name, real in (
        ("worker-7", NODE),
        ("team-a", use.api.namespace),
        ("kvv-0123456789abcdef0123", use.volume),
        ("kvr-0123456789abcdef0123", record["status"]["volumes"][0]["receiptId"]),
        ("ENGINE", use.pod_name),
    ):
        assert name in text
        text = text.replace(name, real)
    said = run(reader, text.splitlines())
    for wanted in ("verified: ", f"volume_id          {use.volume}", "NothingLeft"):
        assert wanted in said, said
