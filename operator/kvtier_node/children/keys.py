"""Volume keys: made, handed to the kernel, and removed from it, in a process that ends right after.

The memory is locked, not dumped, not swapped, and overwritten. The agent never holds a key. What Python cannot promise:
that no copy stood in a register or on the C stack for a moment.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvtier_api.errors import KernelError
from kvtier_node.children import crypt_device
from kvtier_node.kernel import detached, fscrypt, libc, memory

__all__ = ["fscrypt_add", "fscrypt_remove", "new_key", "open_dm_crypt"]

KEY_BYTES: Final = 64
"""512 bits: what AES-256-XTS takes, for dm-crypt and as an fscrypt v2 master key."""
_KEY_ID_LABEL: Final = b"kvtier.dev/dm-crypt-key-id/v1"


@contextmanager
def new_key(size_bytes: int) -> Iterator[memoryview]:
    """`size_bytes` fresh random bytes, there only inside the block, in a process that leaves no core."""
    libc.no_core_dumps()
    libc.set_dumpable(False)
    with memory.secret_page(size_bytes) as key:
        yield key


def _write_all(fd: int, data: memoryview) -> None:
    """Write the whole of `data` to a pipe."""
    while data:
        data = data[os.write(fd, data) :]


def fscrypt_add(*, fds: dict[str, int]) -> dict[str, object]:
    """Make a key and give it to the file system of `fds["root"]`; only the kernel's identifier of it comes back."""
    with new_key(KEY_BYTES) as key:
        return {"key_id": fscrypt.add_key(fds["root"], key)}


def fscrypt_remove(*, fds: dict[str, int], source: str, slots: str, key_ids: list[str]) -> dict[str, object]:
    """Remove the volume's keys from the ext4 on the device `source`, and what the kernel then says of each.

    `key_ids`: those on record; the policy of the directory `slots` may name one that a crash kept off the record. Works on a
    mount that no path leads to, so it does not matter what is mounted where. Removing can wait for I/O.
    """
    del fds
    with detached.mounted(source, "ext4") as root:
        known = set(key_ids) | _policy_keys(root, slots)
        for key_id in known:
            fscrypt.remove_key(root, key_id)
        return {"status": {key_id: fscrypt.key_status(root, key_id).name for key_id in sorted(known)}}


def _policy_keys(root: int, slots: str) -> set[str]:
    try:
        fd = os.open(slots, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    except FileNotFoundError:
        return set()  # a crash came before it was made
    try:
        policy = fscrypt.get_policy(fd)
    finally:
        os.close(fd)  # an open directory would keep the key
    return {policy} if policy else set()


def open_dm_crypt(*, fds: dict[str, int], device: str, name: str, cipher: str) -> dict[str, object]:
    """Make a key and pipe it to `cryptsetup open --type plain`.

    Its id (a labelled SHA-256) comes back, and what the kernel then has (`device_mapper.Table`, which holds no key).
    """
    del fds
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with new_key(KEY_BYTES) as key:
        digest = hashlib.sha256(_KEY_ID_LABEL)
        digest.update(key)
        process = subprocess.Popen(
            ["cryptsetup", "open", "--type", "plain", "--cipher", cipher, "--key-size", str(KEY_BYTES * 8), "--hash", "plain",
             "--key-file", "-", "--keyfile-size", str(KEY_BYTES), "--batch-mode", device, name],
            stdin=reader, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(reader)
        try:
            _write_all(writer, key)
        finally:
            os.close(writer)
        _, complaint = process.communicate()
    if process.returncode != 0:
        raise KernelError(
            f"cryptsetup open failed ({process.returncode}): {complaint.decode(errors='replace').strip()[-300:]}",
            obj=device,
            remedy="the kernel needs dm-crypt and the cipher; see modprobe dm-crypt",
        )
    return {"key_id": digest.hexdigest()[:32], **crypt_device.describe(fds={}, name=name)}
