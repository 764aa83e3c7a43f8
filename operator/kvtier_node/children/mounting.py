"""Mounts, in a child: mount(2) and umount2(2) can hang on a device that does not answer."""

from __future__ import annotations

import os

from kvtier_node.children.keys import KEY_BYTES, new_key
from kvtier_node.kernel import constants, detached, fscrypt, libc

__all__ = ["mount", "probe_fscrypt", "unmount"]

_FLAGS = constants.MS_NODEV | constants.MS_NOSUID | constants.MS_NOEXEC | constants.MS_NOATIME


def mount(*, fds: dict[str, int], source: str) -> dict[str, object]:
    """Mount the ext4 on `source` on the directory that `fds["target"]` is, whatever its name is by now.

    It goes on after errors: one that turned read-only when its key was destroyed would keep its dirty pages, in the clear.
    """
    libc.mount(source, f"/proc/self/fd/{fds['target']}", "ext4", _FLAGS, "errors=continue")
    return {}


def unmount(*, fds: dict[str, int]) -> dict[str, object]:
    """Take the mount whose root `fds["root"]` is off its path at once, users or not."""
    libc.umount2(f"/proc/self/fd/{fds['root']}", constants.MNT_DETACH)
    return {}


def probe_fscrypt(*, fds: dict[str, int], source: str) -> dict[str, object]:
    """Whether the ext4 on `source` takes a key and a policy, tried on a mount that no path leads to."""
    del fds
    with detached.mounted(source, "ext4") as root:
        os.mkdir("probe", 0o700, dir_fd=root)
        probe = os.open("probe", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        try:
            with new_key(KEY_BYTES) as key:
                key_id = fscrypt.add_key(root, key)
            fscrypt.set_policy(probe, key_id)
        finally:
            os.close(probe)
        fscrypt.remove_key(root, key_id)
        status = fscrypt.key_status(root, key_id)
    return {
        "ok": status is fscrypt.KeyStatus.ABSENT,
        "reason": f"ext4 took an fscrypt v2 policy; after removal the kernel reports the key {status.name}",
    }
