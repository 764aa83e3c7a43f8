"""A node of its own for every test, on the real kernel (`node_host`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_node.backends import image
from kvtier_node.kernel import fscrypt, libc, loop
from node_host import MIB, Host, make_host
from requirements import need_root


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
