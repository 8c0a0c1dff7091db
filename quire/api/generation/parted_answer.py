"""PartedAnswer: a whole answer that is encoded while it is sent.

Answers with the log-probabilities of the whole vocabulary are hundreds of megabytes of JSON. Their
lists (PartedList) are left out of the body that is encoded at once, and encoded entry by entry when
the client has read what comes before. Knows no API. Always holds: one entry is in memory beside the
one that is sent; the bytes are those of the body encoded as a whole.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from quire.api.generation.answer_json import PartedList
from quire.api.http.request_io import Deadline, disconnect_of, run_until_disconnect
from quire.api.server_state import OpenRequest, ServerState
from quire.api.streaming.event_stream import PacedResponse, abort_connection
from quire.base.errors import QuireError


class PartedAnswer(PacedResponse):
    """The body of one answer, `parts`, for one client; it ends when the client disconnects."""

    def __init__(
        self,
        server_state: ServerState,
        parts: Iterator[bytes],
        headers: Mapping[str, str],
        deadline: Deadline,
        request: OpenRequest,
    ) -> None:
        super().__init__(server_state, headers, "application/json", b"", request.cut)
        self._parts = parts
        self._deadline = deadline
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._watch(scope, send)
        failure: QuireError | None = None
        try:
            await run_until_disconnect(
                self._write_all(send),
                disconnect_of(scope, receive),
                over=self._server_state.lifecycle.grace_over,
                deadline=self._deadline,
                cut=self._cut,
            )
        except QuireError as error:
            failure = error
            if not self._started:
                raise
            self._server_state.count_error(error)
            abort_connection(scope)  # a body that is cut off must not look complete
        finally:
            self._unwatch()
            self._server_state.requests.end(self._request, failure)

    async def joined(self) -> bytes:
        """Return the whole body, for a line of a batch, in place of sending it."""
        try:
            return await asyncio.to_thread(b"".join, self._parts)
        finally:
            self._server_state.requests.end(self._request)

    async def _write_all(self, send: Send) -> None:
        """Write the parts; the next one is encoded in a thread."""
        part = await asyncio.to_thread(next, self._parts, b"")
        while part:
            following = await asyncio.to_thread(next, self._parts, b"")
            await self._write(send, part, more=bool(following))
            part = following


def parts_of(body: Any) -> Iterator[bytes]:
    """Yield the JSON of a body; that of a PartedList entry by entry."""
    lists: list[PartedList] = []
    mark = secrets.token_hex(16)

    def left_out(value: Any) -> msgspec.Raw:
        if not isinstance(value, PartedList):
            raise NotImplementedError(f"{type(value).__name__} has no JSON form")
        lists.append(value)
        return msgspec.Raw(f'"{mark}"'.encode())

    pieces = msgspec.json.encode(body, enc_hook=left_out).split(f'"{mark}"'.encode())
    yield pieces[0]
    for entries, rest in zip(lists, pieces[1:], strict=True):
        yield b"["
        for at, entry in enumerate(entries):
            encoded = msgspec.json.encode(entry)
            yield b"," + encoded if at else encoded
        yield b"]" + rest
