"""A background response: it continues without its client, which polls it or reads its events.

Its events are in a journal of bounded size, the oldest dropped first, which is kept for
`--resume-seconds` after the end. Always holds: the response is stored before its client knows its
id, and after its end, however it ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.generation.choice_streams import ChoiceStreams
from quire.api.http.dialect import Dialect
from quire.api.http.errors import Aborted
from quire.api.http.request_io import Deadline
from quire.api.openai.responses.response_writer import ResponseWriter
from quire.api.server_state import OpenRequest, ServerState
from quire.api.streaming.event_journal import EventJournal
from quire.api.streaming.event_stream import Events, Put
from quire.api.streaming.resumable_stream import ResumableStream


class BackgroundEvents(Events):
    """The events of a background response: the first of them precede the first token.

    While the server is paused the response is queued.
    """

    def __init__(
        self,
        server_state: ServerState,
        answers: ChoiceStreams,
        writer: ResponseWriter,
        dialect: Dialect,
        request_id: str,
    ) -> None:
        super().__init__(answers, writer, dialect, request_id)
        self._server_state = server_state
        self._response = writer

    async def write(self, put: Put) -> None:
        """Hand all events to `put`."""
        await put([self._event(chunk) for chunk in self._response.begin()], False)
        if self._server_state.lifecycle.paused:
            await self._server_state.lifecycle.wait_while_paused()
            self._server_state.engine()  # it may have died meanwhile
        await super().write(put)

    def snapshot(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._response.snapshot()


class BackgroundResponse(ResumableStream):
    """One response. save: stores it as it is now."""

    def __init__(
        self,
        server_state: ServerState,
        events: BackgroundEvents,
        deadline: Deadline,
        request: OpenRequest,
        save: Callable[[], Awaitable[None]],
    ) -> None:
        journal = EventJournal(drops_unread=True)
        super().__init__(server_state, events, deadline, request, journal=journal)
        self.snapshot = events.snapshot
        self._save = save
        self._stored, self._ended = asyncio.Event(), asyncio.Event()

    @property
    def is_running(self) -> bool:
        """Whether the response has not ended."""
        return not self._ended.is_set()

    async def stored(self) -> None:
        """Wait until the store has the response."""
        await self._stored.wait()

    async def cancel(self) -> None:
        """End the response, and wait until the store has it as it then is."""
        self.request.end_with(Aborted("the response was cancelled"))
        await self._ended.wait()

    async def _run(self) -> None:
        with self._server_state.track_request(counts=True):
            try:
                await self._save()
                self._stored.set()
                await super()._run()
            finally:
                await self._save()
                self._stored.set()
                self._ended.set()

    async def _put(self, events: list[bytes], is_last: bool) -> None:
        if is_last:
            await self._save()
        await super()._put(events, is_last)

    def _put_error(self, events: bytes) -> None:
        """Append the error and response.failed, each of which has a number."""
        self.journal.put_last(*(part + b"\n\n" for part in events.split(b"\n\n") if part))

    def _start_expiry(self) -> None:
        if self.journal.ended:
            super()._start_expiry()


class QueuedResponse(Response):
    """The body of a background response, sent once it is stored."""

    def __init__(self, background: BackgroundResponse, headers: Mapping[str, str]) -> None:
        body = msgspec.json.encode(background.snapshot())
        super().__init__(body, headers=dict(headers), media_type="application/json")
        self._background = background

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._background.stored()
        await super().__call__(scope, receive, send)
