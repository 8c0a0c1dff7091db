"""ClientResponse: the response to one client, over ASGI, and whether the client is still there.

Errors before the response begins are a status and a body; afterwards they are one event, and the
stream ends without its end marker, as those of a replica do.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from quire.base.cors import without_cors
from quire.base.http_apis import ERROR_CODE_HEADER, PROCESS_HEADER
from quire.router.api_forms import ApiForm, Headers, error_code
from quire.router.faults import ClientGone, Refusal

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# A client that reads nothing of what waits for it is given up after the first of these times, with
# the next check; servers of Quire give up theirs after 30 s.
UNREAD_S, _CHECK_S = 60.0, 5.0
# Of a replica that keeps the events of a stream: a router has no route to it.
_RESUMABLE = b"x-quire-resume-seconds"
# Headers of one connection, not of a message, and of one process of a replica.
HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"),
        PROCESS_HEADER,
    }
)


class PieceWriter(Protocol):
    """The server's part of ClientResponse.write_now (head_bounds.py)."""

    @property
    def can_write(self) -> bool:
        """Whether a piece of a body can be written without a wait."""

    def write_piece(self, body: bytes) -> None:
        """Write a piece, as the message `http.response.body` does."""


class ClientResponse:
    """form: of errors. started: whether status and headers were sent. added: headers beside the
    replica's. cors: those of CORS, in place of a replica's; None: a replica's are passed on.
    on_gone: what is called once the client has left. abort: closes its connection; None where that
    is the listener's affair. was_given_up: whether it was closed, since the client read nothing.
    writer: of pieces of the body that need not wait; None without one."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        form: ApiForm,
        abort: Callable[[], None] | None = None,
        writer: PieceWriter | None = None,
    ) -> None:
        self._form = form
        self.started = False
        self.status = 0
        self.added: list[tuple[bytes, bytes]] = []
        self.cors: list[tuple[bytes, bytes]] | None = None
        self.on_gone: set[Callable[[Exception], None]] = set()
        self.is_gone = False
        self._receive = receive
        self._send_message = send
        self._writer = writer
        self._watch: asyncio.Task[None] | None = None
        self._abort = abort
        self._check_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._sends_since_s: float | None = None  # what is not sent yet
        self.was_given_up = False

    def watch(self) -> None:
        """Notice from now on when the client leaves. The body must have been read."""
        self._watch = asyncio.ensure_future(self._wait_until_gone())

    def _check(self, abort: Callable[[], None]) -> None:
        since_s = self._sends_since_s
        if since_s is not None and self._loop.time() - since_s > UNREAD_S:
            self.was_given_up = True
            abort()
        else:
            self._check_timer = self._loop.call_later(_CHECK_S, self._check, abort)

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        for call in tuple(self.on_gone):
            call(ClientGone())

    def unwatch(self) -> None:
        """Notice no more."""
        if self._watch is not None:
            self._watch.cancel()
        if self._check_timer is not None:
            self._check_timer.cancel()

    async def start(self, status: int, headers: Headers, *, length: int | None = None) -> None:
        """Send status and headers, those of a connection left out, and notice from now on when the
        client reads nothing. The router's server adds the date."""
        left_out = HOP_BY_HOP | {b"date", _RESUMABLE}
        kept = [header for header in headers if header[0] not in left_out]
        if self.cors is not None:
            kept = [*without_cors(kept), *self.cors]
        kept += self.added
        if length is not None:
            kept.append((b"content-length", b"%d" % length))
        self.started, self.status = True, status
        if self._abort is not None:
            self._check_timer = self._loop.call_later(_CHECK_S, self._check, self._abort)
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def _send(self, message: Message) -> None:
        """Send a message. While that waits, what was sent before is not read: an earlier response,
        too."""
        self._sends_since_s = self._loop.time()
        await self._send_message(message)
        self._sends_since_s = None

    async def write(self, body: bytes) -> None:
        """Send a piece; waits while the client does not read. Raises ClientGone."""
        if self.is_gone:
            raise ClientGone
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    @property
    def can_write(self) -> bool:
        """Whether a piece would be written now, by write_now."""
        return self._writer is not None and not self.is_gone and self._writer.can_write

    def write_now(self, body: bytes) -> None:
        """Write a piece as `write` does, where can_write is true."""
        assert self._writer is not None
        self._writer.write_piece(body)

    async def finish(self, body: bytes = b"") -> None:
        """Send the last piece."""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a response that is not streamed."""
        await self.start(status, headers, length=len(body))
        await self.finish(body)

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error of the router: as a response, or as the last event of a stream."""
        if self.started:
            await self.finish(self._form.error_event(refusal))
            return
        code = refusal.code.encode()
        headers = [(b"content-type", b"application/json"), (ERROR_CODE_HEADER, code)]
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % max(math.ceil(refusal.retry_after_s), 1)))
        if refusal.is_final:
            headers.append((b"x-should-retry", b"false"))
        body = self._form.error_body(refusal)
        await self.whole(self._form.status_of(refusal), headers, body)


class InnerResponse(ClientResponse):
    """The response to a request of the router itself for a client. body: of it, once it is there;
    code: of the error that it is, "" for none.

    Ends when the client leaves. A context: afterwards the client is no longer watched.
    """

    def __init__(self, client: ClientResponse, form: ApiForm) -> None:
        super().__init__(_never, self._take, form)
        self.code, self.body = "", b""
        self._client = client
        self.is_gone = client.is_gone

    async def _take(self, message: Message) -> None:
        if "headers" in message:
            self.code = error_code(message["headers"])
        self.body += message.get("body", b"")

    def _left(self, error: Exception) -> None:
        self.is_gone = True
        for call in tuple(self.on_gone):
            call(error)

    def __enter__(self) -> InnerResponse:
        self._client.on_gone.add(self._left)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.on_gone.discard(self._left)


async def _never() -> Message:
    """Return what a client sends after its request: nothing comes here."""
    raise AssertionError("a request of the router itself is not watched")
