"""Communicate with the other API processes of a server over their private sockets.

A request by id, or the resumption of a stream, that this process does not know is forwarded to the
others, and the response is relayed byte for byte. Admin settings are published to all. The sockets
are in a directory that only this user can enter, so a request there comes from a sibling. Always
holds: a process that has ended or hangs is waited for at most `_ANSWER_S` and then ignored, except
for a recording, which needs all; all processes take over the state with the highest version.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.request_io import Deadline, disconnect_of, run_until_disconnect
from quire.api.server_state import ServerState
from quire.api.workers.process_beats import ProcessBeats
from quire.api.workers.relay import SiblingExchange, SiblingGone
from quire.api.workers.worker_job import SOCKET_PREFIX, socket_path

KEY_HEADER = "x-quire-key"
ADMIN_HEADER = "x-quire-admin"  # sent where the key is an admin's
STATE_PATH = "/state"
RECORD_PATH = "/record"
_BACKLOG = 128
_ANSWER_S = 5.0
_MAX_ID_CHARS = 128
_OK, _UNKNOWN = 200, 404
# Headers of a connection, not of the response.
_NOT_RELAYED = frozenset({b"connection", b"transfer-encoding", b"date", b"server", b"keep-alive"})


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The shared settings of a server (version, paused, draining, log_level), and the requests of
    one process. version: number of changes, and the number of the process that made the last."""

    version: tuple[int, int]
    paused: bool
    draining: bool
    log_level: str
    open_requests: int
    held_requests: int


class SiblingWorkers:
    """See the top of this file. number: of this process, part of its socket's name. beats: those
    of all processes."""

    def __init__(self, folder: Path, number: int, beats: ProcessBeats | None = None) -> None:
        self.number = number
        self.beats = beats
        self._folder = folder
        self._own = socket_path(folder, number)
        self._version = (0, 0)

    @property
    def responses_store(self) -> str:
        """The SQLite file of stored responses that all processes share until the server ends."""
        return str(self._folder / "responses.sqlite")

    def listen(self) -> socket.socket:
        """Return this process's private socket; the others find it from now on."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self._own))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return listening

    def state(self, server_state: ServerState) -> WorkerState:
        """Return the state of this process."""
        return WorkerState(
            version=self._version,
            paused=server_state.lifecycle.paused,
            draining=server_state.lifecycle.draining,
            log_level=server_state.log.level,
            open_requests=server_state.requests.num_open,
            held_requests=server_state.lifecycle.num_held,
        )

    def adopt(self, server_state: ServerState, other: WorkerState) -> None:
        """Take over the settings of another process if they are newer."""
        if other.version <= self._version:
            return
        self._version = other.version
        server_state.log.level = other.log_level
        server_state.lifecycle.set_admission(paused=other.paused, draining=other.draining)

    async def publish(self, server_state: ServerState) -> list[WorkerState]:
        """Send changed settings to all others; return their states after that."""
        self._version = (self._version[0] + 1, self.number)
        body = msgspec.json.encode(self.state(server_state))
        return await self._all_states("PUT", body)

    async def states(self) -> list[WorkerState]:
        """Return the states of the others."""
        return await self._all_states("GET")

    async def catch_up(self, server_state: ServerState) -> None:
        """Take over the newest settings; a process that starts later does so."""
        for other in await self.states():
            self.adopt(server_state, other)

    async def forward(self, request: Request) -> Response | None:
        """Return the response of the process that has the request of the path's `id`, or None."""
        id_ = str(request.path_params["id"])
        if len(id_) > _MAX_ID_CHARS:
            return None
        target = request.scope["route"].path.replace("{id}", quote(id_, safe=""))
        if request.scope["query_string"]:
            target = f"{target}?{request.scope['query_string'].decode('latin-1')}"
        headers = {KEY_HEADER: request.state.key.hex()}
        if request.state.is_admin:
            headers[ADMIN_HEADER] = "1"
        last_id = request.headers.get("last-event-id")
        if last_id is not None:
            headers["last-event-id"] = last_id
        for sibling in self._others():
            try:
                exchange = await SiblingExchange.open(
                    sibling, request.method, target, headers=headers, limit_s=_ANSWER_S
                )
            except SiblingGone:
                continue
            if exchange.status != _UNKNOWN:
                return _Relayed(exchange)
            exchange.close()
        return None

    async def record(
        self, options: Mapping[str, str], *, num_others: int, closing: ExitStack
    ) -> list[SiblingExchange]:
        """Return an exchange with each of the `num_others` other processes, in which it sends the
        lines of its recording; `closing` closes them.

        Raises SiblingGone unless all of them record.
        """
        others = self._others()
        if len(others) < num_others:
            raise SiblingGone(f"{len(others)} of {num_others} other API processes are ready")

        async def opened(sibling: Path) -> SiblingExchange:
            exchange = await SiblingExchange.open(
                sibling, "GET", RECORD_PATH, headers=options, limit_s=_ANSWER_S
            )
            closing.callback(exchange.close)
            if exchange.status != _OK:
                raise SiblingGone(f"{sibling.name}: its response has status {exchange.status}")
            return exchange

        exchanges: list[SiblingExchange] = []
        for one in await asyncio.gather(*map(opened, others), return_exceptions=True):
            if isinstance(one, BaseException):
                raise one
            exchanges.append(one)
        return exchanges

    def _others(self) -> list[Path]:
        return [path for path in self._folder.glob(f"{SOCKET_PREFIX}*") if path != self._own]

    async def _all_states(self, method: str, body: bytes = b"") -> list[WorkerState]:
        queries: list[Coroutine[Any, Any, WorkerState]] = [
            _state_of(sibling, method, body) for sibling in self._others()
        ]
        states = await asyncio.gather(*queries, return_exceptions=True)
        for failure in states:
            if isinstance(failure, BaseException) and not isinstance(failure, SiblingGone):
                raise failure
        return [state for state in states if isinstance(state, WorkerState)]


async def _state_of(sibling: Path, method: str, body: bytes) -> WorkerState:
    exchange = await SiblingExchange.open(sibling, method, STATE_PATH, body=body, limit_s=_ANSWER_S)
    try:
        return msgspec.json.decode(await exchange.read(), type=WorkerState)
    except msgspec.MsgspecError as error:  # an error response
        raise SiblingGone(f"{sibling.name}: {error}") from error
    finally:
        exchange.close()


class _Relayed(Response):
    """The response of another process, streamed. If it breaks off, so does this one."""

    def __init__(self, exchange: SiblingExchange) -> None:
        super().__init__(status_code=exchange.status)
        self.raw_headers = [pair for pair in exchange.headers if pair[0] not in _NOT_RELAYED]
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await run_until_disconnect(
                self._relay(send),
                disconnect_of(scope, receive),
                over=never,
                deadline=Deadline(None),
            )
        except SiblingGone:
            abort = scope.get("quire.abort")
            if abort is not None:
                abort()
        finally:
            self._exchange.close()

    async def _relay(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for piece in self._exchange.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
