"""`python -m kvtier_operator.drain wait|release`: what the chart's uninstall hooks run, before and after the controller goes.

`wait` deletes nothing and asks nobody to: it waits until no place can hold readable bytes, and says what it waits for.
`release` runs when no controller does, under the controllers' own Lease. It takes the finalizers off what is final, so that
namespaces and CRDs can be deleted without a controller, and leaves every other object held.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightkube import KubeConfig

from kvtier_api.errors import KvtierError, UsageError
from kvtier_operator import writing
from kvtier_operator.election import Election
from kvtier_operator.facts import Body, VolumeFacts, volume_facts
from kvtier_operator.fence import Fence
from kvtier_operator.kinds import EVERYWHERE, LEASES, TIERS, VOLUMES
from kvtier_operator.kube import Kube
from kvtier_operator.metrics import Metrics
from kvtier_operator.names import FINALIZER
from kvtier_operator.problems import ApiProblem, Conflict, Missing, Refused

__all__ = ["CONFIRMATION", "main"]

CONFIRMATION: Final = "leave unerased places"
_CONFIRM_ENV: Final = "KVTIER_DRAIN_CONFIRM"
_POLL_S: Final = 2.0
_LISTED: Final = 20
_TRIES: Final = 5


@dataclass(frozen=True)
class _Options:
    command: str
    namespaces: tuple[str, ...]
    timeout_s: float
    confirm: str
    lease_namespace: str
    lease_name: str
    kubeconfig: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 where something is left, or a KvtierError's own."""
    try:
        options = _parse(arguments)
        work = _wait(options) if options.command == "wait" else _release(options)
        return asyncio.run(asyncio.wait_for(work, options.timeout_s + 20))
    except TimeoutError:
        print(
            "error: the API server did not answer in time; nothing was changed that is not said above", file=sys.stderr
        )
        return 1
    except KvtierError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parse(arguments: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(prog="kvtier_operator.drain", description="Before and after an uninstall.")
    parser.add_argument("command", choices=("wait", "release"))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--all-namespaces", action="store_true")
    where.add_argument("--namespace", action="append", default=[], metavar="NAME")
    parser.add_argument("--timeout", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument(
        "--confirm",
        default=os.environ.get(_CONFIRM_ENV, ""),
        metavar="TEXT",
        help=f"{CONFIRMATION!r}: do not wait; left out: ${_CONFIRM_ENV}",
    )
    parser.add_argument("--lease-namespace", default="", metavar="NAME")
    parser.add_argument("--lease-name", default="kvtier-controller", metavar="NAME")
    parser.add_argument("--kubeconfig", metavar="FILE", help="left out: the pod's service account, or $KUBECONFIG")
    found = parser.parse_args(arguments)
    if found.confirm not in ("", CONFIRMATION):
        raise UsageError("not the confirmation", obj=f"--confirm={found.confirm!r}", remedy=f"write {CONFIRMATION!r}")
    if found.command == "release" and not found.lease_namespace:
        raise UsageError("missing", obj="--lease-namespace", remedy="name the namespace of the controller's Lease")
    return _Options(
        found.command,
        tuple(found.namespace) or (EVERYWHERE,),
        found.timeout,
        found.confirm,
        found.lease_namespace,
        found.lease_name,
        found.kubeconfig,
    )


def _config(options: _Options) -> KubeConfig:
    return KubeConfig.from_file(options.kubeconfig) if options.kubeconfig else KubeConfig.from_env()


# -- wait


async def _wait(options: _Options) -> int:
    """0 once nothing is left, twice in a row; 1 after the time, with what is left."""
    kube = Kube(_config(options), Metrics())
    until = time.monotonic() + options.timeout_s
    said: list[str] = []
    empty = 0
    left: list[str] = ["nothing is known: the API server has not answered yet"]
    try:
        while True:
            try:
                left = await _left(kube, options.namespaces)
            except Refused:
                raise
            except ApiProblem as error:
                print(f"waiting for the API server: {error}", flush=True)
            else:
                empty = 0 if left else empty + 1
            if empty > 1:
                print("no place can hold readable bytes any more", flush=True)
                return 0
            if left != said:
                _say("waiting for", left)
                said = list(left)
            if options.confirm and left:
                _say(f"as confirmed ({options.confirm}), NOT waiting for", left)
                return 0
            if time.monotonic() > until:
                _say(f"after {options.timeout_s:g} s there is still", left)
                print(_REMEDY, flush=True)
                return 1
            await asyncio.sleep(min(_POLL_S, options.timeout_s))
    finally:
        await kube.close()


_REMEDY: Final = (
    "nothing was uninstalled. Delete the pods and tiers that are named, wait for their erasure, and uninstall again. A place that"
    " cannot be erased (its node is lost): kubectl annotate kvcv NAME kvtier.dev/abandon='who, and why'. To leave places as"
    " they are: docs/install.md, Uninstall"
)


def _say(what: str, left: Sequence[str]) -> None:
    if not left:
        return
    print(f"{what} {len(left)} object(s):", flush=True)
    for line in left[:_LISTED]:
        print(f"  {line}", flush=True)
    if len(left) > _LISTED:
        print(f"  and {len(left) - _LISTED} more", flush=True)


async def _left(kube: Kube, namespaces: Sequence[str]) -> list[str]:
    """What would be left un-erased, or held for ever, without the controller and the agents. Raises ApiProblem."""
    found = []
    for namespace in namespaces:
        for body in await _all(kube, VOLUMES, namespace):
            facts = volume_facts(body)
            if not facts.is_final:
                found.append(_volume_line(facts, body))
        for body in await _all(kube, TIERS, namespace):
            if body["metadata"].get("deletionTimestamp") and _is_held(body):
                found.append(f"tier {_key(body)}: its deletion is not finished")
    return sorted(found)


async def _all(kube: Kube, kind: object, namespace: str) -> list[Body]:
    try:
        return [body async for body in kube.list(kind, namespace)]
    except Missing:  # no CRD, no places
        return []


def _volume_line(facts: VolumeFacts, body: Body) -> str:
    consumer = (body.get("spec") or {}).get("consumer") or {}
    who = f"pod {consumer['podName']}" if consumer.get("podName") else f"process {consumer.get('pid', '?')}"
    state = facts.state.value if facts.state is not None else "not reported yet"
    return f"volume {facts.namespace}/{facts.name} of tier {facts.tier_name} on node {facts.node_name}: {state}, used by {who}"


def _key(body: Body) -> str:
    return f"{body['metadata'].get('namespace')}/{body['metadata']['name']}"


def _is_held(body: Body) -> bool:
    return FINALIZER in (body["metadata"].get("finalizers") or ())


# -- release


async def _release(options: _Options) -> int:
    """0 when everything that could be let go of was; 1 where something stays held, with what."""
    config, metrics = _config(options), Metrics()
    election_kube = Kube(config, metrics)
    election = Election(
        election_kube,
        namespace=options.lease_namespace,
        name=options.lease_name,
        identity=f"drain_{time.monotonic_ns():x}",
    )
    try:
        fence = await election.acquire()  # a controller that still ends gives it back first
        holding = asyncio.create_task(election.hold(fence))
        kube = Kube(config, metrics, fence)
        try:
            held = [line for namespace in options.namespaces for line in await _let_go_again(kube, namespace)]
        finally:
            await kube.close()
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
        await election.give_back()
        await _forget_lease(election_kube, options, fence)
    finally:
        await election_kube.close()
    _say("still held, because bytes behind it may be readable:", held)
    if not held:
        print("every finalizer of kvtier is taken off", flush=True)
    return 1 if held else 0


async def _let_go_again(kube: Kube, namespace: str) -> list[str]:
    """An agent that still runs writes too: what it changed is read again. Raises ApiProblem."""
    for _ in range(_TRIES - 1):
        try:
            return await _let_go(kube, namespace)
        except Conflict as error:
            print(f"read again: {error}", flush=True)
    return await _let_go(kube, namespace)


async def _let_go(kube: Kube, namespace: str) -> list[str]:
    volumes = [(volume_facts(body), body) for body in await _all(kube, VOLUMES, namespace)]
    held = [_volume_line(facts, body) for facts, body in volumes if not facts.is_final]
    busy = {facts.tier for facts, _ in volumes if not facts.is_final}
    for facts, _ in volumes:
        if facts.is_final and facts.held:
            await _patch(kube, VOLUMES, facts.key, writing.released(list(facts.finalizers), facts.version))
    for body in await _all(kube, TIERS, namespace):
        meta = body["metadata"]
        key = (str(meta["namespace"]), str(meta["name"]))
        if not _is_held(body):
            continue
        if key in busy:
            held.append(f"tier {'/'.join(key)}: it has volumes that are not erased")
            continue
        await _patch(kube, TIERS, key, writing.released(list(meta["finalizers"]), meta["resourceVersion"]))
    return held


async def _patch(kube: Kube, kind: object, key: tuple[str, str], patch: dict[str, object]) -> None:
    """Raises ApiProblem, and nothing where the object went meanwhile."""
    try:
        await kube.merge(kind, *key, patch)
    except Missing:
        return
    print(f"let go of {'/'.join(key)}", flush=True)


async def _forget_lease(kube: Kube, options: _Options, fence: Fence) -> None:
    """The Lease is the controllers' own, not the chart's: it would be left behind."""
    fence.close()
    try:
        lease = await kube.get(LEASES, options.lease_name, options.lease_namespace)
        meta = lease["metadata"]
        await kube.delete(
            LEASES, options.lease_namespace, options.lease_name, uid=meta["uid"], version=meta["resourceVersion"]
        )
    except (Missing, Conflict) as error:
        print(f"the Lease is somebody else's by now: {error}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
