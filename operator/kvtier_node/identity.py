"""The node's identity: one Ed25519 key that signs receipts, chain heads and place records.

The key is made once, stays in `node.key` of the state directory (raw, 32 bytes, 0600) and never leaves the node. It is
no secret of a tier: it proves who wrote a record and decrypts nothing. A key that is damaged, or gone while receipts
signed with it remain, is an error for an administrator: it is never made anew in silence, for the chain would break.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvtier_api.errors import KernelError, VerificationFailed
from kvtier_node.state_dir import StateDirectory

__all__ = ["KEY_NAME", "NodeIdentity", "Signer", "node_id_of", "signature_holds"]

KEY_NAME: Final = "node.key"
MIRROR_NAME: Final = "receipts.jsonl"
_KEY_SIZE_BYTES: Final = 32
_CHECK_SIZE_BYTES: Final = 16


class Signer(Protocol):
    """What signs for a node. `public_key` is raw (32 bytes)."""

    @property
    def node_id(self) -> str: ...
    @property
    def public_key(self) -> bytes: ...
    def sign(self, message: bytes) -> bytes: ...


def node_id_of(public_key: bytes) -> str:
    """The first 32 hex digits of SHA-256 over the raw public key."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def signature_holds(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `signature` (64 bytes) over `message` is by the raw `public_key`; false for a key that is none."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class NodeIdentity:
    """A loaded node key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public_key = key.public_key().public_bytes_raw()
        self._node_id = node_id_of(self._public_key)

    def __repr__(self) -> str:
        return f"NodeIdentity({self._node_id})"

    def __reduce__(self) -> str:
        raise TypeError("a node's key is not copied or pickled")

    @classmethod
    def load_or_create(cls, state_dir: str | os.PathLike[str]) -> NodeIdentity:
        """Load the key, or make it where there never was one. Safe for several processes at once.

        Raises UnsafePath (the file or directory is open to others), VerificationFailed (the key is damaged, or it is
        gone while the node's receipts are still there), KernelError (it cannot be written).
        """
        state = StateDirectory.open(state_dir)
        try:
            with state.lock(exclusive=True):
                if state.file_status(KEY_NAME) is None:
                    _refuse_to_replace(state)
                    secret = Ed25519PrivateKey.generate().private_bytes_raw()
                    state.write_new(KEY_NAME, secret + _check_of(secret))
                return cls(_read_key(state))
        except OSError as error:
            raise KernelError(f"cannot be made: {error.strerror}", obj=state.path_of(KEY_NAME)) from error
        finally:
            state.close()

    @classmethod
    def load(cls, state_dir: str | os.PathLike[str]) -> NodeIdentity:
        """Load the key. Raises NotFound (no directory), VerificationFailed (no key, or a damaged one), UnsafePath."""
        state = StateDirectory.open(state_dir, create=False)
        try:
            if state.file_status(KEY_NAME) is None:
                raise VerificationFailed("the node has no key yet", obj=state.path_of(KEY_NAME))
            return cls(_read_key(state))
        finally:
            state.close()

    @property
    def node_id(self) -> str:
        return self._node_id

    @property
    def public_key(self) -> bytes:
        return self._public_key

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def _check_of(secret: bytes) -> bytes:
    """A check value, so that a flipped bit is seen: any 32 bytes are a valid Ed25519 key."""
    return hashlib.sha256(b"kvtier.dev/node-key/v1" + secret).digest()[:_CHECK_SIZE_BYTES]


def _refuse_to_replace(state: StateDirectory) -> None:
    mirror = state.file_status(MIRROR_NAME)
    if mirror is not None and mirror.st_size:
        raise VerificationFailed(
            f"the node's key is gone, but receipts that it signed are here ({MIRROR_NAME})",
            obj=state.path_of(KEY_NAME),
            remedy="restore the key; or, to begin a new chain, move receipts.jsonl and ledger.db* to an archive first",
        )


def _read_key(state: StateDirectory) -> Ed25519PrivateKey:
    path = state.path_of(KEY_NAME)
    fd = state.open_file(KEY_NAME, os.O_RDONLY)
    try:
        content = os.read(fd, _KEY_SIZE_BYTES + _CHECK_SIZE_BYTES + 1)
    finally:
        os.close(fd)
    secret, check = content[:_KEY_SIZE_BYTES], content[_KEY_SIZE_BYTES:]
    if len(content) != _KEY_SIZE_BYTES + _CHECK_SIZE_BYTES or check != _check_of(secret):
        raise VerificationFailed(
            "the node's key is damaged; it is not made anew, because the receipts' chain hangs on it",
            obj=path,
            remedy="restore the file; or, to begin a new chain, move it, receipts.jsonl and ledger.db* to an archive",
        )
    return Ed25519PrivateKey.from_private_bytes(secret)
