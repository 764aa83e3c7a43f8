"""Which backend a tier gets: by measurement, with a reason for each that was passed over, and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from kvtier_api.errors import BackendUnavailable
from kvtier_api.volume import BackendName
from kvtier_node.backends import AUTO_ORDER, BACKENDS
from kvtier_node.backends.host_attested import crypt_chain
from kvtier_node.kernel import loop
from kvtier_node.receipts import Technique
from node_host import Host, eventually

pytestmark = pytest.mark.root
HAS_DEVICE_MAPPER = "device-mapper" in Path("/proc/misc").read_text()


def probe_loops() -> list[str]:
    return [name for name, path in loop.backing_paths().items() if "kvtier-probe" in path]


def test_auto_takes_the_first_that_works_and_keeps_every_reason(host: Host) -> None:
    live = host.provision(host.tier("Auto"))
    probes = live.row.facts["probes"]
    tried = [name for name in AUTO_ORDER if name in probes]
    assert tried == list(AUTO_ORDER[: len(tried)]) and tried[-1] == live.row.backend
    if not HAS_DEVICE_MAPPER:
        assert live.row.backend is BackendName.FSCRYPT
        assert "device" in probes["DmCrypt"]


def test_auto_never_takes_seal_only(host: Host) -> None:
    assert BackendName.SEAL_ONLY not in AUTO_ORDER


def test_without_root_only_sealed_slots_work_and_every_reason_is_told(host: Host) -> None:
    os.chown(host.root, 65534, 65534)
    done = host.python_as_nobody(
        """
        import sys
        from kvtier_api.errors import BackendUnavailable
        from kvtier_api.volume import BackendName
        from kvtier_node import backends
        from kvtier_node.paths import AllowedRoots
        with AllowedRoots([sys.argv[1]]).open_directory(sys.argv[1]) as tier:
            try:
                backends.choose(None, tier, device=None)
            except BackendUnavailable as error:
                print(error.cause)
            print(backends.choose(BackendName.SEAL_ONLY, tier, device=None)[0].name)
        """,
        str(host.root),
    )
    reasons, chosen = done.stdout.strip().rsplit("\n", 1)
    assert all(name in reasons for name in AUTO_ORDER) and "needs root" in reasons
    assert chosen == "SealOnly"


def test_a_whole_life_without_root(host: Host) -> None:
    base = host.base / "user"
    base.mkdir()
    os.chown(base, 65534, 65534)
    done = host.python_as_nobody(
        """
        import json, os, sys
        from kvtier_api.documents import load_documents
        from kvtier_node.recovery import open_node, recover
        from kvtier_node.run import run_fenced
        base = sys.argv[1]
        os.mkdir(base + "/tiers")
        tier = load_documents(json.dumps({"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheTier",
            "metadata": {"name": "demo"}, "spec": {"sizePerRank": "4Mi", "ranks": 1, "path": base + "/tiers/demo",
            "encryption": {"backend": "SealOnly"}}}))[0]
        node = open_node(base + "/state", [base + "/tiers"])
        recover(node)
        result = run_fenced(node, tier, ["sh", "-c", "cd $KVTIER_SLOT_DIR; mkdir d; echo x > d/f; chmod 0 d/f d; exit 3"])
        print(result.exit_code, result.receipt and result.receipt.technique, result.error, os.listdir(base + "/tiers/demo"))
        """,
        str(base),
    )
    assert done.stdout == "3 Overwrite None []\n"


def test_no_probe_leaves_a_loop_device_or_a_file(host: Host) -> None:
    with host.node.places.tier_directory(str(host.root), create=False) as tier:
        for name, backend in BACKENDS.items():
            before = probe_loops()
            found = backend.probe(tier, device=None)
            assert found.reason, name
            eventually("the probe's device is given back", lambda before=before: set(probe_loops()) <= set(before))
    assert os.listdir(host.root) == []


def test_a_probe_that_is_killed_leaves_no_loop_device(host: Host) -> None:
    """The kernel itself takes it back: nobody would know it again by any record."""
    code = """
import os, sys, signal
from kvtier_node.kernel import loop
fd = os.memfd_create("kvtier-probe-killed")
os.ftruncate(fd, 8 << 20)
with loop.transient(fd) as device:
    print(device.path, flush=True)
    signal.pause()
"""
    process = host.popen([sys.executable, "-c", code], stdout=-1, text=True)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    assert "kvtier-probe-killed" in (loop.backing_path(loop.LoopDevice(path, int(path[9:]))) or "")
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(
        "given back", lambda: "kvtier-probe-killed" not in str(loop.backing_path(loop.LoopDevice(path, int(path[9:]))))
    )


@pytest.mark.skipif(HAS_DEVICE_MAPPER, reason="this kernel has device mapper: tests/vm covers DmCrypt")
def test_a_backend_that_the_kernel_lacks_is_refused_with_its_reason(host: Host) -> None:
    with pytest.raises(BackendUnavailable, match="DmCrypt: "):
        host.provision(host.tier("DmCrypt"))
    assert host.node.ledger.volumes() == []
    assert os.listdir(host.root / "demo") == []


# What encryption is believed


def sys_block(tmp_path: Path, tree: dict[str, tuple[str | None, list[str]]]) -> str:
    """A stand-in for /sys/dev/block, which cannot be arranged at will: device → (dm uuid, devices below)."""
    for name, (uuid, below) in tree.items():
        base = tmp_path / name
        (base / "slaves").mkdir(parents=True)
        if uuid is not None:
            (base / "dm").mkdir()
            (base / "dm" / "uuid").write_text(uuid + "\n")
        for lower in below:
            (base / "slaves" / lower.replace(":", "_")).mkdir()
            (base / "slaves" / lower.replace(":", "_") / "dev").write_text(lower + "\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("tree", "encrypted"),
    [
        ({"8:1": (None, [])}, False),
        ({"253:0": ("CRYPT-LUKS2-abc", ["8:1"]), "8:1": (None, [])}, True),
        ({"253:1": ("LVM-x", ["253:0"]), "253:0": ("CRYPT-PLAIN-x", ["8:1"]), "8:1": (None, [])}, True),
        ({"253:1": ("LVM-x", ["8:1"]), "8:1": (None, [])}, False),
        # A mirror of an encrypted and a plain half is not encrypted.
        (
            {
                "9:0": (None, ["253:0", "8:2"]),
                "253:0": ("CRYPT-LUKS2-x", ["8:1"]),
                "8:1": (None, []),
                "8:2": (None, []),
            },
            False,
        ),
        ({"9:0": (None, ["253:0", "253:1"]), "253:0": ("CRYPT-LUKS2-x", []), "253:1": ("CRYPT-LUKS2-y", [])}, True),
        ({"253:1": ("mpath-CRYPT-x", ["8:1"]), "8:1": (None, [])}, False),
    ],
    ids=["disk", "luks", "lvm on luks", "lvm", "half a mirror", "both halves", "a name that only looks like it"],
)
def test_every_path_to_the_disk_must_cross_dm_crypt(
    tmp_path: Path, tree: dict[str, tuple[str | None, list[str]]], encrypted: bool
) -> None:
    top = next(iter(tree)).split(":")
    assert crypt_chain(os.makedev(int(top[0]), int(top[1])), sys_block(tmp_path, tree))[0] is encrypted


def test_each_backend_says_what_an_erasure_does_not_cover() -> None:
    for backend in BACKENDS.values():
        assert backend.not_covered()
    assert BACKENDS[BackendName.HOST_ATTESTED].technique is Technique.OVERWRITE
