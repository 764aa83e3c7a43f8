"""The chain of receipts: written out with a signed head, and verified offline.

A chain proves that what is in it was written by one node, in this order, and that nothing between its first and last
receipt was removed or changed. Its head line proves the end. That the newest receipts are there at all, only a head
that the verifier kept from before can prove (`expect_head`); that the key is this node's, only a pinned key
(`public_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from kvtier_api.errors import VerificationFailed
from kvtier_node.identity import Signer, node_id_of, signature_holds
from kvtier_node.receipts.encoding import ZERO_HASH, Hex256, Time, canonical_json, hash_of, utc_now
from kvtier_node.receipts.receipt import Receipt, parse_canonical

__all__ = ["ChainHead", "Verification", "export_chain", "sign_head", "verify_chain", "verify_export"]

_PROBLEM_LIMIT: Final = 100


class ChainHead(BaseModel):
    """The last line of an export: how many receipts, and the hash of the last one. Signed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["kvtier.dev/receipts-head/v1"] = "kvtier.dev/receipts-head/v1"
    count: int = Field(ge=0)
    head: Hex256
    at: Time
    node_id: str = Field(pattern=r"^[0-9a-f]{32}$")
    public_key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: str = Field(pattern=r"^[0-9a-f]{128}$")

    def is_authentic(self) -> bool:
        public_key = bytes.fromhex(self.public_key)
        signed = canonical_json(self.model_dump(mode="json", exclude={"signature"}))
        return node_id_of(public_key) == self.node_id and signature_holds(
            public_key, bytes.fromhex(self.signature), signed
        )


@dataclass(frozen=True)
class Verification:
    """What was found. `key_pinned` false: the key is the chain's own, trusted on first use."""

    ok: bool
    count: int
    head: str
    node_id: str
    key_pinned: bool
    problems: list[str] = field(default_factory=list)


class ReceiptSource(Protocol):
    """The ledger, as far as an export needs it: canonical lines in order, without newlines."""

    def receipt_lines(self, after_seq: int = 0) -> list[bytes]: ...


def sign_head(count: int, head: str, signer: Signer) -> ChainHead:
    content = {
        "format": "kvtier.dev/receipts-head/v1",
        "count": count,
        "head": head,
        "at": utc_now(),
        "node_id": signer.node_id,
        "public_key": signer.public_key.hex(),
    }
    return ChainHead.model_validate(content | {"signature": signer.sign(canonical_json(content)).hex()})


def export_chain(ledger: ReceiptSource, signer: Signer) -> Iterator[bytes]:
    """The whole chain as JSON lines, each with its newline, the signed head last."""
    lines = ledger.receipt_lines()
    for line in lines:
        yield line + b"\n"
    head = sign_head(len(lines), hash_of(lines[-1]) if lines else ZERO_HASH, signer)
    yield canonical_json(head.model_dump(mode="json")) + b"\n"


def verify_export(
    content: bytes, *, public_key: bytes | None = None, expect_head: str | None = None, require_head: bool = True
) -> Verification:
    """`verify_chain` over a whole file, whose last byte must be a newline."""
    lines = content.splitlines(keepends=True) if b"\r" not in content else content.split(b"\n")
    return verify_chain(lines, public_key=public_key, expect_head=expect_head, require_head=require_head)


def verify_chain(
    lines: Iterable[bytes | str],
    *,
    public_key: bytes | None = None,
    expect_head: str | None = None,
    require_head: bool = True,
) -> Verification:
    """Check a chain without anything of the node but, if given, its raw `public_key` and a known head.

    `lines` come with or without their newlines, but all alike. Never raises for what they hold: every problem found is
    named with its line (up to 100). `require_head=False` is for the node's own mirror file, which has no head line.
    """
    check = _Check(public_key, require_head=require_head)
    for number, line in enumerate(lines, start=1):
        check.line(number, line.encode("utf-8", "surrogatepass") if isinstance(line, str) else line)
    return check.result(expect_head)


class _Check:
    """The state of one verification, fed line by line."""

    def __init__(self, public_key: bytes | None, *, require_head: bool) -> None:
        self.key = public_key.hex() if public_key is not None else None
        self.pinned = public_key is not None
        self.require_head = require_head
        self.problems: list[str] = []
        self.count = 0
        self.previous = ZERO_HASH
        self.head: ChainHead | None = None
        self.ids: set[str] = set()
        self.newlines: bool | None = None

    def problem(self, number: int, text: str) -> None:
        if len(self.problems) < _PROBLEM_LIMIT:
            self.problems.append(f"line {number}: {text}")

    def line(self, number: int, raw: bytes) -> None:
        ended = raw.endswith(b"\n")
        if self.newlines is None:
            self.newlines = ended
        elif ended != self.newlines:
            self.problem(number, "truncated: its newline is missing")
        content = raw[:-1] if ended else raw
        if self.head is not None:
            self.problem(number, "follows the head")
        if b'"format":"kvtier.dev/receipts-head/' in content and self.head is None:
            self.head_line(number, content)
        else:
            self.receipt_line(number, content)

    def head_line(self, number: int, content: bytes) -> None:
        try:
            head = parse_canonical(ChainHead, content)
        except VerificationFailed as error:
            self.problem(number, f"the head: {error.cause}")
            return
        self.head = head
        self.same_key(number, head.public_key, head.node_id)
        if not head.is_authentic():
            self.problem(number, "the head's signature does not hold")
        if head.count != self.count:
            self.problem(number, f"the head counts {head.count} receipts; {self.count} are here")
        if head.head != self.previous:
            self.problem(number, "the head names another last receipt")

    def receipt_line(self, number: int, content: bytes) -> None:
        self.count += 1
        expected, self.previous = self.previous, hash_of(content)
        try:
            receipt = parse_canonical(Receipt, content)
        except VerificationFailed as error:
            self.problem(number, error.cause)
            return
        self.same_key(number, receipt.public_key, receipt.node_id)
        if not receipt.is_authentic():
            self.problem(number, f"receipt {receipt.id}: the signature does not hold: it was changed or forged")
        if receipt.seq != self.count:
            self.problem(
                number, f"receipt {receipt.id} has number {receipt.seq}, not {self.count}: removed or reordered"
            )
        if receipt.prev != expected:
            self.problem(number, f"receipt {receipt.id} does not follow the receipt before it")
        if receipt.id in self.ids:
            self.problem(number, f"receipt {receipt.id} is here twice")
        self.ids.add(receipt.id)

    def same_key(self, number: int, key: str, node_id: str) -> None:
        if self.key is None:
            self.key = key
        if key != self.key:
            self.problem(number, f"signed by another key (node {node_id})")

    def result(self, expect_head: str | None) -> Verification:
        if self.require_head and self.head is None:
            self.problems.append("the head line is missing: the end of the chain may have been cut off")
        if expect_head is not None and expect_head != self.previous:
            self.problems.append(f"the head is {self.previous}, not the expected {expect_head}")
        return Verification(
            ok=not self.problems,
            count=self.count,
            head=self.previous,
            node_id=node_id_of(bytes.fromhex(self.key)) if self.key else "",
            key_pinned=self.pinned,
            problems=self.problems,
        )
