"""What `kvtier node` says of its tiers: conditions from real slots, metrics, health, memory."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier_api.documents import parse_object
from kvtier_api.tier import KVCacheTier
from requirements import need_root
from standalone import Host, Process, standalone_host, wait_for

SEALED = {"encryption": {"backend": "SealOnly"}}
FSCRYPT = {"encryption": {"backend": "Fscrypt"}}
RANDOM = 'head -c 4194304 /dev/urandom | dd of="$KVTIER_SLOT_PREFIX.rank_0" conv=notrunc 2>/dev/null; sleep 600'
WORDS = (
    'yes "words of a user" | head -c 4194304 | dd of="$KVTIER_SLOT_PREFIX.rank_0" conv=notrunc 2>/dev/null; sleep 600'
)


@pytest.fixture
def host() -> Iterator[Host]:
    with standalone_host() as it:
        yield it


def get(node: Process, path: str) -> tuple[int, str]:
    port = node.event("listening")["port"]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metric(node: Process, name: str, **labels: str) -> float | None:
    _, text = get(node, "/metrics")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def test_sealed_slots_are_measured_through_the_mount(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.run("chat", RANDOM)
    retained = host.wait_condition("chat", "RetentionEnforced", "True", "SlotsSampledSealed")
    assert "cannot be told from random bytes" in retained["message"], "what was measured"
    assert "under key epochs is the engine's word and was not measured" in retained["message"]
    encrypted = host.wait_condition("chat", "Encrypted", "True", "SlotsSampledSealed")
    assert "that the engine sealed them is its word" in encrypted["message"]
    host.wait_condition("chat", "Provisioned", "True", "Provisioned")
    ready = host.wait_condition("chat", "Ready", "Unknown", "GuaranteeNotMet")
    assert "SaltEnforced is Unknown (EngineNotObserved)" in ready["message"]


@pytest.mark.root
def test_an_engine_that_does_not_seal_is_seen_under_a_volume_that_encrypts(host: Host) -> None:
    need_root()
    host.declare("chat", **FSCRYPT)
    host.node()
    host.run("chat", WORDS)
    host.wait_condition("chat", "RetentionEnforced", "False", "EngineCannotExpire")
    host.wait_condition("chat", "Encrypted", "True", "KernelKeyMeasured")
    host.wait_condition("chat", "Ready", "False", "GuaranteeNotMet")


def test_plaintext_where_only_the_engine_encrypts_is_no_encryption(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.run("chat", WORDS)
    host.wait_condition("chat", "Encrypted", "False", "PlaintextFound")


ENDS = """
    rm "$KVTIER_SLOT_PREFIX.rank_0"
    for i in 1 2 3 4 5 6 7 8 9; do yes "My doctor wrote: biopsy positive" | head -c 4000 > "$KVTIER_SLOT_DIR/part.$i"; done
    sleep 600
