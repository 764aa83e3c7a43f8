"""`--user UID[:GID]`: numbers, or names as the system knows them."""

from __future__ import annotations

import grp
import os
import pwd
from typing import Final

from kvtier_api.errors import NotPermitted, UsageError

__all__ = ["parse_user"]

_LARGEST: Final = 2**32 - 2  # (uid_t) -1 means "unchanged" to the kernel
_REMEDY: Final = "write UID, UID:GID, NAME or NAME:GROUP"


def parse_user(text: str | None) -> tuple[int | None, int | None]:
    """The uid and gid of `text`, (None, None) for None. Raises UsageError, and NotPermitted for another user without root."""
    if text is None:
        return None, None
    user, colon, group = text.partition(":")
    if not user or (colon and not group):
        raise UsageError("not a user", obj=f"--user {text!r}", remedy=_REMEDY)
    uid, own_gid = _user(user, text)
    gid = _group(group, text) if group else own_gid
    if os.geteuid() != 0 and (uid, gid) != (os.geteuid(), os.getegid()):
        raise NotPermitted(
            f"only root can run a command as user {uid}, group {gid}",
            obj=f"--user {text!r}",
            remedy="leave --user out, or start kvtier as root",
        )
    return uid, gid


def _number(text: str, whole: str) -> int:
    if int(text) > _LARGEST:
        raise UsageError(f"{text} is no id of a user or group", obj=f"--user {whole!r}", remedy=_REMEDY)
    return int(text)


def _user(text: str, whole: str) -> tuple[int, int]:
    """The uid, and the user's own group; a number without an account has the group of the same number."""
    try:
        if text.isascii() and text.isdecimal():
            uid = _number(text, whole)
            try:
                return uid, pwd.getpwuid(uid).pw_gid
            except KeyError:
                return uid, uid
        found = pwd.getpwnam(text)
    except KeyError as error:
        raise UsageError(f"no user {text!r} on this host", obj=f"--user {whole!r}", remedy=_REMEDY) from error
    return found.pw_uid, found.pw_gid


def _group(text: str, whole: str) -> int:
    if text.isascii() and text.isdecimal():
        return _number(text, whole)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError as error:
        raise UsageError(f"no group {text!r} on this host", obj=f"--user {whole!r}", remedy=_REMEDY) from error
