"""What cluster tests say to the API server, and the objects that a node agent would write there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx2

__all__ = ["Api", "Refused", "micro_now", "node", "tier", "volume", "volume_status"]

GROUP = "/apis/kvtier.dev/v1alpha1"
Json = dict[str, Any]
_INFO = ("architecture", "containerRuntimeVersion", "kernelVersion", "kubeProxyVersion", "kubeletVersion")


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Api:
    """One namespace of one control plane, as one user."""

    def __init__(self, client: httpx2.Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    def request(self, method: str, path: str, **arguments: Any) -> Json:
        answer = self.client.request(method, path, **arguments)
        until = time.monotonic() + 60
        while (
            answer.status_code == 429 and method == "GET" and time.monotonic() < until
        ):  # a server that has just started
            time.sleep(0.5)
            answer = self.client.request(method, path, **arguments)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json().get("message", "") if answer.content else "")
        found: Json = answer.json()
        return found

    def path(self, plural: str, name: str = "", *, sub: str = "") -> str:
        if plural in ("nodes", "namespaces"):
            root = "/api/v1"
        elif plural in ("pods", "events-core"):
            root = f"/api/v1/namespaces/{self.namespace}"
        elif plural == "events":
            root = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}"
        elif plural == "leases":
            root = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}"
        else:
            root = f"{GROUP}/namespaces/{self.namespace}"
        return "/".join(part for part in (root, plural, name, sub) if part)

    def create(self, plural: str, body: Json) -> Json:
        """The object, and its status where the body has one: a status is written by its own subresource."""
        status = body.get("status")
        made = self.request("POST", self.path(plural), json={k: v for k, v in body.items() if k != "status"})
        return made if status is None else self.set_status(plural, made["metadata"]["name"], status)

    def get(self, plural: str, name: str) -> Json:
        return self.request("GET", self.path(plural, name))

    def find(self, plural: str, name: str) -> Json | None:
        try:
            return self.get(plural, name)
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def list(self, plural: str) -> list[Json]:
        found: list[Json] = self.request("GET", self.path(plural))["items"]
        return found

    def merge(self, plural: str, name: str, patch: Json, *, sub: str = "") -> Json:
        headers = {"Content-Type": "application/merge-patch+json"}
        return self.request("PATCH", self.path(plural, name, sub=sub), json=patch, headers=headers)

    def set_status(self, plural: str, name: str, status: Json) -> Json:
        return self.merge(plural, name, {"status": status}, sub="status")

    def delete(self, plural: str, name: str) -> None:
        self.request("DELETE", self.path(plural, name))


def micro_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def tier(name: str, **spec: Any) -> Json:
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": name},
        "spec": {"sizePerRank": "1Gi", "ranks": 2, "path": "/var/lib/kvtier/tiers/a", **spec},
    }


def volume(
    of: Mapping[str, Any], node_name: str = "node-a", *, name: str = "", finalizer: bool = True, **spec: Any
) -> Json:
    """As the agent of `node_name` writes it for a tier (an object that exists): owned by the tier, held by the finalizer."""
    meta = of["metadata"]
    owner = {"apiVersion": of["apiVersion"], "kind": of["kind"], "name": meta["name"], "uid": meta["uid"]}
    name = name or f"kvv-{secrets.token_hex(10)}"
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheVolume",
        "metadata": {
            "name": name,
            "ownerReferences": [owner],
            "finalizers": ["kvtier.dev/erase"] if finalizer else [],
        },
        "spec": {
            "tierRef": {"name": meta["name"], "uid": meta["uid"]},
            "nodeName": node_name,
            "path": f"{of['spec']['path']}/{name}",
            "backend": "Fscrypt",
            "sizePerRank": of["spec"]["sizePerRank"],
            "ranks": of["spec"]["ranks"],
            "consumer": {"podUid": "0a1b", "podName": "pod-a", "uid": 1000, "gid": 1000},
            **spec,
        },
    }


def volume_status(state: str, boot_id: str = "boot-1", conditions: Mapping[str, tuple[str, str]] | None = None) -> Json:
    """What an agent measured. `conditions`: type to (status, reason)."""
    said = {
        "Provisioned": ("True", "Provisioned"),
        "Encrypted": ("True", "KernelKeyMeasured"),
        "SaltEnforced": ("True", "SaltRequired"),
        "RetentionEnforced": ("True", "SlotsSampledSealed"),
        "Scrubbed": ("True", "NothingLeft"),
        "HostHardened": ("True", "HostHardened"),
        **(conditions or {}),
    }
    found: Json = {
        "state": state,
        "stateSince": micro_now(),
        "bootId": boot_id,
        "conditions": [
            {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": f"{type_} as measured",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
            for type_, (status, reason) in said.items()
        ],
    }
    if state == "Erased":
        found["lastReceipt"] = {"id": secrets.token_hex(8), "hash": secrets.token_hex(32), "time": micro_now()}
        found["residualBytes"] = 0
    return found


def node(name: str, *, ready: str = "True", boot_id: str = "boot-1", system_uuid: str = "machine-1") -> Json:
    info = dict.fromkeys((*_INFO, "operatingSystem", "osImage"), "")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "nodeInfo": {**info, "bootID": boot_id, "systemUUID": system_uuid, "machineID": "m"},
        },
    }
