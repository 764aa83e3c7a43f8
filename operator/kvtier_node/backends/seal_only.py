"""`SealOnly`: plain preallocated files that only a sealing engine may fill. The fast path: no byte is encrypted twice.

There is no volume key. The engine's data keys live in its process's memory and end with it: the process's death is the
erasure. The agent does not take that on trust: it samples the slots. A used block that is not ciphertext is a finding,
`Encrypted` turns False, and the erasure overwrites. Never chosen by `Auto`. Needs no root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtier_api.volume import BackendName
from kvtier_node.backends import plain
from kvtier_node.backends.base import Measurement, Note, Probe, VolumeRequest
from kvtier_node.backends.host_attested import keeps_old_copies
from kvtier_node.paths import Directory
from kvtier_node.receipts import Step, Technique
from kvtier_node.sampling import Range, SampleResult

__all__ = ["SealOnly", "shown_by"]


def shown_by(result: SampleResult) -> Measurement:
    """What a sample of the files says of the encryption, where the engine's is the only one."""
    if result.plaintext:
        return Measurement(False, f"slots hold plaintext: {result.sentence()}")
    if unknown := result.why_unknown():
        return Measurement(None, unknown)
    return Measurement(
        True,
        "no used block that was sampled can be told from random bytes; that the engine sealed them is its word:"
        f" {result.sentence()}",
    )


class SealOnly:
    name = BackendName.SEAL_ONLY
    technique = Technique.PROCESS_DEATH
    own_device = False

    def probe(self, tier: Directory, *, device: str | None) -> Probe:
        if device is not None:
            return Probe(False, "SealOnly works on files; spec.device is for DmCrypt")
        lacking = plain.probe_files(tier)
        return Probe(False, lacking) if lacking else Probe(True, "plain files; only a sealing engine may fill them")

    def bytes_needed(self, slots_bytes: int) -> int:
        return plain.bytes_needed(slots_bytes)

    def create(self, place: Directory, request: VolumeRequest, note: Note) -> None:
        plain.create_directories(place)
        note(facts={"cipher": "AES-256-GCM in the engine (slots)"})

    def measure(self, place: Directory, request: VolumeRequest, key_id: str | None) -> Measurement:
        result, count = plain.read_back_slots(place, request)
        facts = {
            "files": count,
            "blocks": result.blocks,
            "ciphertext": result.ciphertext,
            "plaintext": result.plaintext,
        }
        return replace(shown_by(result), facts=facts)

    def is_in_kernel(self, place: Directory, request: VolumeRequest) -> bool:
        return True  # its files are in the tier's own file system

    def own_devices(self, place: Directory, request: VolumeRequest) -> list[str]:
        return []

    def destroy_key(self, place: Directory, request: VolumeRequest, key_id: str | None) -> list[Step]:
        fenced = plain.fence(place, request)
        plain.refuse_open(place, request)
        return [
            fenced,
            Step("process-death", True, "the data keys were only in the memory of the consumer, which has ended"),
        ]

    def data_ranges(self, place: Directory, request: VolumeRequest) -> list[Range]:
        return []

    def read_back(self, place: Directory, request: VolumeRequest, ranges: Sequence[Range]) -> list[Step]:
        result, _ = plain.read_back_slots(place, request)
        if result.plaintext == 0:
            return [Step("read-back", result.clean, result.sentence())]
        steps = [
            Step("read-back", False, f"the engine did not seal: {result.sentence()}"),
            plain.overwrite_slots(place, request),
        ]
        again, _ = plain.read_back_slots(place, request, overwritten=True)
        steps.append(Step("read-back-after-overwrite", again.clean, again.sentence()))
        kept = keeps_old_copies(place)
        if kept:
            steps.append(Step("old-copies", False, f"plaintext was overwritten, but {kept}"))
        return steps

    def release(self, place: Directory, request: VolumeRequest, *, discard: bool) -> list[Step]:
        return plain.remove_directories(place, request, discard=discard)

    def not_covered(self) -> list[str]:
        return [
            "bytes that a consumer wrote without sealing them: they are looked for by sampling only",
            "names, sizes and times of the slot files are metadata of the host's file system",
            "main memory: pages of the consumer and of the page cache are the kernel's to reuse",
        ]
