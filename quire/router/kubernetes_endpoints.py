"""KubernetesEndpoints: the endpoints of a Service, over the API server, as a Discovery.

Lists the EndpointSlices of the Service, then watches them, and lists them anew after a watch has
ended or a version has expired. Signs in with the service account of the router's pod; the token is
read again for each request, since it is rotated. Needs the rights `list` and `watch` on
`endpointslices`. Always holds: while the API server cannot be reached the last list stays.
"""

from __future__ import annotations

import asyncio
import math
import os
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from quire.base.errors import QuireError, SettingError
from quire.base.log import Log
from quire.base.server_url import ServerUrl, server_url
from quire.router.endpoint_slices import (
    EndpointSlice,
    EndpointSlices,
    Metadata,
    SliceList,
    WatchEvent,
)
from quire.router.faults import ReplicaFault, StaleConnection
from quire.router.http_client import ConnectionPool, Exchange
from quire.router.route_file import KubernetesTable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_GONE = 410
_PAGE = 500
_WATCH_S = 300
# Beyond the time that the API server was asked to watch, its silence is a broken connection.
_SILENCE_S = _WATCH_S + 30
_ANSWER_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MAX_LINE_BYTES = 8 << 20
_T = TypeVar("_T")


class ApiServerFault(QuireError):
    """The API server refused, or sent what cannot be read."""


class VersionGone(ApiServerFault):
    """The version to go on from has expired: list anew."""


