"""File-system encryption by ioctl: keys in and out, policies, and what the kernel says of a key (linux/fscrypt.h).

Policies that are made are v2 (AES-256-XTS contents, AES-256-CTS names, padding 32). A key's name is the identifier that
the kernel computes from it, as lower-case hex (32 digits); a foreign v1 policy's descriptor has 16.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os

from kvtier_api.errors import ForeignData, KernelError, KvtierError, NotPermitted
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import libc

__all__ = ["KeyStatus", "RemovalFlags", "add_key", "get_policy", "key_status", "remove_key", "set_policy"]


class KeyStatus(enum.Enum):
    ABSENT = c.FSCRYPT_KEY_STATUS_ABSENT
    PRESENT = c.FSCRYPT_KEY_STATUS_PRESENT
    INCOMPLETELY_REMOVED = c.FSCRYPT_KEY_STATUS_INCOMPLETELY_REMOVED
    """The key itself is wiped, but open files keep theirs: their bytes can still be read. Not erased."""


class RemovalFlags(enum.IntFlag):
    NONE = 0
    FILES_BUSY = c.FSCRYPT_KEY_REMOVAL_STATUS_FLAG_FILES_BUSY
    OTHER_USERS = c.FSCRYPT_KEY_REMOVAL_STATUS_FLAG_OTHER_USERS


class _KeySpecifier(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint32), ("__reserved", ctypes.c_uint32), ("u", ctypes.c_uint8 * 32)]


class _AddKey(ctypes.Structure):
    _fields_ = [
        ("key_spec", _KeySpecifier),
        ("raw_size", ctypes.c_uint32),
        ("key_id", ctypes.c_uint32),
        ("__reserved", ctypes.c_uint32 * 8),
        ("raw", ctypes.c_uint8 * c.FSCRYPT_MAX_KEY_SIZE),
    ]


class _RemoveKey(ctypes.Structure):
    _fields_ = [
        ("key_spec", _KeySpecifier),
        ("removal_status_flags", ctypes.c_uint32),
        ("__reserved", ctypes.c_uint32 * 5),
    ]


class _KeyStatus(ctypes.Structure):
    _fields_ = [
        ("key_spec", _KeySpecifier),
        ("__reserved", ctypes.c_uint32 * 6),
        ("status", ctypes.c_uint32),
        ("status_flags", ctypes.c_uint32),
        ("user_count", ctypes.c_uint32),
        ("__out_reserved", ctypes.c_uint32 * 13),
    ]


class _PolicyV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint8),
        ("contents_encryption_mode", ctypes.c_uint8),
        ("filenames_encryption_mode", ctypes.c_uint8),
        ("flags", ctypes.c_uint8),
        ("__reserved", ctypes.c_uint8 * 4),
        ("master_key_identifier", ctypes.c_uint8 * c.FSCRYPT_KEY_IDENTIFIER_SIZE),
    ]


class _GetPolicy(ctypes.Structure):
    _fields_ = [("policy_size", ctypes.c_uint64), ("policy", _PolicyV2)]


def _specifier(identifier: str) -> _KeySpecifier:
    try:
        raw = bytes.fromhex(identifier)
    except ValueError as error:
        raise KernelError("no key identifier: it is not hex", obj=repr(identifier)) from error
    kinds = {
        c.FSCRYPT_KEY_IDENTIFIER_SIZE: c.FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER,
        c.FSCRYPT_KEY_DESCRIPTOR_SIZE: c.FSCRYPT_KEY_SPEC_TYPE_DESCRIPTOR,
    }
    if len(raw) not in kinds:
        raise KernelError("no key identifier: it has 32 hex digits (v2) or 16 (v1)", obj=repr(identifier))
    specifier = _KeySpecifier(type=kinds[len(raw)])
    specifier.u[: len(raw)] = list(raw)
    return specifier


def _refused(call: str, error: OSError, obj: str) -> KvtierError:
    if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
        return KernelError(
            f"{call}: this file system does not encrypt",
            obj=obj,
            remedy="use ext4 made with `-O encrypt`, or f2fs, on a kernel with CONFIG_FS_ENCRYPTION",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NotPermitted(f"{call}: {error.strerror}", obj=obj, remedy="run the agent as root")
    return KernelError(f"{call}: {error.strerror}", obj=obj)


def add_key(mount_fd: int, raw: bytearray | memoryview) -> str:
    """Hand a v2 master key (64 bytes; at least 32) to the file system of `mount_fd`; returns its identifier in hex.

    The ioctl reads the key from one buffer here, which is zeroed before the return. `raw` is the caller's to zero.
    """
    size = len(raw)
    if not 32 <= size <= c.FSCRYPT_MAX_KEY_SIZE:
        raise KernelError(f"a master key has 32 to {c.FSCRYPT_MAX_KEY_SIZE} bytes, not {size}", obj="fscrypt key")
    argument = _AddKey()
    try:
        argument.key_spec.type = c.FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER
        argument.raw_size = size
        # Byte by byte: memcpy takes 64 bytes through one vector register, which the dynamic linker, when it next binds a
        # function, saves on the stack (measured: the whole key stood there).
        for place, byte in enumerate(raw):
            argument.raw[place] = byte
        libc.ioctl(mount_fd, c.FS_IOC_ADD_ENCRYPTION_KEY, argument)
        return bytes(argument.key_spec.u[: c.FSCRYPT_KEY_IDENTIFIER_SIZE]).hex()
    except OSError as error:
        raise _refused("FS_IOC_ADD_ENCRYPTION_KEY", error, f"descriptor {mount_fd}") from error
    finally:
        ctypes.memset(ctypes.byref(argument), 0, ctypes.sizeof(argument))


def set_policy(dir_fd: int, identifier: str) -> None:
    """Encrypt what is made in this empty directory from now on, under the key. Setting the same policy again is done.

    Raises ForeignData if the directory has entries or another policy, KernelError, NotPermitted.
    """
    specifier = _specifier(identifier)
    policy = _PolicyV2(
        version=c.FSCRYPT_POLICY_V2,
        contents_encryption_mode=c.FSCRYPT_MODE_AES_256_XTS,
        filenames_encryption_mode=c.FSCRYPT_MODE_AES_256_CTS,
        flags=c.FSCRYPT_POLICY_FLAGS_PAD_32,
    )
    policy.master_key_identifier[:] = specifier.u[: c.FSCRYPT_KEY_IDENTIFIER_SIZE]
    try:
        libc.ioctl(dir_fd, c.FS_IOC_SET_ENCRYPTION_POLICY, policy)
    except OSError as error:
        obj = f"descriptor {dir_fd}"
        if error.errno == errno.ENOTEMPTY:
            raise ForeignData(
                "only an empty directory can be encrypted", obj=obj, remedy="look who wrote it"
            ) from error
        if error.errno == errno.EEXIST:
            raise ForeignData("it has another encryption policy", obj=obj, remedy="look who set it") from error
        raise _refused("FS_IOC_SET_ENCRYPTION_POLICY", error, obj) from error


def get_policy(fd: int) -> str | None:
    """The key identifier of the file's or directory's policy (v1: the descriptor); None if it is not encrypted."""
    argument = _GetPolicy(policy_size=ctypes.sizeof(_PolicyV2))
    try:
        libc.ioctl(fd, c.FS_IOC_GET_ENCRYPTION_POLICY_EX, argument)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTTY, errno.EOPNOTSUPP):
            return None
        raise KernelError(f"FS_IOC_GET_ENCRYPTION_POLICY_EX: {error.strerror}", obj=f"descriptor {fd}") from error
    raw = bytes(argument.policy)
    if raw[0] == c.FSCRYPT_POLICY_V1:
        return raw[4 : 4 + c.FSCRYPT_KEY_DESCRIPTOR_SIZE].hex()
    return raw[8 : 8 + c.FSCRYPT_KEY_IDENTIFIER_SIZE].hex()


def key_status(mount_fd: int, identifier: str) -> KeyStatus:
    """What the kernel says of the key on the file system of `mount_fd`. Raises KernelError."""
    argument = _KeyStatus(key_spec=_specifier(identifier))
    try:
        libc.ioctl(mount_fd, c.FS_IOC_GET_ENCRYPTION_KEY_STATUS, argument)
    except OSError as error:
        raise _refused("FS_IOC_GET_ENCRYPTION_KEY_STATUS", error, f"descriptor {mount_fd}") from error
    return KeyStatus(argument.status)


def remove_key(mount_fd: int, identifier: str) -> RemovalFlags:
    """Wipe the key from the kernel and lock its files, whoever added it (root; else this user's claim only).

    A key that is absent already is no error. FILES_BUSY: open files keep their keys until they close; call again then,
    and believe `key_status` only.
    """
    argument = _RemoveKey(key_spec=_specifier(identifier))
    request = c.FS_IOC_REMOVE_ENCRYPTION_KEY_ALL_USERS if os.geteuid() == 0 else c.FS_IOC_REMOVE_ENCRYPTION_KEY
    try:
        libc.ioctl(mount_fd, request, argument)
    except OSError as error:
        if error.errno == errno.ENOKEY:
            return RemovalFlags.NONE
        raise _refused("FS_IOC_REMOVE_ENCRYPTION_KEY", error, f"descriptor {mount_fd}") from error
    return RemovalFlags(argument.removal_status_flags)
