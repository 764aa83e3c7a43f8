"""Texts that must never be found again. Derived from a seed, so that neither a pod's spec nor a log holds them."""

from __future__ import annotations

import hashlib

__all__ = ["KINDS", "canary", "filled"]

KINDS = ("prompt", "plain", "control")
"""Where it was written: by the engine into its slots, in the clear beside them, outside of kvtier."""


def canary(seed: str, kind: str) -> bytes:
    return f"KVTIER-{kind}-{hashlib.sha256(f'{seed}/{kind}'.encode()).hexdigest()}\n".encode()


def filled(text: bytes, size: int) -> bytes:
    return (text * (size // len(text) + 1))[:size]
