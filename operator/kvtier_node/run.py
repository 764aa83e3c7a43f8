"""`kvtier run`: the fence around one process. A volume before it, its paths in its environment, erasure after it.

The command starts only after its volume is erased-clean, encrypted, measured and on record with the command's own pid. The
volume is erased when the command and everything it forked has let go of it. Signals reach the command; its exit code is returned.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from kvtier_api.erasure import Trigger
from kvtier_api.errors import EraseIncomplete, KernelError, KvtierError, LedgerError, UsageError
from kvtier_api.marker import check_marker
from kvtier_api.tier import KVCacheTier
from kvtier_node.consumers import ProcessConsumer
from kvtier_node.erasing import Death, erase
from kvtier_node.guarding import LOOK_S, fulfil_requests, look, observe
from kvtier_node.kernel.refusal import refused
from kvtier_node.live import LiveVolume
from kvtier_node.lost_mounts import LOST, has_lost_mount
from kvtier_node.node import Node
from kvtier_node.places import MOUNT_NAME
from kvtier_node.provisioning import provision, start
from kvtier_node.receipts import Receipt
from kvtier_node.recovery import usage
from kvtier_node.slots import slot_names

__all__ = ["RunResult", "run_fenced", "said_if_slow"]

_FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SAY_AFTER_S: Final = 1.0
_SAY_AGAIN_S: Final = 60.0
_RETRY_FOR_S: Final = 600.0
_LONGEST_PAUSE_S: Final = 10.0


@dataclass
class RunResult:
    """The command's exit code as a shell gives it (128 + signal), the receipt, or why there is none yet."""

    exit_code: int
    receipt: Receipt | None
    error: KvtierError | None
    volume_id: str


def environment(live: LiveVolume, tier: KVCacheTier, rank: int | None) -> dict[str, str]:
    """What a consumer is told. No secret: the nonce only ties the process to its volume."""
    prefix = tier.spec.slot_prefix
    told = {
        "KVTIER_MARKER": live.marker_path,
        "KVTIER_NONCE": str(live.row.facts["nonce"]),
        "KVTIER_SLOT_DIR": live.slots_path,
        "KVTIER_SLOT_PREFIX": f"{live.slots_path}/{prefix}",
        "KVTIER_TIER": live.row.tier_key,
        "KVTIER_VOLUME_ID": live.volume_id,
    }
    if rank is not None:
        told["KVTIER_SLOT_FILE"] = f"{live.slots_path}/{slot_names(prefix, tier.spec.ranks)[rank]}"
    return told


def rank_of(tier: KVCacheTier, variable: str | None, env: Mapping[str, str]) -> int | None:
    """The rank that `variable` of `env` holds, checked against the tier; None without a variable. Raises UsageError."""
    if variable is None:
        return None
    text = env.get(variable)
    if text is None or not text.isdecimal() or int(text) >= tier.spec.ranks:
        raise UsageError(
            f"holds {text!r}" if text is not None else "is not set",
            obj=f"--rank-env {variable}",
            remedy=f"name a variable that holds a rank from 0 to {tier.spec.ranks - 1} (spec.ranks is {tier.spec.ranks})",
        )
    return int(text)


@dataclass
class _Asked:
    """Whether a signal came after the command had ended: it is meant for us then."""

    to_leave: bool = False


@contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[_Asked]:
    """Pass signals on to the command. SIGINT reaches it by itself: the terminal sends it to the whole group."""
    asked = _Asked()

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        if process.poll() is not None:
            asked.to_leave = True
        elif number != signal.SIGINT:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (*_FORWARDED, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_fenced(
    node: Node,
    tier: KVCacheTier,
    command: Sequence[str],
    *,
    rank_env: str | None = None,
    uid: int | None = None,
    gid: int | None = None,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    on_started: Callable[[LiveVolume, int], None] | None = None,
) -> RunResult:
    """Provision, run `command`, erase. `say` gets sentences for a person; `on_started` the volume and the pid.

    Raises what `provision` raises, before anything was started, and UsageError for a bad rank.
    """
    base = dict(os.environ if env is None else env)
    rank = rank_of(tier, rank_env, base)
    uid, gid = os.geteuid() if uid is None else uid, os.getegid() if gid is None else gid
    live = provision(node, tier, uid=uid, gid=gid)
    try:
        process, gate = _launch(command, base | environment(live, tier, rank), uid, gid)
        try:
            with _signals_to(process) as asked:
                start(node, live, ProcessConsumer.of(process.pid))
                check_marker(live.marker_path, nonce=str(live.row.facts["nonce"]))
                os.write(gate, b"g")
                os.close(gate)
                gate = -1
                say(f"volume {live.volume_id} ({live.row.backend}) is ready; {command[0]} runs as pid {process.pid}")
                if on_started is not None:
                    on_started(live, process.pid)
                return _until_erased(node, live, process, say, asked)
        finally:
            if gate >= 0:  # never opened: the launcher ends without having become the command
                os.close(gate)
                process.wait()
    except BaseException:
        if not live.row.is_terminal:
            _give_up(node, live, say)
        raise


def _launch(command: Sequence[str], env: dict[str, str], uid: int, gid: int) -> tuple[subprocess.Popen[bytes], int]:
    """The launcher, waiting at its gate, and the gate's other end."""
    reader, gate = os.pipe2(os.O_CLOEXEC)
    try:
        argv = [sys.executable, "-I", "-m", "kvtier_node.children.launch", str(reader), str(uid), str(gid), *command]
        return subprocess.Popen(argv, env=env, pass_fds=[reader]), gate
    except BaseException:
        os.close(gate)
        raise
    finally:
        os.close(reader)


def pauses_s() -> Iterator[float]:
    """Seconds between two tries of an erasure that fails: each is work for the kernel, and perhaps for a disk."""
    pause_s = LOOK_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _until_erased(
    node: Node, live: LiveVolume, process: subprocess.Popen[bytes], say: Callable[[str], None], asked: _Asked
) -> RunResult:
    death: Death | None = None
    said_at = 0.0
    code = 0
    pauses = pauses_s()
    while True:
        if death is None:
            trouble = _while_it_runs(node, live)
            if trouble and time.monotonic() > said_at:
                say(f"{live.volume_id}: {trouble}")
                said_at = time.monotonic() + _SAY_AGAIN_S
            code_now = _exit_code(process, LOOK_S)
            if code_now is None:
                continue
            code, death, said_at = code_now, Death.now(), time.monotonic() + _SAY_AFTER_S
        if _has_ended(node, live):
            return RunResult(code, _receipt_of(node, live), None, live.volume_id)
        with said_if_slow(say, f"erasing {live.volume_id}"):
            seen = look(node, live, trigger=Trigger.CRASH if process.returncode < 0 else Trigger.EXIT, death=death)
        if seen.receipt is not None:
            return RunResult(code, seen.receipt, None, live.volume_id)
        if asked.to_leave or (seen.error is not None and time.monotonic() - death.monotonic > _RETRY_FOR_S):
            error = _whole(seen.error or EraseIncomplete(seen.why), live)
            say(f"{live.volume_id} stays on record until it is erased: {error}")
            live.close_watch()
            live.guardian.close()
            return RunResult(code, None, error, live.volume_id)
        if time.monotonic() > said_at:
            say(f"waiting to erase {live.volume_id}: {seen.error or seen.why}")
            said_at = time.monotonic() + _SAY_AGAIN_S
        if seen.in_use:
            death = Death.now()  # a forked child still holds a slot file: the consumer has not ended yet
        if seen.error is None:
            pauses = pauses_s()
        _wait(next(pauses) if seen.error is not None else LOOK_S, asked)


def _wait(pause_s: float, asked: _Asked) -> None:
    """For so long, or until we are asked to leave."""
    until = time.monotonic() + pause_s
    while (left := until - time.monotonic()) > 0 and not asked.to_leave:
        time.sleep(min(left, LOOK_S))


@contextmanager
def said_if_slow(say: Callable[[str], None], text: str) -> Iterator[None]:
    """Say what is done while it takes longer than a person waits in silence: overwriting takes as long as it takes."""
    timer = threading.Timer(_SAY_AFTER_S, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _whole(error: KvtierError, live: LiveVolume) -> KvtierError:
    """With an object and a remedy, where the failure came without."""
    error.obj = error.obj or live.row.place
    error.remedy = error.remedy or (
        "'kvtier node', or the next start of 'kvtier run', tries again; 'kvtier erase --abandon' ends it without a claim"
    )
    return error


def _while_it_runs(node: Node, live: LiveVolume) -> KvtierError | None:
    """One round beside the running command. What fails is told and tried again: the fence must outlive a busy ledger."""
    try:
        fulfil_requests(node, [live])
        if live.watch is not None:
            live.watch.refresh()
        observe(node, live)
        if has_lost_mount(live.row):
            return KernelError(
                LOST,
                obj=f"{live.row.place}/{MOUNT_NAME}",
                remedy="somebody unmounted it: end the command; what it has open goes on, and is erased with its end",
            )
    except KvtierError as error:
        return error
    except OSError as error:
        return refused(error, live.row.place)
    return None


def _has_ended(node: Node, live: LiveVolume) -> bool:
    """Whether the volume ended by another way, such as a request to erase it."""
    try:
        live.row = node.ledger.get(live.volume_id)
    except LedgerError:
        return False  # the look that follows meets it too, and says so
    return live.row.is_terminal


def _exit_code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    return 128 - code if code < 0 else code


def _receipt_of(node: Node, live: LiveVolume) -> Receipt | None:
    found = [receipt for receipt in node.ledger.receipts() if receipt.volume_id == live.volume_id]
    return found[-1] if found else None


def _give_up(node: Node, live: LiveVolume, say: Callable[[str], None]) -> None:
    """Something failed. Erase if nobody uses the volume; otherwise leave it to `kvtier node`, or to the next start."""
    try:
        if usage(node, live).alive:
            say(f"{live.volume_id} is still in use; 'kvtier node' takes it over")
        else:
            erase(node, live, Trigger.EXIT)
    except (KvtierError, OSError) as error:
        say(f"{live.volume_id} stays on record until it is erased: {error}")
    finally:
        live.close_watch()
        live.guardian.close()
