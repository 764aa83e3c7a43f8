"""Reasons of conditions: closed, so that alerts and documents can name them. Each one has its explanation beside it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

__all__ = ["REASONS", "Reason"]


class Reason(StrEnum):
    # Any condition
    NOT_YET_MEASURED = "NotYetMeasured"
    MEASURED = "Measured"
    MEASUREMENT_FAILED = "MeasurementFailed"
    NODE_UNREACHABLE = "NodeUnreachable"
    NOT_IN_LEDGER = "NotInLedger"
    NO_VOLUMES = "NoVolumes"
    INVALID_SPEC = "InvalidSpec"
    # Ready
    ALL_GUARANTEES_HOLD = "AllGuaranteesHold"
    GUARANTEE_NOT_MET = "GuaranteeNotMet"
    DELETING = "Deleting"
    RECOVERING = "Recovering"
    # Provisioned
    PROVISIONED = "Provisioned"
    PROVISIONING = "Provisioning"
    PATH_NOT_ALLOWED = "PathNotAllowed"
    UNSAFE_PATH = "UnsafePath"
    FOREIGN_DATA = "ForeignData"
    INSUFFICIENT_SPACE = "InsufficientSpace"
    BACKEND_UNAVAILABLE = "BackendUnavailable"
    PROVISIONING_FAILED = "ProvisioningFailed"
    # Encrypted
    KERNEL_KEY_MEASURED = "KernelKeyMeasured"
    HOST_VOLUME_MEASURED = "HostVolumeMeasured"
    SLOTS_SAMPLED_SEALED = "SlotsSampledSealed"
    PLAINTEXT_FOUND = "PlaintextFound"
    NOT_ENCRYPTED = "NotEncrypted"
    # SaltEnforced
    SALT_REQUIRED = "SaltRequired"
    SALT_SHARED = "SaltShared"
    ENGINE_IGNORES_SALT = "EngineIgnoresSalt"
    ENGINE_NOT_OBSERVED = "EngineNotObserved"
    # RetentionEnforced
    KEY_EPOCHS_DROPPED = "KeyEpochsDropped"
    ERASED_AT_MAX_AGE = "ErasedAtMaxAge"
    MAX_AGE_EXCEEDED = "MaxAgeExceeded"
    ENGINE_CANNOT_EXPIRE = "EngineCannotExpire"
    # Scrubbed
    NOTHING_LEFT = "NothingLeft"
    ERASING = "Erasing"
    DEADLINE_MISSED = "DeadlineMissed"
    ERASE_INCOMPLETE = "EraseIncomplete"
    ABANDONED = "Abandoned"
    # HostHardened
    HOST_HARDENED = "HostHardened"
    SWAP_UNENCRYPTED = "SwapUnencrypted"
    CORE_DUMPS_ENABLED = "CoreDumpsEnabled"
    HIBERNATION_POSSIBLE = "HibernationPossible"
    SNAPSHOTS_POSSIBLE = "SnapshotsPossible"
    # Mapped
    DECLARED = "Declared"
    UNDECLARED_STORE = "UndeclaredStore"
    # Complete (of an erasure)
    PENDING = "Pending"
    COMPLETE = "Complete"
    ERASE_FAILED = "EraseFailed"


REASONS: Final[dict[Reason, str]] = {
    Reason.NOT_YET_MEASURED: "Nothing was measured yet for this generation.",
    Reason.MEASURED: "Measured; the message says what and where.",
    Reason.MEASUREMENT_FAILED: "A measurement failed; the message gives the error.",
    Reason.NODE_UNREACHABLE: "A node that holds a volume does not report; its volumes still count.",
    Reason.NOT_IN_LEDGER: "The node answers, and its ledger has no such volume; the volume still counts.",
    Reason.NO_VOLUMES: "The tier has no volume, so there is nothing to measure.",
    Reason.INVALID_SPEC: "The spec does not hold; the message names the field and the remedy.",
    Reason.ALL_GUARANTEES_HOLD: "Every other condition that the tier needs is True.",
    Reason.GUARANTEE_NOT_MET: "Another condition is not True; the message names it.",
    Reason.DELETING: "The tier is being deleted; its volumes are being erased.",
    Reason.RECOVERING: "The node agent finishes what a crash or reboot left before it serves anyone.",
    Reason.PROVISIONED: "Volumes and slot files exist as declared.",
    Reason.PROVISIONING: "A volume is being made.",
    Reason.PATH_NOT_ALLOWED: "The path lies under no root that the administrator allows.",
    Reason.UNSAFE_PATH: "The path leads, or could be made to lead, elsewhere.",
    Reason.FOREIGN_DATA: "Something is at the place that kvtier did not put there; it was not touched.",
    Reason.INSUFFICIENT_SPACE: "What was asked for does not fit; the message gives both numbers.",
    Reason.BACKEND_UNAVAILABLE: "No volume backend works here; the message gives each one's reason.",
    Reason.PROVISIONING_FAILED: "A system call or tool failed; the message names it.",
    Reason.KERNEL_KEY_MEASURED: "The kernel reports the volume's cipher and a key of kvtier's own.",
    Reason.HOST_VOLUME_MEASURED: "The kernel reports that the host's existing volume is encrypted.",
    Reason.SLOTS_SAMPLED_SEALED: "A sample of the slots on disk shows zeros or ciphertext only.",
    Reason.PLAINTEXT_FOUND: "A sample of the slots on disk shows plaintext.",
    Reason.NOT_ENCRYPTED: "The kernel reports no encryption below the path.",
    Reason.SALT_REQUIRED: "The engine drops blocks of requests without a trusted salt.",
    Reason.SALT_SHARED: "The policy is Shared: tenants share cached blocks, as declared.",
    Reason.ENGINE_IGNORES_SALT: "This engine and version does not honour the salt.",
    Reason.ENGINE_NOT_OBSERVED: "No engine has reported how it treats salts.",
    Reason.KEY_EPOCHS_DROPPED: "The engine drops the keys of an epoch at its maximum age.",
    Reason.ERASED_AT_MAX_AGE: "Volumes are erased before a block in them is too old.",
    Reason.MAX_AGE_EXCEEDED: "A block older than the maximum age may still be readable.",
    Reason.ENGINE_CANNOT_EXPIRE: "This engine does not seal its slots, so no key can be dropped at the maximum age.",
    Reason.NOTHING_LEFT: "Every volume of an ended consumer is erased, with a receipt.",
    Reason.ERASING: "An erasure is under way, within its deadline.",
    Reason.DEADLINE_MISSED: "An erasure took longer than scrub.deadline.",
    Reason.ERASE_INCOMPLETE: "A key or bytes may still be reachable; the message says where.",
    Reason.ABANDONED: "An administrator gave a place up; nothing is claimed of it.",
    Reason.HOST_HARDENED: "Swap, core dumps, hibernation and snapshots were measured and cannot leak.",
    Reason.SWAP_UNENCRYPTED: "Swap without encryption is active.",
    Reason.CORE_DUMPS_ENABLED: "The kernel writes core dumps of consumers.",
    Reason.HIBERNATION_POSSIBLE: "The node can write its memory to disk.",
    Reason.SNAPSHOTS_POSSIBLE: "The file system below can keep old blocks in snapshots.",
    Reason.DECLARED: "Every store that was found is declared by a tier.",
    Reason.UNDECLARED_STORE: "A store was found that no tier declares.",
    Reason.PENDING: "Requested; no agent has begun.",
    Reason.COMPLETE: "Every volume in scope is erased, with a receipt.",
    Reason.ERASE_FAILED: "An erasure failed; the message says where.",
}
