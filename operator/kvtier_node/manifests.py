"""KVCacheTier manifests: one file for a command, a directory of them as kubelet reads static pods.

A file that cannot be used is reported with its error, and what it declared before stays in force: a typing mistake never ends
a running volume. What follows from a tier that is no longer declared is left to the agent.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from kvtier_api.documents import load_documents
from kvtier_api.errors import InvalidResource, KvtierError, NotFound
from kvtier_api.tier import KVCacheTier
from kvtier_node.node import namespace_of

__all__ = ["BadManifest", "ManifestDirectory", "Manifests", "find_tier", "key_of", "load_tier_file"]

_SUFFIXES: Final = (".yaml", ".yml")
_FileState: TypeAlias = tuple[int, int, int, int]


def key_of(tier: KVCacheTier) -> str:
    """`namespace/name`, with the default namespace for a manifest without one."""
    return f"{namespace_of(tier)}/{tier.metadata.name}"


@dataclass(frozen=True)
class BadManifest:
    """A file, or the directory itself, that cannot be used."""

    path: str
    error: KvtierError


@dataclass
class Manifests:
    """What is declared now. `origin` has each tier's file. Only when nothing is `bad` can a tier be called removed."""

    tiers: dict[str, KVCacheTier] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    bad: list[BadManifest] = field(default_factory=list)
    none: bool = False
    """No directory is looked at: nothing is declared by a file, and nothing was removed."""

    @property
    def complete(self) -> bool:
        return not self.bad and not self.none

    def problem_of(self, key: str) -> str:
        """Why the manifest of a tier that is still in force is bad by now; empty if it is not."""
        return next((str(bad.error) for bad in self.bad if bad.path == self.origin.get(key)), "")


class ManifestDirectory:
    """A directory of `*.yaml` and `*.yml`; hidden files are passed over, as by kubelet. Files are read again on change.

    An empty path: there is none, as on a node whose tiers are all in the API.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._seen: dict[str, _FileState] = {}
        self._good: dict[str, list[KVCacheTier]] = {}
        self._errors: dict[str, KvtierError] = {}

    def scan(self) -> Manifests:
        """Look at every file; read those whose mtime, size or inode changed. Never raises for what is in the directory."""
        if not self.path:
            return Manifests(none=True)
        try:
            names = sorted(name for name in os.listdir(self.path) if _is_manifest(name))
        except OSError as error:
            problem = NotFound(
                f"the directory of manifests cannot be read: {error.strerror}",
                obj=self.path,
                remedy="create it, or name another with --manifests",
            )
            found = self._collect(self._good)
            return Manifests(found.tiers, found.origin, [BadManifest(self.path, problem), *found.bad])
        paths = [os.path.join(self.path, name) for name in names]
        for path in set(self._seen) - set(paths):
            self._forget(path)
        for path in paths:
            self._look(path)
        return self._collect(paths)

    def _forget(self, path: str) -> None:
        for known in (self._seen, self._good, self._errors):
            known.pop(path, None)

    def _look(self, path: str) -> None:
        try:
            info = os.stat(path)
        except FileNotFoundError:
            if not os.path.islink(path):  # removed since it was listed; a link to nowhere is a bad file
                self._forget(path)
                return
            state: _FileState = (0, 0, 0, 0)
        except OSError:
            state = (0, 0, 0, 1)  # reading it says why
        else:
            state = (info.st_mtime_ns, info.st_size, info.st_ino, stat.S_IFMT(info.st_mode))
        if self._seen.get(path) == state:
            return
        self._seen[path] = state
        try:
            self._good[path] = _tiers_in(path)
            self._errors.pop(path, None)
        except KvtierError as error:
            if not os.path.lexists(path):  # removed since it was looked at
                self._forget(path)
                return
            self._errors[path] = error

    def _collect(self, paths: Iterable[str]) -> Manifests:
        found = Manifests(bad=[BadManifest(path, self._errors[path]) for path in sorted(self._errors)])
        for path in paths:
            for tier in self._good.get(path, ()):
                key = key_of(tier)
                if key in found.tiers:
                    twice = InvalidResource(
                        f"the tier is already declared in {found.origin[key]}",
                        obj=f"{path}: KVCacheTier {key}",
                        remedy="rename one or remove it",
                    )
                    found.bad.append(BadManifest(path, twice))
                else:
                    found.tiers[key], found.origin[key] = tier, path
        return found


def _is_manifest(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".")


def _tiers_in(path: str) -> list[KVCacheTier]:
    tiers = []
    for resource in load_documents(Path(path)):
        if not isinstance(resource, KVCacheTier):
            raise InvalidResource(
                f"a {type(resource).__name__} where KVCacheTiers are read", obj=path, remedy="move it to another file"
            )
        tiers.append(resource)
    return tiers


def find_tier(manifests: str, namespace: str, name: str) -> KVCacheTier:
    """The tier from a directory of manifests, read now.

    Raises NotFound with what is there and what could not be read, InvalidResource for a tier that is declared twice.
    """
    found = ManifestDirectory(manifests).scan()
    key = f"{namespace}/{name}"
    for bad in found.bad:
        if isinstance(bad.error, InvalidResource) and f"KVCacheTier {key}" in bad.error.obj:
            raise bad.error
    if key in found.tiers:
        return found.tiers[key]
    unread = f"; not read: {'; '.join(str(bad.error) for bad in found.bad)}" if found.bad else ""
    raise NotFound(
        f"no tier of this name in {manifests}{unread}",
        obj=f"tier {key}",
        remedy=f"one of: {', '.join(sorted(found.tiers))}"
        if found.tiers
        else "write a KVCacheTier manifest there, or give --tier-file",
    )


def load_tier_file(path: str, namespace: str, name: str | None) -> KVCacheTier:
    """The tier `name` of one file; the only one, where `name` is None. Raises NotFound, InvalidResource."""
    tiers = _tiers_in(path)
    if not tiers:
        raise NotFound("no tier in the file", obj=path, remedy="write a KVCacheTier manifest in it")
    there = ", ".join(sorted(key_of(tier) for tier in tiers))
    if name is not None:
        tiers = [tier for tier in tiers if key_of(tier) == f"{namespace}/{name}"]
    if not tiers:
        raise NotFound("no such tier in the file", obj=f"{path}: tier {namespace}/{name}", remedy=f"one of: {there}")
    if len(tiers) > 1:
        raise InvalidResource(
            f"{len(tiers)} tiers in the file: {', '.join(key_of(tier) for tier in tiers)}",
            obj=path,
            remedy="name one with --tier",
        )
    return tiers[0]
