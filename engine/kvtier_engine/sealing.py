"""Sealing and opening slots: AES-256-GCM between the caller's memory and a staging buffer.

The format is in docs/formats.md, "Slot". A slot on disk is ciphertext and nothing else; the 16-byte tag, the counter,
the generation and the key number stay in memory. This module knows bytes, not keys' lives (`keys`) nor files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["TAG_BYTES", "SlotSeal", "TierBinding", "open_slot", "seal_slots"]

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


def seal_slots(
    aead: AESGCM,
    binding: TierBinding,
    seals: Sequence[SlotSeal],
    *,
    rank: int,
    plains: Sequence[memoryview],
    rooms: Sequence[memoryview],
) -> list[bytes]:
    """Encrypt each of `plains` into its room, which is 16 bytes longer and does not overlap it; returns the tags.

    A room may end where the next begins, in those 16 bytes: a tag is taken out before the next slot is sealed.
    """
    encrypt, nonce, associated, prefix = aead.encrypt_into, _NONCE.pack, _AAD.pack, binding.prefix
    tags = []
    for (number, slot, generation, counter), plain, room in zip(seals, plains, rooms, strict=True):
        encrypt(nonce(rank, counter), plain, prefix + associated(number, rank, slot, generation, counter), room)
        tags.append(room[-TAG_BYTES:].tobytes())
    return tags


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
    """Decrypt all but the last 16 bytes of `room` into `plain`; False when they are not what was sealed.

    Those 16 bytes are overwritten with the tag. On False `plain` is all zeros: the cipher writes before it has
    verified, and unverified bytes must not reach anyone.
    """
    room[-TAG_BYTES:] = tag
    try:
        aead.decrypt_into(_NONCE.pack(rank, seal.counter), room, binding.associated_data(seal, rank), plain)
    except InvalidTag:
        plain[:] = bytes(len(plain))
        return False
    return True
