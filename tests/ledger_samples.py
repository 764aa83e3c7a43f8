"""Rows and drafts for tests of the ledger and of receipts; run as a program, a process that uses a ledger until killed."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import replace
from typing import Any

from kvtier_api.erasure import Trigger
from kvtier_api.volume import BackendName, VolumeState
from kvtier_node.identity import NodeIdentity
from kvtier_node.ledger import Ledger, VolumeRow
from kvtier_node.receipts import ReceiptDraft, Step, Technique, TierIdentity, seconds, utc_now

S = VolumeState


def row(volume_id: str | None = None, **fields: Any) -> VolumeRow:
    volume_id = volume_id or f"kvv-{secrets.token_hex(10)}"
    sample = VolumeRow(
        volume_id=volume_id,
        tier_uid="tier-1",
        tier_namespace="default",
        tier_name="chat",
        node="node-a",
        boot_id="boot-1",
        backend=BackendName.FSCRYPT,
        cipher="aes-256-xts",
        place=f"/srv/kv/{volume_id}",
        size_bytes=1 << 30,
        ranks=2,
        bytes_per_rank=1 << 29,
        spec={"path": "/srv/kv", "retention": {"maxAge": 3600.0}},
    )
    return replace(sample, **fields)


def draft(volume_id: str | None, **fields: Any) -> ReceiptDraft:
    now = utc_now()
    content: dict[str, Any] = {
        "node_name": "node-a",
        "tier": TierIdentity(uid="tier-1", namespace="default", name="chat"),
        "volume_id": volume_id,
        "place": f"/srv/kv/{volume_id}",
        "backend": BackendName.FSCRYPT,
        "technique": Technique.KEY_DESTROYED,
        "cipher": "aes-256-xts",
        "key_id": "ab" * 16,
        "trigger": Trigger.CRASH,
        "size_bytes": 1 << 30,
        "begin": now,
        "end": now,
        "deadline_s": seconds(30),
        "deadline_met": True,
        "duration_s": seconds(0.25),
        "steps": [Step(name="key absent", ok=True, detail="status: absent")],
        "not_covered": ["memory of the consumer before its death"],
        "versions": {"kvtier": "0.1.0", "receipt": "v1"},
    }
    return ReceiptDraft(**(content | fields))


def live(ledger: Ledger, identity: NodeIdentity, volume_id: str | None = None, say: Any = None) -> str:
    """One whole life of a volume; `say(volume_id, state)` after each arrow is acknowledged."""
    sample = ledger.plan(row(volume_id))
    tell = say or (lambda *_: None)
    tell(sample.volume_id, S.PLANNED)
    for state in (S.PROVISIONING, S.READY, S.IN_USE, S.DYING, S.ERASING):
        ledger.advance(sample.volume_id, state, reason=f"to {state}")
        tell(sample.volume_id, state)
    ledger.finish(sample.volume_id, draft(sample.volume_id), identity)
    tell(sample.volume_id, S.ERASED)
    return sample.volume_id


def serve(state_dir: str, count: int, fd: int, *, arrows: int = 0) -> None:
    """`count` lives (0: until killed) in `state_dir`; each acknowledged arrow is one line on `fd`.

    After `arrows` of them (0: never) this process kills itself.
    """
    identity = NodeIdentity.load_or_create(state_dir)
    told = 0

    def say(volume_id: str, state: VolumeState) -> None:
        nonlocal told
        os.write(fd, f"{volume_id} {state}\n".encode())
        told += 1
        if told == arrows:
            os.kill(os.getpid(), signal.SIGKILL)

    with Ledger.open(state_dir) as ledger:
        done = 0
        while not count or done < count:
            live(ledger, identity, say=say)
            done += 1


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), 1, arrows=int(sys.argv[3]) if len(sys.argv) > 3 else 0)
