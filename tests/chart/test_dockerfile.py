"""The Dockerfile, read line by line: that the chart runs what is in its two images, and what a build may not do.

What comes out when it is built: tests/cluster/test_built_images.py.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest
from rendering import ROOT, Rendered

TOOLS = {"cryptsetup": "cryptsetup-bin", "dmsetup": "dmsetup", "mkfs.ext4": "e2fsprogs"}


@dataclass
class Stage:
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for name, rest in self.steps if name == word]

    def last(self, word: str) -> str:
        return self.all(word)[-1]


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    stage = Stage("")
    for line in filter(None, map(str.strip, text.splitlines())):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            base, _, name = rest.split()
            stage = found.setdefault(name, Stage(base))
        else:
            stage.steps.append((word, rest))
    return found


def test_there_is_one_base_and_it_can_be_chosen(stages: dict[str, Stage]) -> None:
    assert {name: stage.base for name, stage in stages.items()} == {
        "base": "${BASE_IMAGE}",
        "needs": "base",
        "build": "needs",
        "controller": "base",
        "node": "base",
    }
    assert ":latest" not in (ROOT / "Dockerfile").read_text()


def test_the_controller_is_not_root(stages: dict[str, Stage], default: Rendered) -> None:
    user = stages["controller"].last("USER")
    assert user == "65532:65532"
    spec = default.one("Deployment")["spec"]["template"]["spec"]["securityContext"]
    assert f"{spec['runAsUser']}:{spec['runAsGroup']}" == user


def test_the_controller_has_no_tool_and_the_node_has_those_that_the_agent_starts(stages: dict[str, Stage]) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "operator" / "kvtier_node").rglob("*.py"))
    started = set(re.findall(r'\[\s*"((?:mkfs|crypt|dmsetup|losetup|blkdiscard|wipefs)[a-z0-9.]*)"', sources))
    assert started == set(TOOLS)
    installed = " ".join(stages["node"].all("RUN"))
    for package in TOOLS.values():
        assert f" {package}" in installed
    assert stages["controller"].all("RUN") == []


def test_nothing_is_fetched_by_address_and_no_secret_is_an_argument(stages: dict[str, Stage]) -> None:
    for stage in stages.values():
        assert stage.all("ADD") == []
        for name in (*stage.all("ARG"), *stage.all("ENV")):
            assert not re.search(r"TOKEN|PASSWORD|SECRET|KEY=", name)


def test_the_chart_runs_what_the_images_run(stages: dict[str, Stage], default: Rendered) -> None:
    assert json.loads(stages["controller"].last("ENTRYPOINT")) == default.controller["command"]
    assert json.loads(stages["node"].last("ENTRYPOINT")) == default.agent["command"]
    assert int(stages["controller"].last("EXPOSE")) == default.controller["ports"][0]["containerPort"]
    assert int(stages["node"].last("EXPOSE")) == default.agent["ports"][0]["containerPort"]


def test_the_context_holds_what_is_copied_and_nothing_else(stages: dict[str, Stage]) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    let_in = {line[1:].rstrip("/") for line in ignored if line.startswith("!")}
    steps = [step for name in ("needs", "build") for step in stages[name].all("COPY")]
    copied = {source for step in steps for source in step.split()[:-1]}
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)
