"""Kinds of failure that others reported of the same parts, each as a test. The report is named in each.

Not on one host: a mount made inside a container (edgelesssys/contrast#2455) and what kubelet does after a reboot are tested
with the CSI service; an agent that disk pressure locks out, and a namespace that is deleted first, with the cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier_api.errors import VerificationFailed
from kvtier_api.marker import check_marker
from kvtier_node.guarding import look
from kvtier_node.kernel import libc, loop
from kvtier_node.receipts import Technique
from kvtier_node.run import run_fenced
from kvtier_node.shared_memory import SharedMemoryWatch
from node_host import CANARY, MIB, Host, eventually

pytestmark = pytest.mark.root


@pytest.mark.parametrize("how", ["process", "namespace kept by a bind mount alone"])
def test_firejail_5640_systemd_39062_moby_27381_a_mount_that_leaked_keeps_no_key_and_is_found(
    host: Host, how: str
) -> None:
    """A mount in another mount namespace keeps the device busy for weeks, and lsof shows nothing."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    anchor = host.base / "anchor"
    anchor.mkdir()
    if how == "process":
        leaked = host.popen(["unshare", "-m", "--propagation", "private", "sleep", "300"])
        here = os.readlink("/proc/self/ns/mnt")
        eventually("its own namespace", lambda: os.readlink(f"/proc/{leaked.pid}/ns/mnt") != here)
    else:  # nobody is in it: no /proc/PID/mountinfo shows it
        libc.mount("tmpfs", str(anchor), "tmpfs", 0, None)
        libc.mount(None, str(anchor), None, 1 << 18, None)  # MS_PRIVATE
        (anchor / "ns").touch()
        subprocess.run(["unshare", f"--mount={anchor}/ns", "--propagation", "private", "true"], check=True)
    consumer.kill()
    receipt = host.erase(live)
    assert receipt.technique is Technique.KEY_DESTROYED
    steps = {step.name: step for step in receipt.steps}
    assert "reports ABSENT" in steps["key-removed"].detail
    assert steps["loop-detach"].ok is None and "held by a mount elsewhere" in steps["loop-detach"].detail
    if how == "process":
        assert f"pid {leaked.pid}" in steps["mounts-elsewhere"].detail
        leaked.kill()
    else:
        libc.umount2(f"{anchor}/ns", 2)
    eventually("the kernel gives the device back with the mount", lambda: host.loops() == [])
    assert not os.path.lexists(live.row.place)


def test_anolisa_2965_a_backing_file_shown_as_deleted_is_still_the_volumes(host: Host) -> None:
    """The image's name is gone, as after the agent's container was replaced; the kernel's loop device is found by inode."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    os.unlink(host.image(live))
    [device] = host.loops()
    assert (loop.backing_path(loop.LoopDevice(device, int(device[9:]))) or "").endswith(" (deleted)")
    consumer.kill()
    host.drop_guardians()
    host.reopen()
    [receipt] = host.recover().erased
    assert "reports ABSENT" in " ".join(step.detail for step in receipt.steps)
    host.assert_nothing_left(live)


def test_kubernetes_109132_a_path_that_exists_again_is_another_inode(host: Host) -> None:
    """Another file has the image's path by now, on a loop device of somebody's: neither is taken for the volume's."""
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    image = host.image(live)
    os.unlink(image)
    image.write_bytes(b"somebody's" * 1000 + bytes(MIB))
    fd = os.open(image, os.O_RDWR)
    theirs = loop.attach(fd)
    os.close(fd)
    before = image.read_bytes()
    consumer.kill()
    for _ in range(2):
        seen = look(host.node, live)
        assert seen.receipt is None and "another file has the image's name" in str(seen.error)
    os.sync()
    assert image.read_bytes() == before and theirs.path in host.loops()
    assert host.node.ledger.receipts() == [], "nothing is claimed while it is in the way"
    image.rename(host.base / "theirs.img")
    receipt = look(host.node, live).receipt
    assert receipt is not None and receipt.technique is Technique.KEY_DESTROYED
    assert (host.base / "theirs.img").read_bytes() == before
    eventually("its own device is given back", lambda: host.loops() == [theirs.path])


