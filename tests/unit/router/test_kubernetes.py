"""Kubernetes: endpoints of a Service are listed and watched, before a fake API server."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.server_url import server_url
from quire.router.kubernetes_endpoints import KubernetesEndpoints, _trust
from quire.router.route_file import KubernetesTable

TABLE = KubernetesTable(service="quire", port="http")


def _slice(name: str, *addresses: str, version: str = "1", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "resourceVersion": version},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [one], "conditions": {"ready": True}} for one in addresses],
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
        **more,
    }


class FakeApiServer:
    """Answers lists from `slices`, and streams to each watch what `send` is given. is_silent:
    requests are read and never answered."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = "10"
        self.page = 500
        self.status = 200
        self.is_silent = False
        self.num_connections = 0
        self.queries: list[dict[str, str]] = []
        self.heads: list[str] = []
        self.watches: list[asyncio.Queue[bytes | None]] = []
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    def send(self, kind: str, changed: dict[str, Any]) -> None:
        """Send an event to the newest watch."""
        self.watches[-1].put_nowait(json.dumps({"type": kind, "object": changed}).encode() + b"\n")

    @property
    def num_open(self) -> int:
        """Connections that the client has not closed."""
        return len(self._writers)

    @property
    def lists(self) -> list[dict[str, str]]:
        return [one for one in self.queries if "watch" not in one]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                if not self.is_silent:
                    await self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        self.heads.append(head)
        query = {
            key: values[0] for key, values in parse_qs(urlsplit(head.split(" ")[1]).query).items()
        }
        self.queries.append(query)
        if self.status != 200:
            _whole(writer, self.status, {"code": self.status, "message": "forbidden: no rights"})
        elif "watch" in query:
            queue: asyncio.Queue[bytes | None] = asyncio.Queue()
            self.watches.append(queue)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while (line := await queue.get()) is not None:
                half = len(line) // 2
                for part in (line[:half], line[half:]):  # cut anywhere
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            start = int(query.get("continue", "0"))
            end = start + self.page
            metadata = {"resourceVersion": self.version}
            if end < len(self.slices):
                metadata["continue"] = str(end)
            _whole(writer, 200, {"metadata": metadata, "items": self.slices[start:end]})
        await writer.drain()


def _whole(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(raw), raw))


def _account(folder: Path) -> Path:
    (folder / "token").write_text("secret-1\n")
    (folder / "namespace").write_text("models")
    return folder


Story = Callable[[FakeApiServer, KubernetesEndpoints], Awaitable[None]]


def _run(folder: Path, story: Story, table: KubernetesTable = TABLE, said: Any = None) -> None:
    async def go() -> None:
        fake = FakeApiServer()
        await fake.start()
        endpoints = KubernetesEndpoints(
            table,
            Log("router", said or io.StringIO()),
            account=_account(folder),
            api_server=server_url(f"http://127.0.0.1:{fake.port}"),
            wait=lambda seconds: asyncio.sleep(0.001),
        )
        try:
            async with asyncio.timeout(20):
                await story(fake, endpoints)
        finally:
            fake.stop()
            await asyncio.sleep(0.01)

    asyncio.run(go())


def _shown(endpoints: KubernetesEndpoints) -> list[str]:
    return [one.shown for one in endpoints.poll()]


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_slices_of_all_pages_are_listed_with_the_account_s_token(tmp_path: Path) -> None:
    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        fake.page = 2
        fake.slices = [_slice(f"s{at}", f"10.0.0.{at}", "10.0.0.1") for at in range(1, 6)]
        assert await endpoints.read()
        assert _shown(endpoints) == [f"http://10.0.0.{at}:8000" for at in range(1, 6)]
        assert not await endpoints.read()
        path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?"
        assert fake.heads[0].startswith(f"GET {path}")
        assert "authorization: Bearer secret-1\r\n" in fake.heads[0]
        assert fake.queries[0]["labelSelector"] == "kubernetes.io/service-name=quire"
        (tmp_path / "token").write_text("secret-2")
        await endpoints.read()
        assert "authorization: Bearer secret-2\r\n" in fake.heads[-1], "tokens are rotated"

    _run(tmp_path, story)


