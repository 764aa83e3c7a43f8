"""Places: the directories that volumes live in, each declared by a signed `place.json` before anything else is in it.

A tier's directory belongs to kvtier alone. Whatever is there that does not carry this node's signature is `ForeignData`:
it is named, it blocks provisioning, and it is never read further, changed or removed.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from kvtier_api.errors import ForeignData, KvtierError, NotFound, NotPermitted, UnsafePath, VerificationFailed
from kvtier_node.identity import NodeIdentity
from kvtier_node.kernel.refusal import shown
from kvtier_node.paths import AllowedRoots, Directory
from kvtier_node.receipts import PLACE_NAME, PlaceRecord, read_place, sign_place

__all__ = ["IMAGE_NAME", "MOUNT_NAME", "PLACE_NAME", "Places"]

CONSUMER_NAME: Final = "consumer.json"
MOUNT_NAME: Final = "mnt"
IMAGE_NAME: Final = "volume.img"
_LIMIT_BYTES: Final = 256 * 1024
_DEPTH: Final = 6
_FOREIGN_LISTED: Final = 5
_VOLUME: Final = re.compile("kvv-[0-9a-f]{20}")
_ANOTHERS: Final = "made with another state directory or node key"
_GIVE: Final = "give its --state-dir"
_UNTOUCHED: Final = "kvtier touches nothing here until then"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FOREIGN_LISTED} more" if len(names) > _FOREIGN_LISTED else ""
    return f"{', '.join(repr(name) for name in names[:_FOREIGN_LISTED])}{more}"


def _is_record(name: str) -> bool:
    """A record of kvtier's beside a volume, or the temporary file of one that a crash cut short."""
    return name in (PLACE_NAME, CONSUMER_NAME) or name.startswith((f".{PLACE_NAME}.", f".{CONSUMER_NAME}."))


