"""Sealing and opening one slot: AES-256-GCM between the caller's memory and a staging buffer.

The format is in docs/formats.md, "Slot". A slot on disk is ciphertext and nothing else; the 16-byte tag, the counter,
the generation and the key number stay in memory. This module knows bytes, not keys' lives (`keys`) nor files.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["TAG_BYTES", "SlotSeal", "TierBinding", "open_slot", "seal_slot"]

TAG_BYTES: Final = 16
_NONCE: Final = struct.Struct(">IQ")  # rank, counter
_AAD: Final = struct.Struct(">QIQQQ")  # key number, rank, slot, generation, counter
_FORMAT: Final = b"kvtier slot v1\0"


class SlotSeal(NamedTuple):
    """What memory keeps of one sealed slot, besides a tag for each rank."""

    key_number: int
    slot: int
    generation: int
    counter: int


class TierBinding:
    """The part of the associated data that is the same for all slots of a store: format, tier and volume."""

    def __init__(self, *, tier_uid: str, volume_id: str) -> None:
        parts = [_FORMAT]
        for text in (tier_uid, volume_id):
            data = text.encode()
            parts += [struct.pack(">H", len(data)), data]
        self.prefix = b"".join(parts)

    def associated_data(self, seal: SlotSeal, rank: int) -> bytes:
        return self.prefix + _AAD.pack(seal.key_number, rank, seal.slot, seal.generation, seal.counter)


def seal_slot(
    aead: AESGCM, binding: TierBinding, seal: SlotSeal, *, rank: int, plain: memoryview, room: memoryview
) -> bytes:
    """Encrypt `plain` into the start of `room` (16 bytes longer, not overlapping); returns the tag."""
    size = len(plain)
    aead.encrypt_into(
        _NONCE.pack(rank, seal.counter), plain, binding.associated_data(seal, rank), room[: size + TAG_BYTES]
    )
    return bytes(room[size : size + TAG_BYTES])


def open_slot(
    aead: AESGCM,
    binding: TierBinding,
    seal: SlotSeal,
    *,
    rank: int,
    tag: bytes,
    room: memoryview,
    plain: memoryview,
) -> bool:
    """Decrypt the first len(plain) bytes of `room` into `plain`; False when they are not what was sealed.

    `room` is 16 bytes longer than `plain`; those bytes are overwritten with the tag. On False `plain` is all zeros:
    the cipher writes before it has verified, and unverified bytes must not reach anyone.
    """
    size = len(plain)
    room[size : size + TAG_BYTES] = tag
    try:
        aead.decrypt_into(
            _NONCE.pack(rank, seal.counter), room[: size + TAG_BYTES], binding.associated_data(seal, rank), plain
        )
    except InvalidTag:
        plain[:] = bytes(size)
        return False
    return True