def test_util_linux_3197_a_device_node_that_dev_lacks_is_made(host: Host) -> None:
    """The container's /dev has no node of the number that the kernel gives: provisioning and erasing work without it."""
    code = """
    import os, sys
    from kvtier_api.documents import load_documents
    from kvtier_api.erasure import Trigger
    from kvtier_node.erasing import erase
    from kvtier_node.kernel import libc
    from kvtier_node.kernel.namespaces import leave_mount_namespace
    from kvtier_node.provisioning import provision
    from kvtier_node.recovery import open_node
    leave_mount_namespace()
    control = os.stat("/dev/loop-control").st_rdev
    libc.mount("tmpfs", "/dev", "tmpfs", 0, "mode=755")
    for name, device in (("loop-control", control), ("null", os.makedev(1, 3)), ("urandom", os.makedev(1, 9))):
        os.mknod(f"/dev/{name}", 0o020600, device)
    assert not os.path.exists("/dev/loop0")
    node = open_node(sys.argv[1], [sys.argv[2]], name="node-a")
    live = provision(node, load_documents(sys.argv[3])[0], uid=0, gid=0)
    print(live.row.device)
    receipt = erase(node, live, Trigger.EXIT)
    print(receipt.technique)
    """
    manifest = host.tier("Fscrypt").model_dump_json(by_alias=True, exclude_none=True)
    host.node.ledger.close()
    done = host.python(code, host.state, str(host.root), manifest)
    device, technique = done.stdout.split()
    assert device.startswith("/dev/kvtier/") and technique == "KeyDestroyed"
    host.reopen()
    host.assert_nothing_left()


