"""A page of the documents as a reader follows it: its fenced blocks, a shell to run them in, and what they say compared.

What is another one in every cluster and at every time (ids, ages, times, hashes) is one word each; `…` stands for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from controlplane import binary, wait_until
from installed import Installed

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 400


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind`: sh, yaml, text; `mode`: what follows it on the fence's line; `file`: named right before it."""

    heading: str
    kind: str
    mode: str
    text: str
    file: str


def blocks(page: str) -> list[Block]:
    found, heading, last = [], "", ""
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        fence = re.fullmatch(r"```(\w+) ?(.*)", line)
        if fence is None:
            last = line or last
            continue
        text = []
        for inner in lines:
            if inner == "```":
                break
            text.append(inner)
        named = re.findall(r"`(\w+\.yaml)`", last) if fence[1] == "yaml" else []
        found.append(Block(heading, fence[1], fence[2], "\n".join(text) + "\n", named[-1] if named else ""))
    return found


_OTHER = (
    (r"\bkvv-[0-9a-f]{20}\b", "VOLUME"),
    (r"\bkvr-[0-9a-f]{20}\b", "RECEIPT"),
    (r"\b(?:[0-9a-f]{64}|[0-9a-f]{32})\b", "HEX"),
    (r"\b[A-Z][a-z]{2} +\d+ \d\d:\d\d\b", "DATE"),
    (r"\b(?:\d+m)?\d+s(?: \(x\d+ over (?:\d+m)?\d+s\))?(?= |$)", "AGE"),
    (r"\b\d+m(?= |$)", "AGE"),
)


def same_everywhere(line: str) -> str:
    for pattern, word in _OTHER:
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def matches(shown: str, line: str) -> bool:
    parts = [re.escape(part.strip()) for part in same_everywhere(shown).split("…")]
    return re.fullmatch(r"\s*.*\s*".join(parts), same_everywhere(line)) is not None


def missing_line(shown: str, said: str, *, any_order: bool) -> str | None:
    """The first line that is shown and was not said; None if all were, in the order that is shown unless `any_order`."""
    rest = said.splitlines()
    for wanted in shown.splitlines():
        at = next((number for number, line in enumerate(rest) if matches(wanted, line)), None)
        if at is None:
            return wanted
        rest = rest if any_order else rest[at + 1 :]
    return None


@dataclass
class Reader:
    """Who follows the page: a shell in a directory of its own, with kubectl and helm."""

    folder: Path
    env: dict[str, str]

    @classmethod
    def of(cls, installed: Installed, folder: Path) -> Reader:
        """As the cluster's administrator, with a kubeconfig of their own: `kubectl config` writes in it."""
        programs = folder / "programs"
        programs.mkdir()
        for name in ("kubectl", "helm"):
            found = binary(name)
            assert found is not None
            (programs / name).symlink_to(found)
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_bytes(installed.node.plane.admin.read_bytes())
        (folder / "page").mkdir()
        path = f"{programs}:{os.environ['PATH']}"
        return cls(folder / "page", os.environ | {"PATH": path, "KUBECONFIG": str(kubeconfig), "HOME": str(folder)})

    def write(self, block: Block) -> None:
        (self.folder / block.file).write_text(block.text)

    def run(self, block: Block) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        failed = done.returncode != 0
        if failed != (block.mode == "refused"):
            raise AssertionError(f"{block.text}: exit code {done.returncode}\n{done.stdout}\n{self.describe()}")
        return done.stdout

    def describe(self) -> str:
        """What a person would look at when a command did something else."""
        looks = (
            "kubectl get kvce,kvcv -A -o yaml",
            "kubectl -n kvtier-system logs daemonset/kvtier-node --tail=40",
            "kubectl -n kvtier-system logs deployment/kvtier-controller --all-pods --tail=40",
        )
        said = [subprocess.run(["bash", "-c", look], env=self.env, capture_output=True, text=True) for look in looks]
        return "\n".join(
            f"$ {look}\n{done.stdout[-8000:]}{done.stderr}" for look, done in zip(looks, said, strict=True)
        )

    def again(self, block: Block, shown: str, *, any_order: bool) -> str:
        """Until it says what is shown: an event is told a moment after what it is about. For commands that change nothing."""
        said = ""

        def is_said() -> bool:
            nonlocal said
            said = self.run(block)
            return missing_line(shown, said, any_order=any_order) is None

        with contextlib.suppress(TimeoutError):  # the caller compares, and says what is missing
            wait_until(block.text, is_said, limit_s=120, pause_s=0.5)
        return said

    def watch(self, block: Block, shown: str) -> str:
        """Until all that is shown was said; then Ctrl-C."""
        process = subprocess.Popen(
            ["bash", "-c", f"exec {block.text}"],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(iter(process.stdout.readline, "")), daemon=True)  # type: ignore[union-attr]
        reader.start()
        try:
            wait_until(
                f"{block.text}shows {shown}",
                lambda: missing_line(shown, "".join(said), any_order=False) is None,
                limit_s=180,
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{''.join(said)}") from error
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
            reader.join(20)
            process.stdout.close()
        return "".join(said)
