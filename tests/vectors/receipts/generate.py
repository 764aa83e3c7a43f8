"""Make the vectors of the receipts' chain: one sound export, and one file for each fault in it.

`python tests/vectors/receipts/generate.py` writes them anew beside itself. The keys are of this file alone.
Each `FAULTS` entry: what is done to the sound lines, and words of the problem that verification must name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvtier_node.identity import NodeIdentity
from kvtier_node.receipts import ReceiptDraft, Technique, TierIdentity, canonical_json, hash_of, sign_head, sign_receipt

NODE = NodeIdentity(Ed25519PrivateKey.from_private_bytes(b"\x01" * 32))
STRANGER = NodeIdentity(Ed25519PrivateKey.from_private_bytes(b"\x02" * 32))
COUNT = 4
Lines = list[bytes]


def chain(signer: NodeIdentity, count: int = COUNT) -> Lines:
    lines: Lines = []
    for number in range(1, count + 1):
        draft = ReceiptDraft(
            node_name="node-ä",
            tier=TierIdentity(uid="5d1c", namespace="default", name="chat"),
            volume_id=f"kvv-{number:020x}",
            place=f"/srv/kv/kvv-{number:020x}",
            backend="Fscrypt",
            technique=Technique.KEY_DESTROYED,
            cipher="aes-256-xts",
            key_id="ab" * 16,
            trigger="Crash",
            size_bytes=1 << 30,
            begin="2026-01-02T03:04:05.000000Z",
            end="2026-01-02T03:04:05.250000Z",
            duration_s="0.250000",
            steps=[{"name": "key absent", "ok": True, "detail": "status: absent"}],
            not_covered=["memory of the consumer before its death"],
            versions={"kvtier": "0.1.0"},
        )
        prev = hash_of(lines[-1]) if lines else "0" * 64
        receipt = sign_receipt(draft, seq=number, prev=prev, signer=signer)
        lines.append(receipt.canonical())
    return [*lines, head_of(lines, signer)]


def head_of(receipts: Lines, signer: NodeIdentity) -> bytes:
    head = sign_head(len(receipts), hash_of(receipts[-1]) if receipts else "0" * 64, signer)
    return canonical_json(head.model_dump(mode="json"))


def edited(line: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    content = json.loads(line)
    change(content)
    return canonical_json(content)


def resigned(line: bytes, signer: NodeIdentity, **fields: object) -> bytes:
    """`line` with `fields`, signed anew: what one who has the key can write."""
    content = json.loads(line) | fields
    del content["signature"]
    return canonical_json(content | {"signature": signer.sign(canonical_json(content)).hex()})


def at(index: int, change: Callable[[bytes], bytes]) -> Callable[[Lines], Lines]:
    return lambda lines: [change(line) if number == index else line for number, line in enumerate(lines)]


def upper_signature(line: bytes) -> bytes:
    return edited(line, lambda content: content.update(signature=str(content["signature"]).upper()))


FAULTS: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "removed-first": (lambda it: it[1:], "removed or reordered"),
    "removed-middle": (lambda it: [*it[:1], *it[2:]], "removed or reordered"),
    "removed-last": (lambda it: [*it[:3], it[4]], "the head counts 4 receipts; 3 are here"),
    "removed-all": (lambda it: it[4:], "the head counts 4 receipts; 0 are here"),
    "removed-head": (lambda it: it[:4], "the head line is missing"),
    "removed-last-and-head": (lambda it: it[:3], "the head line is missing"),
    "swapped": (lambda it: [it[0], it[2], it[1], *it[3:]], "removed or reordered"),
    "reversed": (lambda it: [*reversed(it[:4]), it[4]], "removed or reordered"),
    "duplicated": (lambda it: [*it[:2], it[1], *it[2:]], "is here twice"),
    "receipt-after-head": (lambda it: [*it[:3], it[4], it[3]], "follows the head"),
    "two-heads": (lambda it: [*it, it[4]], "follows the head"),
    "empty-line": (lambda it: [*it[:2], b"", *it[2:]], "not a record of this format"),
    "bad-json": (at(1, lambda line: line[:-1]), "not a record of this format"),
    "not-utf-8": (at(1, lambda line: line.replace("ä".encode(), b"\xe4")), "not a record of this format"),
    "truncated-line": (at(3, lambda line: line[: len(line) // 2]), "not a record of this format"),
    "unknown-field": (at(1, lambda line: edited(line, lambda it: it.update(extra=1))), "extra"),
    "missing-field": (at(1, lambda line: edited(line, lambda it: it.pop("cipher"))), "canonical"),
    "unknown-format": (at(1, lambda line: line.replace(b"receipt/v1", b"receipt/v2")), "format"),
    "changed-size": (at(1, lambda line: line.replace(b"1073741824", b"1073741825")), "changed or forged"),
    "changed-trigger": (at(2, lambda line: line.replace(b'"Crash"', b'"Exit"')), "changed or forged"),
    "changed-place": (at(0, lambda line: line.replace(b"/srv/kv", b"/srv/kw")), "changed or forged"),
    "changed-step": (at(0, lambda line: line.replace(b'"ok":true', b'"ok":null')), "changed or forged"),
    "changed-not-covered": (at(0, lambda line: line.replace(b"before its", b"after  its")), "changed or forged"),
    "changed-time": (at(0, lambda line: line.replace(b":05.25", b":05.24")), "changed or forged"),
    "changed-signature": (
        at(1, lambda line: edited(line, lambda it: it.update(signature="0" * 128))),
        "changed or forged",
    ),
    "upper-case-signature": (at(1, upper_signature), "signature"),
    "space-added": (at(1, lambda line: line.replace(b",", b", ", 1)), "canonical"),
    "keys-reordered": (at(1, lambda line: json.dumps(dict(reversed(json.loads(line).items()))).encode()), "canonical"),
    "number-rewritten": (at(1, lambda line: line.replace(b'"seq":2', b'"seq":2.0')), "canonical"),
    "escaped-letter": (at(1, lambda line: line.replace("ä".encode(), b"\\u00e4")), "canonical"),
    "float-duration": (at(1, lambda line: line.replace(b'"0.250000"', b"0.25")), "canonical"),
    "changed-and-signed-anew": (at(1, lambda line: resigned(line, NODE, size_bytes=1)), "does not follow"),
    "signed-by-a-stranger": (
        at(1, lambda line: resigned(line, STRANGER, node_id=STRANGER.node_id, public_key=STRANGER.public_key.hex())),
        "signed by another key",
    ),
    "strangers-key-under-the-nodes-id": (
        at(1, lambda line: resigned(line, STRANGER, public_key=STRANGER.public_key.hex())),
        "signed by another key",
    ),
    "strangers-signature-under-the-nodes-key": (at(1, lambda line: resigned(line, STRANGER)), "changed or forged"),
    "mixed-nodes": (lambda it: [*it[:4], chain(STRANGER)[4]], "signed by another key"),
    "anothers-chain": (lambda _: chain(STRANGER), "signed by another key"),
    "head-of-an-older-export": (lambda it: [*it[:4], head_of(it[:3], NODE)], "the head counts 3 receipts"),
    "head-of-another-chain": (lambda it: [*it[:4], chain(NODE)[4]], "names another last receipt"),
    "changed-head-count": (at(4, lambda line: line.replace(b'"count":4', b'"count":3')), "head's signature"),
    "changed-head-hash": (at(4, lambda line: edited(line, lambda it: it.update(head="0" * 64))), "head's signature"),
    "changed-head-time": (at(4, lambda line: line.replace(b'"at":"2', b'"at":"1')), "head's signature"),
    "head-signed-by-a-stranger": (lambda it: [*it[:4], head_of(it[:4], STRANGER)], "signed by another key"),
}


def main() -> None:
    folder = Path(__file__).parent
    lines = chain(NODE)
    (folder / "sound.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    for name, (fault, _) in FAULTS.items():
        (folder / f"{name}.jsonl").write_bytes(b"".join(line + b"\n" for line in fault(lines)))
    (folder / "expected.json").write_text(
        json.dumps(
            {
                "public_key": NODE.public_key.hex(),
                "head": hash_of(lines[COUNT - 1]),
                "problems": {name: problem for name, (_, problem) in FAULTS.items()},
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