def test_longhorn_2474_a_directory_of_loop_devices_in_dev_is_understood(host: Host) -> None:
    code = """
    import os, sys
    from kvtier_node.kernel import libc, loop
    from kvtier_node.kernel.namespaces import leave_mount_namespace
    leave_mount_namespace()
    nodes = {name: os.stat(f"/dev/{name}").st_rdev for name in os.listdir("/dev") if name[:4] == "loop" and name[4:].isdecimal()}
    control = os.stat("/dev/loop-control").st_rdev
    libc.mount("tmpfs", "/dev", "tmpfs", 0, "mode=755")
    os.mknod("/dev/loop-control", 0o020600, control)
    os.mkdir("/dev/loop")
    for name, device in nodes.items():
        os.mknod(f"/dev/loop/{name[4:]}", 0o060600, device)
    fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 1 << 20)
    device = loop.attach(fd)
    print(device.path)
    assert loop.detach(device)
    """
    done = host.python(code, str(host.base / "image"))
    assert done.stdout.startswith(("/dev/loop/", "/dev/kvtier/"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_anolisa_2809_no_loop_device_is_kept_after_the_agent_was_stopped(host: Host, number: signal.Signals) -> None:
    """SIGTERM ends the command and its volume with it; after SIGKILL the next start gives the device back."""
    manifest = host.tier("Fscrypt").model_dump_json(by_alias=True, exclude_none=True)
    mark = host.base / "started"
    code = (
        "import sys\n"
        "from kvtier_api.documents import load_documents\n"
        "from kvtier_node.recovery import open_node\n"
        "from kvtier_node.run import run_fenced\n"
        "node = open_node(sys.argv[1], [sys.argv[2]], name='node-a')\n"
        "run_fenced(node, load_documents(sys.argv[3])[0], ['sh', '-c', sys.argv[4]])\n"
    )
    process = host.popen(
        [sys.executable, "-c", code, host.state, str(host.root), manifest, f"echo $$ > {mark}; exec sleep 300"]
    )
    pid = int(eventually("started", lambda: mark.exists() and mark.read_text()))
    process.send_signal(number)
    process.wait(60)
    if number == signal.SIGKILL:
        os.kill(pid, signal.SIGKILL)
        eventually("ended", lambda: not Path(f"/proc/{pid}").exists())
        assert len(host.recover().erased) == 1
    host.assert_nothing_left()


def test_kubernetes_119921_after_a_reboot_the_same_path_is_a_plain_directory_and_the_engine_refuses_it(
    host: Host,
) -> None:
    live = host.provision(host.tier("Fscrypt"))
    nonce = str(live.row.facts["nonce"])
    assert check_marker(live.marker_path, nonce=nonce).own_device
    marker = Path(live.marker_path).read_bytes()
    live.close_watch()
    libc.umount2(f"{live.row.place}/mnt", 0)
    with pytest.raises(VerificationFailed, match="no marker"):
        check_marker(live.marker_path, nonce=nonce)
    # Even a marker that somebody copied there does not make it a volume.
    Path(live.slots_path).mkdir()
    Path(live.marker_path).write_bytes(marker)
    with pytest.raises(VerificationFailed, match="nothing is mounted here"):
        check_marker(live.marker_path, nonce=nonce)


def test_kubernetes_92299_a_volume_that_nobody_ever_unpublished_is_erased_at_the_next_start(host: Host) -> None:
    live, consumer = host.in_use(host.tier("Fscrypt"))
    host.write_canary(consumer)
    consumer.kill()
    host.drop_guardians()
    libc.umount2(f"{live.row.place}/mnt", 0)  # as after a reboot: the path is a plain, empty directory
    assert os.listdir(f"{live.row.place}/mnt") == []
    host.node.ledger.note(live.volume_id, boot_id="11111111-2222-3333-4444-555555555555")
    [receipt] = host.recover().erased
    assert receipt.technique is Technique.KEY_LOST
    host.assert_nothing_left(live)


def test_calico_9279_another_mount_in_the_volumes_path_is_not_emptied(host: Host) -> None:
    """A removal through a mount emptied somebody's directory. Ours goes no further than the mount, and says so."""
    theirs = host.base / "theirs"
    theirs.mkdir()
    (theirs / "file").write_text("somebody's")
    live, consumer = host.in_use(host.tier("SealOnly"))
    os.mkdir(f"{live.slots_path}/below")
    libc.mount(str(theirs), f"{live.slots_path}/below", None, 4096, None)  # MS_BIND
    consumer.kill()
    seen = look(host.node, live)
    assert seen.receipt is None and "another mount begins here" in str(seen.error)
    assert (theirs / "file").read_text() == "somebody's"
    libc.umount2(f"{live.slots_path}/below", 0)
    assert look(host.node, live).receipt is not None
    assert (theirs / "file").read_text() == "somebody's"


def test_vllm_54002_51317_a_crashed_engine_that_left_its_region_can_start_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`O_CREAT | O_EXCL` on a name that is the same after each restart: one report counts 70 restarts. Here three."""
    seen = host.base / "seen"
    look_at = SharedMemoryWatch.look

    def looked(watch: SharedMemoryWatch, pid: int) -> bool:
        new = look_at(watch, pid)
        if watch.files:
            seen.touch()
        return new

    monkeypatch.setattr(SharedMemoryWatch, "look", looked)
    name = f"/dev/shm/vllm_offload_kvtier-test-{os.getpid()}.mmap"
    host.shared.append(Path(name))
    engine = (
        "import ctypes, os, signal, sys, time\n"
        f"fd = os.open({name!r}, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)\n"
        "os.ftruncate(fd, 1 << 20)\n"
        f"os.pwrite(fd, {CANARY!r}, 0)\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for _ in range(3):
        result = run_fenced(host.node, host.tier("SealOnly"), [sys.executable, "-c", engine])
        assert result.exit_code == 137, "the engine could not start again"
        assert result.receipt is not None
        assert [step.ok for step in result.receipt.steps if step.name == "shared-memory"] == [True]
        assert not os.path.exists(name)
        seen.unlink()
