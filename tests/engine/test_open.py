"""Opening a store by its volume's marker: what is checked before the first write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_material import SLOT_BYTES, block
from kvtier_api.errors import EngineError, KvtierError, NotFound, UnsafePath, VerificationFailed
from kvtier_api.marker import MARKER_NAME, SLOTS_DIRECTORY, Marker
from kvtier_engine import Outcome, SlotStore
from leftovers import open_descriptors
from requirements import need_root

NONCE = "0123456789abcdef" * 2


def _volume(root: Path, ranks: int = 2, **fields: Any) -> str:
    slots = root / SLOTS_DIRECTORY
    slots.mkdir(parents=True, exist_ok=True)
    names = [f"slot.rank_{rank}" for rank in range(ranks)]
    for name in names:
        with (slots / name).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 16 * SLOT_BYTES)
    values: dict[str, Any] = {
        "volume_id": "kvv-0123456789abcdef0123",
        "tier_uid": "uid",
        "tier_namespace": "default",
        "tier_name": "tier",
        "nonce": NONCE,
        "ranks": ranks,
        "slot_files": names,
        "slot_size_bytes": SLOT_BYTES,
        "bytes_per_rank": 16 * SLOT_BYTES,
        "seal_slots": True,
        "salt_policy": "Required",
        "salt_hash": "",
        "max_age_s": 3600.0,
        "backend": "SealOnly",
        "own_device": False,
    }
    path = root / MARKER_NAME
    path.write_bytes(Marker(**(values | fields)).to_bytes())
    return str(path)


def _open(path: str, **options: Any) -> SlotStore:
    return SlotStore.open(path, nonce=options.pop("nonce", NONCE), harden_process=False, io_depth=1, **options)


def test_all_ranks_or_one_are_opened_as_the_marker_says(tmp_path: Path) -> None:
    path = _volume(tmp_path)
    descriptors = open_descriptors()
    with _open(path) as store:
        assert store.config.ranks == (0, 1)
        assert store.stats().slots == 16
        assert store.put(b"k", [block(0), block(1)], tenant=b"a").ok
        rooms = [bytearray(SLOT_BYTES), bytearray(SLOT_BYTES)]
        assert store.get(b"k", rooms, tenant=b"a").ok
        assert rooms == [block(0), block(1)]
        assert store.put(b"k", [block(0), block(1)]) is Outcome.REFUSED
    with _open(path, rank=1) as store:
        assert store.config.ranks == (1,)
        assert store.config.files == ("slot.rank_1",)
    assert open_descriptors() == descriptors


def _rename_slots(root: Path) -> None:
    (root / SLOTS_DIRECTORY).rename(root / "elsewhere")
    (root / SLOTS_DIRECTORY).symlink_to("elsewhere")


def _swap_file(root: Path) -> None:
    path = root / SLOTS_DIRECTORY / "slot.rank_1"
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("fields", "harm", "error"),
    [
        ({}, lambda root: (root / MARKER_NAME).unlink(), VerificationFailed),
        ({}, lambda root: (root / MARKER_NAME).write_text("{}"), VerificationFailed),
        ({"nonce": "f" * 32}, lambda root: None, VerificationFailed),
        ({"own_device": True}, lambda root: None, VerificationFailed),
        ({}, _rename_slots, VerificationFailed),
        ({}, _swap_file, UnsafePath),
        ({}, lambda root: (root / SLOTS_DIRECTORY / "slot.rank_1").unlink(), NotFound),
        ({}, lambda root: os.truncate(root / SLOTS_DIRECTORY / "slot.rank_1", 4096), EngineError),
        ({"slot_files": ["slot.rank_0"]}, lambda root: None, EngineError),
        ({"slot_files": ["slot.rank_0", "../slots/slot.rank_1"]}, lambda root: None, EngineError),
        ({"slot_files": ["slot.rank_0", ".."]}, lambda root: None, EngineError),
        ({"seal_slots": False, "salt_policy": "PerTenant"}, lambda root: None, EngineError),
    ],
)
def test_what_is_not_the_volume_is_refused_and_nothing_stays_open(
    fields: dict[str, Any], harm: Any, error: type[KvtierError], tmp_path: Path
) -> None:
    path = _volume(tmp_path / "volume", **fields)
    harm(tmp_path / "volume")
    descriptors = open_descriptors()
    with pytest.raises(error):
        _open(path).close()
    assert open_descriptors() == descriptors


def test_another_nonce_or_rank_is_refused(tmp_path: Path) -> None:
    path = _volume(tmp_path)
    with pytest.raises(VerificationFailed, match="nonce"):
        _open(path, nonce="f" * 32)
    for rank in (-1, 2):
        with pytest.raises(EngineError, match="ranks"):
            _open(path, rank=rank)


@pytest.mark.root
def test_a_file_mounted_over_a_slot_file_from_elsewhere_is_on_another_device(tmp_path: Path) -> None:
    need_root()
    path = _volume(tmp_path / "volume")
    other = tmp_path / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(other)], check=True)
    target = tmp_path / "volume" / SLOTS_DIRECTORY / "slot.rank_0"
    try:
        (other / "f").write_bytes(bytes(16 * SLOT_BYTES))
        subprocess.run(["mount", "--bind", str(other / "f"), str(target)], check=True)
        try:
            with pytest.raises(UnsafePath, match="device"):
                _open(path).close()
        finally:
            subprocess.run(["umount", str(target)], check=True)
    finally:
        subprocess.run(["umount", str(other)], check=True)


def test_the_environment_of_kvtier_run_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _volume(tmp_path)
    monkeypatch.delenv("KVTIER_NONCE", raising=False)
    monkeypatch.setenv("KVTIER_MARKER", path)
    with pytest.raises(EngineError, match="KVTIER_NONCE, or KVTIER_POD_UID"):
        SlotStore.from_environment(harden_process=False)
    monkeypatch.setenv("KVTIER_NONCE", NONCE)
    with SlotStore.from_environment(harden_process=False) as store:
        assert store.config.ranks == (0, 1)
    monkeypatch.setenv("KVTIER_SLOT_FILE", str(tmp_path / SLOTS_DIRECTORY / "slot.rank_1"))
    with SlotStore.from_environment(harden_process=False) as store:
        assert store.config.ranks == (1,)
    monkeypatch.setenv("KVTIER_SLOT_FILE", str(tmp_path / SLOTS_DIRECTORY / "slot.rank_7"))
    with pytest.raises(EngineError, match="rank_7"):
        SlotStore.from_environment(harden_process=False)


def test_a_pods_environment_opens_the_volume_that_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod cannot know the nonce of a volume that is made after it was created; it knows its own uid."""
    monkeypatch.delenv("KVTIER_NONCE", raising=False)
    monkeypatch.setenv("KVTIER_MARKER", _volume(tmp_path, pod_uid="pod-a"))
    monkeypatch.setenv("KVTIER_POD_UID", "pod-a")
    with SlotStore.from_environment(harden_process=False) as store:
        assert store.config.ranks == (0, 1)
    monkeypatch.setenv("KVTIER_NONCE", "f" * 32)
    with pytest.raises(VerificationFailed, match="nonce"):
        SlotStore.from_environment(harden_process=False)


