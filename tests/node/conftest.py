"""A node of its own for every test, on the real kernel (`node_host`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_node.backends import image
from kvtier_node.kernel import constants as c
from kvtier_node.kernel import fscrypt, libc, loop
from node_host import MIB, Host, make_host
from requirements import need_root

_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000


@pytest.fixture
def host() -> Iterator[Host]:
    """A node on the root disk's ext4."""
    need_root()
    made = make_host()
    try:
        yield made
    finally:
        made.clean_up()


@pytest.fixture
def encrypted_root(host: Host) -> Iterator[Path]:
    """A directory with an fscrypt policy of its host's own, below the allowed root: what `HostAttested` wants.

    The allowed root itself is the mount, as an administrator would have it.
    """
    picture = host.base / "host.img"
    fd = os.open(picture, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 96 * MIB)
    device = loop.attach(fd)
    os.close(fd)
    image.make_file_system(device.path, features="encrypt")
    libc.mount(device.path, str(host.root), "ext4", 0, None)
    root = os.open(host.root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        key_id = fscrypt.add_key(root, bytearray(os.urandom(64)))
        (host.root / "secret").mkdir()
        secret = os.open(host.root / "secret", os.O_RDONLY | os.O_DIRECTORY)
        fscrypt.set_policy(secret, key_id)
        os.close(secret)
    finally:
        os.close(root)
    yield host.root / "secret"


@pytest.fixture
def private_mounts() -> Iterator[None]:
    """A mount namespace of this test's own: whatever is mounted in it ends with it, even if the test is killed.

    And no other namespace that is made meanwhile, by another test or by whatever builds images, has copies of it.
    """
    need_root()
    library = ctypes.CDLL(None, use_errno=True)
    cwd = os.open(".", os.O_PATH)
    home = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY)
    assert library.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    try:
        libc.mount(None, "/", None, c.MS_REC | c.MS_PRIVATE, None)
        yield
    finally:
        # A thread of the test's that has just ended may still share this one's directories; then the kernel refuses (EINVAL).
        assert library.unshare(_CLONE_FS) == 0, os.strerror(ctypes.get_errno())
        assert library.setns(home, _CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        os.fchdir(cwd)
        os.close(cwd)
        os.close(home)


@pytest.fixture
def own_disk(host: Host) -> Host:
    """The tiers' root on a file system of its own: it can be unmounted, and no other process makes files on it."""
    host.python(
        """
        import os, sys
        from kvtier_node.backends import image
        from kvtier_node.kernel import libc, loop
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, 160 << 20)
        device = loop.attach(fd)
        image.make_file_system(device.path, features="^has_journal")
        libc.mount(device.path, sys.argv[2], "ext4", 0, None)
        """,
        str(host.base / "disk.img"),
        str(host.root),
    )
    return host