def test_changes_arrive_by_the_watch(tmp_path: Path) -> None:
    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        changes: list[int] = []
        fake.slices = [_slice("a", "10.0.0.1")]
        watching = asyncio.ensure_future(endpoints.watch(lambda: changes.append(1)))
        await _until(lambda: bool(fake.watches))
        assert _shown(endpoints) == ["http://10.0.0.1:8000"]
        fake.send("ADDED", _slice("b", "10.0.0.2", version="11"))
        await _until(lambda: len(endpoints.poll()) == 2)
        gone = _slice("b", "10.0.0.2", version="12")
        gone["endpoints"][0]["conditions"] = {"ready": False}
        fake.send("MODIFIED", gone)
        await _until(lambda: len(endpoints.poll()) == 1)
        fake.send("DELETED", _slice("a", "10.0.0.1", version="13"))
        await _until(lambda: not endpoints.poll())
        assert len(changes) == 4
        fake.send("BOOKMARK", {"metadata": {"resourceVersion": "20"}})
        fake.watches[-1].put_nowait(None)  # the server ends the watch
        await _until(lambda: len(fake.watches) == 2)
        assert fake.queries[-1]["resourceVersion"] == "20", "it goes on where it was"
        assert len(fake.lists) == 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    _run(tmp_path, story)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"ERROR","object":{"code":410,"message":"too old"}}\n',
        b'{"type":"ERROR","object":{"code":500,"message":"broken"}}\n',
        b"half of a l\n",
        b'{"type":"ADDED","object":{"endpoints":7}}\n',
    ],
)
def test_a_watch_that_fails_is_listed_anew(tmp_path: Path, line: bytes) -> None:
    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        fake.slices = [_slice("a", "10.0.0.1")]
        watching = asyncio.ensure_future(endpoints.watch(lambda: None))
        await _until(lambda: bool(fake.watches))
        fake.slices = [_slice("a", "10.0.0.7")]
        fake.watches[-1].put_nowait(line)
        await _until(lambda: _shown(endpoints) == ["http://10.0.0.7:8000"])
        assert len(fake.lists) == 2
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    _run(tmp_path, story)


def test_the_last_list_stays_while_the_api_server_is_away(tmp_path: Path) -> None:
    said = io.StringIO()

    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        fake.slices = [_slice("a", "10.0.0.1")]
        watching = asyncio.ensure_future(endpoints.watch(lambda: None))
        await _until(lambda: bool(fake.watches))
        fake.stop()
        await _until(lambda: "no connection" in said.getvalue())
        assert _shown(endpoints) == ["http://10.0.0.1:8000"]
        fake.status = 403
        await fake.start()
        await _until(lambda: "bind the rights list and watch" in said.getvalue())
        assert _shown(endpoints) == ["http://10.0.0.1:8000"]
        fake.status = 200
        fake.slices = [_slice("a", "10.0.0.2")]
        await _until(lambda: _shown(endpoints) == ["http://10.0.0.2:8000"])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    _run(tmp_path, story, said=said)


@pytest.mark.parametrize("in_body", [False, True])
def test_an_api_server_that_does_not_answer_gets_one_connection_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_body: bool
) -> None:
    """Lists and watches alike. in_body: of an error, the head comes, and nothing after it."""
    monkeypatch.setattr("quire.router.kubernetes_endpoints._ANSWER_S", 0.02)
    monkeypatch.setattr(
        "tests.unit.router.test_kubernetes._whole",
        lambda writer, status, body: writer.write(b"HTTP/1.1 500 X\r\ncontent-length: 9\r\n\r\n"),
    )

    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        fake.is_silent, fake.status = not in_body, 500
        for version in ("", "10"):  # a list, and a watch that goes on from there
            endpoints._version = version
            watching = asyncio.ensure_future(endpoints.watch(lambda: None))
            begun = fake.num_connections
            await _until(lambda begun=begun: fake.num_connections >= begun + 5)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await asyncio.sleep(0.01)
            assert fake.num_open == 0

    _run(tmp_path, story)


