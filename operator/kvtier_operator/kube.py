"""The one way to the API server: lists, gets, and writes behind the fence, with errors of `problems` and a count of each.

Plain dictionaries go in and come out. A client belongs to one event loop, and has a hundred connections.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Final, TypeVar

import httpx2
import msgspec
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.core.generic_client import BasicRequest
from lightkube.types import PatchType

from kvtier_api.missing_right import missing_right
from kvtier_operator.facts import Body
from kvtier_operator.fence import Fence
from kvtier_operator.kinds import EVERYWHERE, Kind
from kvtier_operator.listing import LIST_CHUNK, Change, Page, change, page
from kvtier_operator.metrics import Metrics
from kvtier_operator.names import FIELD_MANAGER
from kvtier_operator.problems import AlreadyThere, ApiProblem, Conflict, Gone, Missing, Refused, RightMissing

__all__ = ["Kube"]

AnswerT = TypeVar("AnswerT")
_TIMEOUT_S: Final = 4.0
_WATCH_S: Final = 300
_SILENT_S: Final = 150.0
"""A watch cache sends a bookmark a minute, if nothing else: a stream without one for longer leads nowhere."""
_LONGEST_WAIT_S: Final = 30.0
"""Of what a Retry-After says: one that a proxy made up must not stop a tier for a day."""


class Kube:
    """`fence` None: reads, and the writes of the election itself, which need no fence."""

    def __init__(self, config: KubeConfig, metrics: Metrics, fence: Fence | None = None) -> None:
        self._client = AsyncClient(config=config.get(), timeout=httpx2.Timeout(_TIMEOUT_S), field_manager=FIELD_MANAGER)
        self._metrics = metrics
        self._fence = fence

    async def close(self) -> None:
        await self._client.close()

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Body]:
        """All objects, as `pages` has them."""
        async for each in self.pages(kind, namespace, labels=labels, fields=fields):
            for item in each.items:
                yield item.body()

    async def pages(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        """All objects, in chunks, as the API server has them now (no resourceVersion: a quorum read). Raises ApiProblem."""
        selectors: dict[str, Any] = {}
        if labels:
            selectors["labelSelector"] = labels
        if fields:
            selectors["fieldSelector"] = fields
        selectors["limit"] = LIST_CHUNK
        while True:
            request = BasicRequest("GET", _url(kind, namespace), kind, params=dict(selectors))
            found = await self._send(request, "list", kind, page)
            yield found
            if not found.following:
                return
            selectors["continue"] = found.following

    async def watch(
        self, kind: Kind, namespace: str | None = None, *, since: str, labels: str = ""
    ) -> AsyncGenerator[Change, None]:
        """Changes after the version `since`, until the API server ends the stream, or is silent for too long.

        Raises Gone where `since` is no version to go on from, and ApiProblem.
        """
        params = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": since}
        params["timeoutSeconds"] = str(_WATCH_S)
        if labels:
            params["labelSelector"] = labels
        url = _url(kind, namespace)
        timeout = httpx2.Timeout(_TIMEOUT_S, read=_SILENT_S)
        adapter: Any = self._client._client
        request = adapter.build_adapter_request(BasicRequest("GET", url, kind, params=params, timeout=timeout))
        started = time.monotonic()
        code = "none"
        try:
            response = await adapter.send(request, stream=True)
            code = str(response.status_code)
        except httpx2.HTTPError as error:
            raise _problem(error, url) from error
        finally:
            self._metrics.api_request("watch", kind.__name__, code, time.monotonic() - started)
        try:
            if response.is_error:
                await response.aread()
                adapter.raise_for_status(response)
            rest = b""
            async for chunk in response.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    found = change(line)
                    if found.type == "ERROR":
                        raise Gone(found.message, obj=url, code=found.code, remedy="listed anew")
                    yield found
        except httpx2.ReadTimeout:
            return
        except (httpx2.HTTPError, ValueError, msgspec.MsgspecError) as error:
            raise _problem(error, url) from error
        finally:
            await response.aclose()

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Body:
        return await self._get(f"{_url(kind, namespace)}/{name}", {}, "get", kind)

    async def is_served(self, kind: Kind, namespace: str | None = None) -> bool:
        """Whether the API server knows the kind."""
        try:
            await self._get(_url(kind, namespace), {"limit": 1}, "list", kind)
        except Missing:
            return False
        return True

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        namespace = body["metadata"]["namespace"]
        return await self._write("create", "POST", _url(kind, namespace), kind, body, "application/json")

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """With the body's resourceVersion as the precondition. Raises Conflict."""
        meta = body["metadata"]
        url = f"{_url(kind, meta['namespace'])}/{meta['name']}"
        return await self._write("update", "PUT", url, kind, body, "application/json")

    async def apply_status(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Server-side apply of the status. uid and resourceVersion in the body are preconditions. Raises Conflict."""
        meta = body["metadata"]
        url = f"{_url(kind, meta['namespace'])}/{meta['name']}/status"
        return await self._write("apply", "PATCH", url, kind, body, PatchType.APPLY.value, {"force": "true"})

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Body:
        url = f"{_url(kind, namespace)}/{name}"
        return await self._write("patch", "PATCH", url, kind, patch, PatchType.MERGE.value)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str, version: str) -> None:
        """This very object in this very version, or nothing. Raises Conflict, Missing."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid, "resourceVersion": version},
            "propagationPolicy": "Background",
        }
        url = f"{_url(kind, namespace)}/{name}"
        await self._write("delete", "DELETE", url, kind, options, "application/json")

    async def _get(self, url: str, params: Mapping[str, Any], verb: str, kind: Kind) -> dict[str, Any]:
        return await self._send(BasicRequest("GET", url, kind, params=dict(params)), verb, kind, _object)

    async def _write(  # noqa: PLR0917
        self,
        verb: str,
        method: str,
        url: str,
        kind: Kind,
        body: Mapping[str, Any],
        content_type: str,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        if self._fence is not None:
            self._fence.check()
        query = {"fieldManager": FIELD_MANAGER, **(params or {})} if method != "DELETE" else {}
        request = BasicRequest(method, url, kind, params=query, data=dict(body), headers={"Content-Type": content_type})
        return await self._send(request, verb, kind, _object)

    async def _send(self, request: BasicRequest, verb: str, kind: Kind, decode: Callable[[bytes], AnswerT]) -> AnswerT:
        # lightkube's adapter signs, refreshes tokens and decodes; its public calls know no delete with preconditions.
        adapter: Any = self._client._client
        started = time.monotonic()
        code = "none"
        try:
            response = await adapter.send(adapter.build_adapter_request(request))
            code = str(response.status_code)
            adapter.raise_for_status(response)
            return decode(response.content)
        except (httpx2.HTTPError, ValueError, msgspec.MsgspecError) as error:
            raise _problem(error, request.url) from error
        finally:
            self._metrics.api_request(verb, kind.__name__, code, time.monotonic() - started)


def _object(text: bytes) -> dict[str, Any]:
    answer = msgspec.json.decode(text)
    return answer if isinstance(answer, dict) else {}


def _url(kind: Kind, namespace: str | None) -> str:
    info = kind._api_info
    resource = info.resource
    root = f"apis/{resource.group}/{resource.version}" if resource.group else f"api/{resource.version}"
    where = f"/namespaces/{namespace}" if namespace not in (None, EVERYWHERE) else ""
    return f"{root}{where}/{info.plural}"


def _problem(error: Exception, obj: str) -> ApiProblem:
    if not isinstance(error, httpx2.HTTPStatusError):
        text = str(error) or type(error).__name__
        return ApiProblem(f"no answer from the API server: {text}", obj=obj, remedy="tried again")
    code = error.response.status_code
    text = str(error)
    if code == 404:
        return Missing(text, obj=obj, code=code)
    if code == 409:
        status = error.status if isinstance(error, ApiError) else None
        there = status is not None and status.reason == "AlreadyExists"
        return (AlreadyThere if there else Conflict)(text, obj=obj, code=code)
    if code == 410:
        return Gone(text, obj=obj, code=code, remedy="listed anew")
    if code in (400, 401, 403, 405, 413, 415, 422):
        kind = RightMissing if code == 403 and missing_right(text) else Refused
        return kind(text, obj=obj, code=code, remedy="see the roles and the version of the CRDs")
    try:
        wait_s = min(float(error.response.headers.get("Retry-After", "0")), _LONGEST_WAIT_S)
    except ValueError:  # an HTTP date; the back-off is enough
        wait_s = 0
    return ApiProblem(text, obj=obj, code=code, retry_after_s=wait_s, remedy="tried again")