class KubernetesEndpoints:
    """account: the directory with token, ca.crt and namespace of the service account. api_server:
    its address; None for that in the environment of a pod. wait: returns after so many seconds."""

    def __init__(
        self,
        table: KubernetesTable,
        log: Log,
        *,
        account: Path = ACCOUNT,
        api_server: ServerUrl | None = None,
        wait: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._log = log
        self._account = account
        url = api_server or _api_server(os.environ)
        self._host = url.authority
        self._pool = ConnectionPool(url, 5.0, tls=_trust(account) if url.is_secure else None)
        self._slices = EndpointSlices(table.port, is_secure=table.secure)
        self._service = table.service
        namespace = table.namespace or _text(account / "namespace")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
        self._urls: tuple[ServerUrl, ...] = ()
        self._version = ""
        self._said = ""
        self._wait = wait
        _text(account / "token")  # fail at the start, not in the watch

    def poll(self) -> tuple[ServerUrl, ...]:
        """Return the addresses as of the last event."""
        return self._urls

    async def read(self) -> bool:
        """List the slices; return whether the addresses have changed."""
        try:
            await self._list()
        except (ApiServerFault, ReplicaFault, TimeoutError) as error:
            self._warn(str(error) or "it did not answer in time")
        return self._take()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Follow the slices until cancelled."""
        pause_s, loop = _FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            followed_from_s = math.inf
            try:
                if not self._version:
                    await self._list()
                    if self._take():
                        changed()
                exchange = await self._open_watch()
                followed_from_s = loop.time()
                await self._follow(exchange, changed)
            except VersionGone:
                self._version = ""
            except (ApiServerFault, ReplicaFault, TimeoutError) as error:
                self._version = ""
                self._warn(str(error) or "it did not answer in time")
            # However it ended: a watch that lasted is no failure. An answer that did not come is
            # one, however long it was waited for.
            lasted_s = loop.time() - followed_from_s
            if lasted_s > pause_s:
                pause_s = _FIRST_PAUSE_S
            if lasted_s > _LONGEST_PAUSE_S:
                continue
            await self._wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take(self) -> bool:
        before, self._urls = self._urls, self._slices.urls()
        if missing := self._slices.missing_port():
            self._warn(missing)
        return before != self._urls

    async def _list(self) -> None:
        found: list[EndpointSlice] = []
        go_on, version = "", ""
        while True:
            query = {"labelSelector": f"kubernetes.io/service-name={self._service}"}
            query |= {"limit": str(_PAGE)} | ({"continue": go_on} if go_on else {})
            async with asyncio.timeout(_ANSWER_S):
                exchange = await self._get(query)
                try:
                    body = await exchange.body()
                finally:
                    exchange.close()
            page = _decoded(body, SliceList)
            found += page.items
            version, go_on = page.metadata.resource_version, page.metadata.go_on
            if not go_on:
                break
        self._slices.replace(found)
        self._version, self._said = version, ""

    async def _open_watch(self) -> Exchange:
        """Return a watch that goes on from the last version."""
        query = {
            "labelSelector": f"kubernetes.io/service-name={self._service}",
            "watch": "1",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
            "resourceVersion": self._version,
        }
        async with asyncio.timeout(_ANSWER_S):
            return await self._get(query)

    async def _follow(self, exchange: Exchange, changed: Callable[[], None]) -> None:
        """Apply the events of a watch until it ends."""
        try:
            rest = b""
            async with asyncio.timeout(_SILENCE_S):
                while received := await exchange.read():
                    *lines, rest = (rest + received).split(b"\n")
                    if len(rest) > _MAX_LINE_BYTES:
                        raise ApiServerFault("an event of the watch is too long")
                    for line in filter(None, lines):
                        self._apply(line)
                    if lines and self._take():
                        changed()
        finally:
            exchange.close()

    def _apply(self, line: bytes) -> None:
        event = _decoded(line, WatchEvent)
        if event.kind == "ERROR":
            status = _decoded(bytes(event.raw), _Status)
            if status.code == _GONE:
                raise VersionGone(status.message)
            raise ApiServerFault(f"the watch failed: {status.code} {status.message}")
        if event.kind == "BOOKMARK":
            metadata = _decoded(bytes(event.raw), _Bookmark).metadata
        else:
            changed = _decoded(bytes(event.raw), EndpointSlice)
            metadata = changed.metadata
            self._slices.apply(event.kind, changed)
        self._version = metadata.resource_version or self._version

    async def _get(self, query: Mapping[str, str]) -> Exchange:
        """Return an exchange with status 200. Raises ApiServerFault and ReplicaFault."""
        try:
            token = _text(self._account / "token")
        except SettingError as error:  # while it is rotated
            raise ApiServerFault(str(error)) from error
        headers = [
            (b"host", self._host),
            (b"accept", b"application/json"),
            (b"authorization", b"Bearer " + token.encode()),
        ]
        path = f"{self._path}?{urlencode(query)}".encode()
        for is_fresh in (False, True):
            exchange = await self._pool.send(b"GET", path, headers, b"", is_fresh=is_fresh)
            try:
                await exchange.head()
                body = b"" if exchange.status == 200 else await exchange.body()
            except StaleConnection:
                continue
            except BaseException:  # at a time limit, too: nothing else closes its connection
                exchange.close()
                raise
            if exchange.status == 200:
                return exchange
            exchange.close()
            if exchange.status == _GONE:
                raise VersionGone("the version has expired")
            message = _message_of(body)
            if exchange.status in (401, 403):
                message += "; bind the rights list and watch on endpointslices to the account"
            raise ApiServerFault(f"the API server answers {exchange.status}: {message}")
        raise ApiServerFault("the API server closes each connection")

    def _warn(self, reason: str) -> None:
        """Log a reason once."""
        if reason != self._said:
            self._log.warning("Kubernetes endpoints", reason=reason, kept=len(self._urls))
        self._said = reason


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Bookmark(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)


def _decoded(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiServerFault(f"the API server sent what cannot be read ({error})") from error


def _message_of(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Status).message[:300]
    except (msgspec.MsgspecError, UnicodeError):
        return "no reason is given"


def _api_server(environment: Mapping[str, str]) -> ServerUrl:
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    port = environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingError(
            "[kubernetes] needs KUBERNETES_SERVICE_HOST, which a pod has; run the router in the "
            "cluster, or use replicas or replicas-file"
        )
    return server_url(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


def _trust(account: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except (OSError, ssl.SSLError) as error:
        raise SettingError(f"[kubernetes] {account / 'ca.crt'} cannot be read: {error}") from error
    # By default Python 3.13 and later refuse certificates without the key identifiers of RFC 5280,
    # which CAs of older clusters and of EKS lack. The chain and the host name stay checked.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"[kubernetes] {path} cannot be read ({error}); let the pod mount the token of its "
            "service account"
        ) from error