def test_pauses_grow_until_a_watch_has_lasted(tmp_path: Path) -> None:
    """However long the API server takes to fail; and a watch that ends at once is a failure."""

    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        loop: Any = asyncio.get_running_loop()
        pauses: list[float] = []
        past_s = 0.0
        loop.time = lambda: time.monotonic() + past_s
        open_list = endpoints._list

        async def slow_list() -> None:
            nonlocal past_s
            past_s += 2.5 * (fake.status != 200)
            await open_list()

        async def wait(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                fake.status = 200
            await asyncio.sleep(0)

        endpoints._list, endpoints._wait = slow_list, wait  # type: ignore[method-assign]
        fake.status = 403
        watching = asyncio.ensure_future(endpoints.watch(lambda: None))
        for num, lasted_s in enumerate((9.0, 0.0), start=1):
            await _until(lambda num=num: len(fake.watches) == num)
            await asyncio.sleep(0.01)
            past_s += lasted_s
            fake.watches[-1].put_nowait(None)
            await _until(lambda num=num: len(pauses) == 3 + num)
        assert pauses == [1.0, 2.0, 4.0, 1.0, 2.0]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    _run(tmp_path, story)


def test_kinds_of_endpoints(tmp_path: Path) -> None:
    said = io.StringIO()

    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        leaving = _slice("d", "10.0.0.4")
        leaving["endpoints"][0]["conditions"] = {"ready": True, "terminating": True}
        unknown = _slice("e", "10.0.0.5")
        unknown["endpoints"][0]["conditions"] = {}
        fake.slices = [
            _slice("a", "fd00::1", addressType="IPv6"),
            _slice("b", ports=[{"name": "other", "port": 1}]),
            _slice("c", "10.0.0.3", ports=[{"name": "other", "port": 1}]),
            leaving,
            unknown,
            {"metadata": {"name": "f"}, "endpoints": None, "ports": None},
        ]
        await endpoints.read()
        assert _shown(endpoints) == ["http://[fd00::1]:8000", "http://10.0.0.5:8000"]
        assert "no port named 'http' (there are: 'other')" in said.getvalue()

    _run(tmp_path, story, said=said)


def test_one_port_needs_no_name_and_replicas_may_speak_tls(tmp_path: Path) -> None:
    async def story(fake: FakeApiServer, endpoints: KubernetesEndpoints) -> None:
        fake.slices = [_slice("a", "10.0.0.3", ports=[{"name": "", "port": 443}])]
        await endpoints.read()
        assert _shown(endpoints) == ["https://10.0.0.3:443"]
        assert "/namespaces/other/" in fake.heads[0]

    _run(tmp_path, story, KubernetesTable(service="quire", namespace="other", secure=True))


def test_certificates_without_key_identifiers_are_trusted_by_their_chain_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CAs of older clusters have them, with the default of Python 3.13 here."""

    def create(cafile: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create)
    context = _trust(tmp_path)
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_outside_a_pod_the_start_says_what_is_missing(tmp_path: Path, monkeypatch: Any) -> None:
    log = Log("router", io.StringIO())
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingError, match="run the router in the cluster"):
        KubernetesEndpoints(TABLE, log, account=tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SettingError, match=r"ca\.crt"):
        KubernetesEndpoints(TABLE, log, account=tmp_path)
    with pytest.raises(SettingError, match="token"):
        KubernetesEndpoints(
            TABLE, log, account=tmp_path, api_server=server_url("http://127.0.0.1:1")
        )