class Places:
    """The places of one node, under the roots that its administrator allows."""

    def __init__(self, roots: Sequence[str], identity: NodeIdentity) -> None:
        self.roots = list(roots)
        self._allowed = AllowedRoots(roots)
        self._identity = identity

    def tier_directory(self, path: str, *, create: bool) -> Directory:
        """The tier's directory, every step of the way checked. Raises NotPermitted, UnsafePath, OSError."""
        if any(_VOLUME.fullmatch(name) for name in path.split("/")):
            raise UnsafePath(
                "it is inside a volume, and would be erased with it", obj=shown(path), remedy="choose another path"
            )
        return self._allowed.open_directory(path, create=create)

    def file_system_of(self, path: str) -> int | None:
        """The id of the file system (statfs, f_fsid) that a tier's directory is on; None where there is no directory."""
        try:
            tier = self.tier_directory(path, create=False)
        except NotFound:
            return None
        with tier:
            return os.fstatvfs(tier.fd).f_fsid

    def refuse_foreign(self, tier: Directory, known: Callable[[], Collection[str]]) -> None:
        """Raise ForeignData if the tier's directory holds anything that this node's kvtier did not make.

        `known`: the ids of the volumes that the ledger has in this directory, asked for after the directory was read: another
        process may be making or removing a volume here right now, and has it on record before and after.
        """
        unsigned = [name for name in tier.names() if not self._is_ours(tier, name)]
        ids = known() if unsigned else ()
        foreign = [name for name in unsigned if not (name in ids and self._is_under_way(tier, name))]
        if foreign:
            raise self._foreign_data(tier, foreign)

    def _foreign_data(self, tier: Directory, foreign: Sequence[str]) -> ForeignData:
        others = [name for name in foreign if self._is_anothers(tier, name)]
        rest = [name for name in foreign if name not in others]
        volumes = f"volumes that were {_ANOTHERS}: {_listed(others)}"
        if not rest:
            return ForeignData(f"holds {volumes}", obj=tier.path, remedy=f"{_GIVE}; {_UNTOUCHED}")
        cause = f"holds what kvtier did not make: {_listed(rest)}"
        remedy = f"move it away, or give the tier an empty directory of its own; {_UNTOUCHED}"
        if not others:
            return ForeignData(cause, obj=tier.path, remedy=remedy)
        return ForeignData(
            f"{cause}; and {volumes}", obj=tier.path, remedy=f"of the volumes: {_GIVE}; of the rest: {remedy}"
        )

    def volumes_of_another(self, path: str) -> list[str]:
        """Ids of what lies in a tier's directory and was made by another kvtier: with another state directory, or node key.

        Raises UnsafePath, NotPermitted.
        """
        try:
            tier = self.tier_directory(path, create=False)
        except NotFound:
            return []
        with tier:
            return [name for name in sorted(tier.names()) if self._is_anothers(tier, name)]

    def _is_anothers(self, tier: Directory, name: str) -> bool:
        """Whether it is a directory called like a volume whose record this node did not sign; one that is closed counts."""
        info = tier.stat_if_there(name)
        if info is None or not _VOLUME.fullmatch(name) or not stat.S_ISDIR(info.st_mode):
            return False
        try:
            with tier.child(name) as place:
                if PLACE_NAME not in place.names():
                    return False
                read_place(place.read_file(PLACE_NAME, _LIMIT_BYTES), self._identity.public_key)
        except (VerificationFailed, NotPermitted):  # UnsafePath is one: another user's
            return True
        except (KvtierError, OSError):
            return False
        return False

    def _is_ours(self, tier: Directory, name: str) -> bool:
        info = tier.stat_if_there(name)
        if info is None:
            return True  # it went meanwhile
        if not stat.S_ISDIR(info.st_mode):
            return False
        if name == "lost+found":  # ext4's own, where the tier's directory is the root of a file system
            with tier.child(name) as found:
                return not found.names()
        try:
            with tier.child(name) as place:
                self._read(place)
        except (KvtierError, OSError):
            return tier.stat_if_there(name) is None  # or it went meanwhile
        return True

    def _is_under_way(self, tier: Directory, name: str) -> bool:
        """A volume that another process makes or removes between our looks at it.

        It is half made, signed, half removed, and gone, in this order, and never goes back. What was not signed, is then not
        half made, then not signed and then not half removed is none.
        """
        return self._is_half_made(tier, name) or self._is_ours(tier, name) or self._is_half_made(tier, name)

    def _is_half_made(self, tier: Directory, name: str) -> bool:
        """A volume's directory before its record is in it, or after it was taken out: there is nothing else in it."""
        try:
            with tier.child(name) as place:
                return all(_is_record(left) for left in place.names())
        except NotFound:
            return True
        except (KvtierError, OSError):
            return False

    def _read(self, place: Directory) -> PlaceRecord:
        """The record in `place`. Raises VerificationFailed where it is not this node's."""
        if PLACE_NAME not in place.names():
            raise VerificationFailed("has no place.json", obj=place.path, remedy="it is not kvtier's")
        record = read_place(place.read_file(PLACE_NAME, _LIMIT_BYTES), self._identity.public_key)
        if record.place != place.path:
            raise VerificationFailed(
                f"declares {record.place}", obj=f"{place.path}/{PLACE_NAME}", remedy="it was moved or copied"
            )
        return record

    def declare(self, tier: Directory, record: PlaceRecord) -> Directory:
        """Make the place's directory and put its signed record there, durably. Raises ForeignData if the name is taken."""
        place = tier.mkdir(record.volume_id, 0o711)
        try:
            place.write_file_atomic(PLACE_NAME, sign_place(record, self._identity), 0o600)
            tier.fsync()
        except BaseException:
            place.close()
            raise
        return place

    def note_consumer(self, path: str, consumer: dict[str, Any]) -> None:
        """Put the consumer beside the place record, so that a rebuilt ledger knows whom to ask for. Raises KvtierError."""
        place = self.open(path)
        if place is None:
            raise NotFound("the place is gone", obj=path, remedy="provision the volume again")
        with place:
            place.write_file_atomic(CONSUMER_NAME, json.dumps(consumer, sort_keys=True).encode(), 0o600)

    def consumer_of(self, path: str) -> dict[str, Any] | None:
        """The consumer noted beside the place record, or None. Raises KvtierError for a file that is not kvtier's."""
        place = self.open(path)
        if place is None:
            return None
        with place:
            try:
                found: dict[str, Any] = json.loads(place.read_file(CONSUMER_NAME, _LIMIT_BYTES))
            except NotFound:
                return None
            return found

    def open(self, path: str) -> Directory | None:
        """The place at `path`, or None where there is none any more.

        Raises VerificationFailed for a directory that is not this volume's: its record is another's, or it holds something
        without a record. UnsafePath, NotPermitted.
        """
        try:
            tier = self.tier_directory(os.path.dirname(path), create=False)
        except NotFound:
            return None
        with tier:
            try:
                place = tier.child(os.path.basename(path))
            except NotFound:
                return None
        try:
            if not all(_is_record(left) for left in place.names()):
                self._read(place)
        except BaseException:
            place.close()
            raise
        return place

    def holds(self, path: str, name: str) -> bool:
        """Whether there is something called `name` in the place at `path`. Raises as `open` does."""
        place = self.open(path)
        if place is None:
            return False
        with place:
            return place.stat_if_there(name) is not None

    def names_in(self, path: str) -> set[str]:
        """What is in a tier's directory; nothing where there is none. Raises UnsafePath, NotPermitted."""
        try:
            tier = self.tier_directory(path, create=False)
        except NotFound:
            return set()
        with tier:
            return set(tier.names())

    def forget(self, path: str) -> None:
        """Remove the directory of a place that is erased and on record: only `place.json` can be left in it."""
        try:
            tier = self.tier_directory(os.path.dirname(path), create=False)
        except NotFound:
            return
        with tier:
            name = os.path.basename(path)
            if name not in tier.names():
                return
            with tier.child(name) as place:
                for left in sorted(place.names(), key=PLACE_NAME.__eq__):  # what signs for the rest goes last
                    if _is_record(left):
                        place.unlink(left)
            tier.rmdir(name)
            tier.fsync()

    def discover(self) -> Iterator[tuple[str, PlaceRecord | None]]:
        """Every directory under the roots that is called like a volume, with its record if this node signed it.

        For rebuilding a lost ledger. Follows no link, crosses into no volume, and goes `_DEPTH` levels deep.
        """
        for root in self.roots:
            try:
                directory = self._allowed.open_directory(root, create=False)
            except NotFound:
                continue
            with directory:
                yield from self._walk(directory, _DEPTH)

    def _walk(self, directory: Directory, depth: int) -> Iterator[tuple[str, PlaceRecord | None]]:
        for name in directory.names():
            info = directory.stat_if_there(name)
            if info is None or not stat.S_ISDIR(info.st_mode):
                continue
            try:
                child = directory.child(name)
            except (KvtierError, OSError):
                continue  # not ours to enter; refuse_foreign names it when a tier wants the place
            with child:
                if name.startswith("kvv-"):
                    try:
                        yield child.path, self._read(child)
                    except KvtierError:
                        yield child.path, None
                elif depth > 1:
                    yield from self._walk(child, depth - 1)
