"""The other API processes of a server: found by their private sockets, asked, told.

A request for something this process does not know (a request by id, a stream to go on with) is
passed on to those who may, and their answer passed back byte for byte. What an admin sets is told
to all. Each has a socket in the folder that only this user can enter, so who asks there is one of
us. Always holds: a process that is gone or hangs is waited for `_ANSWER_S` at most and then counts
as not there; the state set last (by its version) is everybody's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.http.cancellation import Deadline, disconnect_of, run_until_disconnect
from quire.api.workers.relay import Exchange, SiblingGone
from quire.api.workers.worker_job import PEER_NAME, socket_path

if TYPE_CHECKING:
    from quire.api.server_state import ServerState

KEY_HEADER = "x-quire-key"
STATE_PATH = "/state"
_BACKLOG = 128
_ANSWER_S = 5.0
_MOST_ID_CHARS = 128
_UNKNOWN = 404
# Of a connection, not of the answer on it.
_NOT_PASSED = frozenset({b"connection", b"transfer-encoding", b"date", b"server", b"keep-alive"})


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all processes of a server (version, paused, draining, log_level), and what is
    open in one of them. version: how many changes there were, and who made the last."""

    version: tuple[int, int]
    paused: bool
    draining: bool
    log_level: str
    open_requests: int
    held_requests: int


class SiblingWorkers:
    """See the top of this file. number: this process's, in the name of its socket."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number
        self._own = socket_path(folder, number)
        self._version = (0, 0)

    def listen(self) -> socket.socket:
        """The private socket, from now on found by the others."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(str(self._own))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        return listening

    def state(self, serving: ServerState) -> WorkerState:
        """Ours."""
        return WorkerState(
            version=self._version,
            paused=serving.paused,
            draining=serving.draining,
            log_level=serving.log.level,
            open_requests=serving.live.num_open,
            held_requests=serving.num_held,
        )

    def adopt(self, serving: ServerState, told: WorkerState) -> None:
        """Another's state becomes ours, where it is newer."""
        if told.version <= self._version:
            return
        self._version = told.version
        serving.log.level = told.log_level
        serving.become(paused=told.paused, draining=told.draining)

    async def tell(self, serving: ServerState) -> list[WorkerState]:
        """Ours has changed: all take it over. Theirs, when they have."""
        self._version = (self._version[0] + 1, self._number)
        body = msgspec.json.encode(self.state(serving))
        return await self._all_states("PUT", body)

    async def look(self) -> list[WorkerState]:
        """Those of the others."""
        return await self._all_states("GET")

    async def catch_up(self, serving: ServerState) -> None:
        """A process that comes later begins as the others are."""
        for told in await self.look():
            self.adopt(serving, told)

    async def pass_on(self, request: Request) -> Response | None:
        """The answer of whoever knows the request that this path names by `id`, or None."""
        asked = str(request.path_params["id"])
        if len(asked) > _MOST_ID_CHARS:
            return None
        target = request.scope["route"].path.replace("{id}", quote(asked, safe=""))
        headers = {KEY_HEADER: request.state.key.hex()}
        last_id = request.headers.get("last-event-id")
        if last_id is not None:
            headers["last-event-id"] = last_id
        for peer in self._others():
            try:
                exchange = await Exchange.open(
                    peer, request.method, target, headers=headers, limit_s=_ANSWER_S
                )
            except SiblingGone:
                continue
            if exchange.status != _UNKNOWN:
                return _Passed(exchange)
            exchange.close()
        return None

    def _others(self) -> list[Path]:
        return [path for path in self._folder.glob(f"{PEER_NAME}*") if path != self._own]

    async def _all_states(self, method: str, body: bytes = b"") -> list[WorkerState]:
        asks: list[Coroutine[Any, Any, WorkerState]] = [
            _state_of(peer, method, body) for peer in self._others()
        ]
        told = await asyncio.gather(*asks, return_exceptions=True)
        for failure in told:
            if isinstance(failure, BaseException) and not isinstance(failure, SiblingGone):
                raise failure
        return [state for state in told if isinstance(state, WorkerState)]


async def _state_of(peer: Path, method: str, body: bytes) -> WorkerState:
    exchange = await Exchange.open(peer, method, STATE_PATH, body=body, limit_s=_ANSWER_S)
    try:
        return msgspec.json.decode(await exchange.read(), type=WorkerState)
    except msgspec.MsgspecError as error:  # it says that it cannot
        raise SiblingGone(f"{peer.name}: {error}") from error
    finally:
        exchange.close()


class _Passed(Response):
    """Another process's answer, as it comes. Where it breaks off, so does ours."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(status_code=exchange.status)
        self.raw_headers = [pair for pair in exchange.headers if pair[0] not in _NOT_PASSED]
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            gone = disconnect_of(scope, receive)
            await run_until_disconnect(self._pass(send), gone, over=never, deadline=Deadline(None))
        except SiblingGone:
            abort = scope.get("quire.abort")
            if abort is not None:
                abort()
        finally:
            self._exchange.close()

    async def _pass(self, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        async for piece in self._exchange.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
