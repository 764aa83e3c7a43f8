"""docs/kubectl-walkthrough.md, as a reader follows it: every command is run in its order, and says what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import images
import pytest
from api_client import Api
from controlplane import wait_until
from installed import ERASURES, TIERS, VOLUMES, Installed
from pages import ROOT, Reader, blocks, matches, missing_line

from node import NODE

pytestmark = [pytest.mark.root, pytest.mark.slow]

PAGE = ROOT / "docs" / "kubectl-walkthrough.md"
NAMESPACE = "team-chat"
_IMAGE, _NODE = "registry.example.com/team/engine:1", "worker-1"


@pytest.fixture
def reader(installed: Installed, tmp_path: Path) -> Iterator[Reader]:
    """With what the page assumes: kvtier, and nobody else's tiers in use."""
    installed.settle()
    try:
        yield Reader.of(installed, tmp_path)
    finally:
        with installed.node.plane.http() as client:
            api = Api(client, NAMESPACE)
            if api.find("namespaces", NAMESPACE) is not None:  # the page deletes it itself, in the end
                api.delete("namespaces", NAMESPACE)
                wait_until("the page's namespace is gone", lambda: api.find("namespaces", NAMESPACE) is None)


def places(installed: Installed) -> list[str]:
    folder = installed.data / "tiers" / "chat"
    return [path.name for path in folder.iterdir()] if folder.exists() else []


def after_the_tier_is_declared(installed: Installed, _: Api) -> None:
    assert not (installed.data / "tiers" / "chat").exists(), "nothing of it is on the node"


def after_the_pod_is_given_its_volume(installed: Installed, api: Api) -> None:
    assert len(places(installed)) == 1
    pod = api.get("pods", "engine-0")
    (container,) = pod["spec"]["containers"]
    assert {"KVTIER_TIER", "KVTIER_MARKER", "KVTIER_SLOT_DIR"} <= {it["name"] for it in container["env"]}
    assert [it["mountPath"] for it in container["volumeMounts"] if it["name"] == "kvtier"] == ["/kvtier"]


def after_the_pod_ended(installed: Installed, _: Api) -> None:
    wait_until("its directory is gone", lambda: not places(installed))  # a moment after it is on record


def after_the_erasure_that_was_asked_for(installed: Installed, api: Api) -> None:
    wait_until("its directory is gone", lambda: not places(installed))
    request = api.get(ERASURES, "contract-ended")
    (result,) = request["status"]["volumes"]
    assert result["verified"]
    assert api.get(ERASURES, result["receiptId"])["metadata"]["labels"]["kvtier.dev/volume"] == result["volumeId"]


def after_the_tier_is_deleted(installed: Installed, api: Api) -> None:
    assert api.find(TIERS, "chat") is None
    wait_until("its directory is gone", lambda: not places(installed))
    wait_until("the objects of its volumes go with it", lambda: not api.list(VOLUMES))


def after_the_uninstall(installed: Installed, api: Api) -> None:
    wait_until("the agent goes", lambda: installed.agent_pod() is None)  # by the garbage collector
    assert api.find("namespaces", NAMESPACE) is None, "nothing held it"
    crds = installed.node.kubectl("get", "crds", "-o", "name").stdout
    assert len([line for line in crds.splitlines() if line.endswith(".kvtier.dev")]) == 4


PROMISED: dict[str, Callable[[Installed, Api], None] | None] = {
    "Declare a tier": after_the_tier_is_declared,
    "Give it to a pod": after_the_pod_is_given_its_volume,
    "Watch the conditions": None,
    "Look from inside the pod": None,
    "End the pod": after_the_pod_ended,
    "Ask for an erasure": after_the_erasure_that_was_asked_for,
    "Delete the tier": after_the_tier_is_deleted,
    "Uninstall": after_the_uninstall,
}
"""What the page says beside its commands and their output, checked at the end of each section."""


def test_the_page_holds_from_its_first_command_to_its_last(reader: Reader, installed: Installed) -> None:
    page = PAGE.read_text().replace(_NODE, NODE).replace(_IMAGE, images.WORKLOAD)
    found = blocks(page)
    assert list(dict.fromkeys(block.heading for block in found)) == list(PROMISED), "a section is not checked"
    said = ""
    with installed.node.plane.http() as client:
        api = Api(client, NAMESPACE)
        for number, block in enumerate(found):
            following = found[number + 1] if number + 1 < len(found) else None
            shown = following.text if following is not None and following.kind == "text" else ""
            if block.kind == "yaml":
                assert block.file, f"what file is this?\n{block.text}"
                reader.write(block)
            elif block.kind == "text":
                missing = missing_line(block.text, said, any_order=block.mode == "any order")
                assert missing is None, f"the page shows {missing!r}, and this was said:\n{said}"
            elif block.kind == "sh":
                any_order = following is not None and following.mode == "any order"
                if block.mode == "watch":
                    said = reader.watch(block, shown)
                elif block.mode == "again":
                    said = reader.again(block, shown, any_order=any_order)
                else:
                    said = reader.run(block)
            else:
                raise AssertionError(f"a block of {block.kind!r} is not known here")
            check = PROMISED[block.heading]
            if check is not None and (following is None or following.heading != block.heading):
                check(installed, api)


def test_the_readme_says_the_same_commands() -> None:
    """What the README shows of a cluster is run too: by the page, or, what installs it, by every test on a node."""
    part = (ROOT / "README.md").read_text().split("## In a cluster\n")[1].split("\n## ")[0]
    run = {line for block in blocks(PAGE.read_text()) if block.kind == "sh" for line in block.text.splitlines()}
    commands = [line for block in blocks(part) if block.kind == "sh" for line in block.text.splitlines()]
    assert len(commands) == 4
    install = (ROOT / "docs" / "install.md").read_text()
    assert all(command in install for command in (*commands[0].split(" && "), commands[1]))
    assert set(commands[2:]) <= run


@pytest.mark.parametrize(
    ("shown", "line", "same"),
    [
        ("kvv-e5c80ff2f38a3ab9667d   InUse   4s", "kvv-00000000000000000000  InUse  12m3s", True),
        ("kvv-e5c80ff2f38a3ab9667d   InUse   4s", "kvv-00000000000000000000  Dying  4s", False),
        ("chat   24h   4s", "chat 12h 4s", False),
        ("read-back     ok       …", " read-back   ok   2000 blocks of 4096 bytes", True),
        ("… said it", "said it", True),
        ("key … present", "key absent", False),
    ],
)
def test_lines_are_compared_by_what_they_say(shown: str, line: str, same: bool) -> None:
    assert matches(shown, line) is same