@pytest.mark.parametrize("made_for", ["pod-b", None])
def test_a_volume_of_another_pod_or_of_none_is_refused(tmp_path: Path, made_for: str | None) -> None:
    """kubelet mounted another pod's directory (calico#9279, yandex k8s-csi-s3#149)."""
    path = _volume(tmp_path, pod_uid=made_for)
    with pytest.raises(VerificationFailed, match="this is pod pod-a"):
        SlotStore.open(path, pod_uid="pod-a", harden_process=False)


@pytest.mark.parametrize("given", [{}, {"nonce": ""}, {"pod_uid": ""}])
def test_a_volume_is_not_opened_on_nobodys_word(tmp_path: Path, given: dict[str, str]) -> None:
    with pytest.raises(VerificationFailed, match="neither a nonce nor a pod's uid"):
        SlotStore.open(_volume(tmp_path, pod_uid="pod-a"), harden_process=False, **given)


def test_the_engine_imports_neither_torch_nor_anything_of_kubernetes() -> None:
    script = (
        "import sys, pkgutil, importlib, kvtier_engine\n"
        "for module in pkgutil.iter_modules(kvtier_engine.__path__):\n"
        "    if module.name != 'torch_staging' and not module.name.startswith(('vllm', 'lmcache')):\n"
        "        importlib.import_module('kvtier_engine.' + module.name)\n"
        "bad = {'torch', 'kubernetes', 'kopf', 'kvtier_node', 'kvtier_cli', 'aiohttp'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