"""


def test_plaintext_in_files_of_less_than_a_block_is_no_encryption(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.run("chat", ENDS)
    found = host.wait_condition("chat", "Encrypted", "False", "PlaintextFound")
    assert "plaintext" in found["message"]
    host.wait_condition("chat", "RetentionEnforced", "False", "EngineCannotExpire")


@pytest.mark.root
def test_a_slot_of_less_than_a_block_is_seen_under_a_volume_that_encrypts(host: Host) -> None:
    need_root()
    host.declare("chat", **FSCRYPT)
    host.node()
    host.run("chat", 'yes "words of a user" | head -c 940 > "$KVTIER_SLOT_PREFIX.rank_0"; sleep 600')
    found = host.wait_condition("chat", "RetentionEnforced", "False", "EngineCannotExpire")
    assert "the engine does not seal" in found["message"]


def test_a_slot_that_was_written_with_zeros_is_not_called_unused(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.run("chat", 'head -c 8192 /dev/zero > "$KVTIER_SLOT_PREFIX.rank_0"; touch "$NOTE/written"; sleep 600')
    notes = next(host.base.glob("notes-*"))
    wait_for(lambda: (notes / "written").exists(), "the zeros")

    def message() -> str:
        found = host.wait_condition("chat", "Encrypted", "Unknown", "NotYetMeasured")["message"]
        return found if "nothing but zeros" in found else ""

    wait_for(lambda: bool(message()), "a look at the zeros")


def test_a_volume_without_a_used_slot_is_unknown_and_not_true(host: Host) -> None:
    host.declare("chat", **SEALED)
    host.node()
    host.run("chat", "sleep 600")
    host.wait_condition("chat", "Provisioned", "True", "Provisioned")
    for condition in ("Encrypted", "RetentionEnforced"):
        host.wait_condition("chat", condition, "Unknown", "NotYetMeasured")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"path": "/var/lib/kvtier-elsewhere/chat"}, "PathNotAllowed"),
        ({"sizePerRank": "900Ti"}, "InsufficientSpace"),
        ({"encryption": {"backend": "HostAttested"}, "path": "/proc/chat"}, "PathNotAllowed"),
    ],
)
def test_a_tier_that_cannot_be_provisioned_says_why_before_anybody_tries(
    host: Host, spec: dict[str, object], reason: str
) -> None:
    host.declare("chat", **(SEALED | spec))
    host.node()
    host.wait_condition("chat", "Provisioned", "False", reason)
    host.wait_condition("chat", "Ready", "False", reason)


def test_foreign_data_in_a_tiers_directory_is_a_condition_and_a_metric_and_stays(host: Host) -> None:
    host.declare("chat", **SEALED)
    (host.root / "chat").mkdir()
    (host.root / "chat" / "slot.rank_0").write_text("somebody's")
    node = host.node()
    said = host.wait_condition("chat", "Mapped", "False", "ForeignData")
    assert "slot.rank_0" in said["message"]
    wait_for(lambda: metric(node, "kvtier_node_foreign_data", tier="chat") == 1, "the figure, which follows the status")
    assert (host.root / "chat" / "slot.rank_0").read_text() == "somebody's"


def test_the_status_file_is_a_tier_of_the_api_with_bytes_and_the_last_erasure(host: Host) -> None:
    host.declare("chat", ranks=2, **SEALED)
    host.node()
    process, _, pid = host.run("chat", "sleep 600")
    host.wait_condition("chat", "Provisioned", "True", "Provisioned")
    tier = parse_object(json.loads(host.status_file("chat").read_text()), kind=KVCacheTier)
    assert tier.status is not None and tier.status.volumes is not None
    assert (tier.status.volumes.in_use, tier.status.bytes_total, tier.status.residual_bytes) == (1, 2 << 23, 0)
    os.kill(pid, 9)
    assert process.popen.wait(60) == 137
    receipt = host.receipts()[0]

    def erased() -> bool:
        status = json.loads(host.status_file("chat").read_text())["status"]
        return status.get("lastErasure", {}).get("receiptId") == receipt["id"] and status["bytesTotal"] == 0

    wait_for(erased, "the erasure in the status")


def test_metrics_count_volumes_bytes_erasures_and_receipts(host: Host) -> None:
    host.declare("chat", ranks=2, **SEALED)
    node = host.node()
    process, _, pid = host.run("chat", RANDOM)
    wait_for(lambda: metric(node, "kvtier_node_volumes", state="InUse", backend="SealOnly") == 1, "the volume")
    wait_for(lambda: metric(node, "kvtier_node_used_bytes", tier="chat") == 4 << 20, "used bytes as measured")
    assert metric(node, "kvtier_node_provisioned_bytes", tier="chat") == 2 << 23
    assert metric(node, "kvtier_node_tiers") == 1
    os.kill(pid, 9)
    process.popen.wait(60)
    wait_for(lambda: metric(node, "kvtier_node_receipts") == 1, "the receipt")
    assert metric(node, "kvtier_node_crash_erasures_total") == 1
    assert metric(node, "kvtier_node_erasures_total", trigger="Crash") == 1
    assert metric(node, "kvtier_node_erase_seconds_count", trigger="Crash") == 1
    assert metric(node, "kvtier_node_deadline_misses_total") == 0
    # The reconcile that counts the receipt may have listed the volumes just before its end.
    wait_for(lambda: metric(node, "kvtier_node_residual_bytes", tier="chat") == 0, "nothing left")
    assert metric(node, "kvtier_node_ledger_rebuilt_timestamp_seconds") == 0
    assert metric(node, "kvtier_node_receipts_mirror_problem") == 0
    assert metric(node, "kvtier_node_tier_condition", condition="Scrubbed", status="True") == 1


def test_health_and_readiness_are_served_on_loopback(host: Host) -> None:
    node = host.node()
    assert get(node, "/readyz") == (200, "ready\n")
    code, text = get(node, "/healthz")
    assert code == 200
    assert text.startswith("last reconcile ")
    assert get(node, "/nothing")[0] == 404


def test_not_ready_before_recovery_and_not_healthy_without_reconciles(tmp_path: Path) -> None:
    from kvtier_node.agent import Agent, AgentOptions
    from kvtier_node.event_log import configure
    from kvtier_node.recovery import open_node

    state, root = tmp_path / "state", tmp_path / "tiers"
    root.mkdir(mode=0o755)
    node = open_node(str(state), [str(root)])
    agent = Agent(node, AgentOptions(str(state), [str(root)], str(tmp_path)), configure())
    assert not agent.ready().ok
    assert agent.healthy().ok  # a long recovery is no reason to be killed
    agent._ready = True
    agent.reconciler.completed_at = time.monotonic() - 61
    assert not agent.healthy().ok
    agent.reconciler.completed_at = time.monotonic()
    assert agent.healthy().ok
    node.ledger.close()


def test_the_agent_fits_in_100_mib_with_volumes_in_use_and_metrics_read(host: Host) -> None:
    host.declare("chat", ranks=4, **SEALED)
    node = host.node()
    for _ in range(4):
        process, told, _ = host.run("chat", RANDOM)
        process.sigkill()
        node.event("took-over", volume=told["KVTIER_VOLUME_ID"])
    wait_for(lambda: metric(node, "kvtier_node_used_bytes", tier="chat") == 16 << 20, "every volume measured")
    for _ in range(5):
        get(node, "/metrics")
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    peak_kib = int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    assert peak_kib < 100 * 1024, f"VmHWM {peak_kib} KiB"


def test_log_lines_are_json_with_time_level_and_event(host: Host) -> None:
    node = host.node()
    node.terminate()
    lines = [json.loads(line) for line in node.text().splitlines()]
    assert all({"time", "level", "event"} <= line.keys() for line in lines)
    assert lines[0]["event"] == "listening"
