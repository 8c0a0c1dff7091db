"""Resumable streams: events go into a journal, and a client that disconnects can reconnect.

A client may return within `resume_s`, on any connection, while the request runs or after its end.
A running request without a client for longer is ended. Knows no dialect. Always holds: the events
of a resumed stream are those that the first client would have read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Receive, Scope, Send

from quire.api.http.errors import ReadElsewhere, ReaderGone, ResumeGone, SlowReader
from quire.api.http.request_io import Deadline, disconnect_of, run_until_disconnect
from quire.api.server_state import OpenRequest, ServerState
from quire.api.streaming.event_journal import EventJournal, KeptStream
from quire.api.streaming.event_stream import Events, PacedResponse, abort_connection
from quire.base.errors import QuireError
from quire.base.show import show

MAX_ID_CHARS = 256
_MAX_DIGITS = 15


class ResumableStream:
    """Write the events of one request into a journal until they end. Created in the event loop."""

    def __init__(
        self,
        server_state: ServerState,
        events: Events,
        deadline: Deadline,
        request: OpenRequest,
        *,
        journal: EventJournal | None = None,
    ) -> None:
        self.id = request.id
        self.request = request
        self.journal = journal or EventJournal()
        self.framing = events.framing
        self.refusal: QuireError | None = None
        self._loop = asyncio.get_running_loop()
        self._server_state = server_state
        self._events = events
        self._deadline = deadline
        self._reader: asyncio.Future[QuireError] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._run())

    def attach(self, reader: asyncio.Future[QuireError]) -> None:
        """Add a reader; the one before it is cut."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(
                ReadElsewhere("the stream was resumed on another connection, and continues there")
            )
        self._reader = reader
        if self._expiry is not None:
            self._expiry.cancel()

    def detach(self, reader: asyncio.Future[QuireError]) -> None:
        """Remove a reader; without another one the stream expires after `resume_s`."""
        if self._reader is not reader:
            return
        self._reader = None
        self._start_expiry()

    def _start_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_later(self._server_state.config.resume_s, self._expire)

    def _expire(self) -> None:
        """Drop a stream that has ended, or end a running one."""
        if self.journal.ended:
            self._server_state.resumable_streams.drop(self.id)
            return
        limit_s = self._server_state.config.resume_s
        self.request.end_with(
            ReaderGone(
                f"the client disconnected and did not resume the stream within {limit_s:g} s"
            )
        )

    async def _run(self) -> None:
        failure: QuireError | None = None
        try:
            with self._server_state.track_request(counts=True):
                await run_until_disconnect(
                    self._events.write(self._put),
                    None,
                    over=self._server_state.lifecycle.grace_over,
                    deadline=self._deadline,
                    cut=self.request.cut,
                )
        except QuireError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 (a bug, reported like any other failure)
            self._server_state.log.error(
                "stream failed", request=self.id, kind=type(error).__name__
            )
            failure = QuireError(f"internal error ({type(error).__name__}); the log has it")
        finally:
            if failure is not None:
                self._fail(failure)
            self._server_state.requests.end(self.request, failure)
            self.journal.end()
            if self._reader is None:
                self._start_expiry()

    def _fail(self, failure: QuireError) -> None:
        if self.journal.last == 0:
            self.refusal = failure
        else:
            self._server_state.count_error(failure)
            self._put_error(self._events.of_error(failure))
        if isinstance(failure, ReaderGone):
            self._server_state.log.warning("stream ended", request=self.id, reason=str(failure))

    def _put_error(self, events: bytes) -> None:
        """Append what ends a failed stream."""
        self.journal.put_last(events)

    async def _put(self, events: list[bytes], _: bool) -> None:
        for event in events:
            await self.journal.put(event)


class FollowStream(PacedResponse):
    """The events of a resumable stream after number `after`; it continues when this client leaves.

    resumes: the stream has begun before, so the response begins at once. Raises ResumeGone if those
    events are not kept.
    """

    def __init__(
        self,
        server_state: ServerState,
        stream: KeptStream,
        headers: Mapping[str, str],
        *,
        after: int = 0,
        resumes: bool = False,
    ) -> None:
        journal = stream.journal
        if not journal.first - 1 <= after <= journal.last:
            raise ResumeGone(
                f"the stream cannot resume after event {after}: events {journal.first} to "
                f"{journal.last} are kept; send the request again"
            )
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        cut: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()
        framing = stream.framing
        super().__init__(server_state, headers, framing.media_type, framing.heartbeat, cut)
        self._stream = stream
        self._after = after
        self._resumes = resumes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stream.attach(self._cut)
        self._watch(scope, send)
        try:
            await run_until_disconnect(
                self._follow(send),
                disconnect_of(scope, receive),
                over=self._never,
                deadline=Deadline(None),
                cut=self._cut,
            )
        except (SlowReader, ReadElsewhere, ResumeGone) as error:
            if isinstance(error, ResumeGone) and not self._started:
                raise
            # Not an event: the request continues, and its events are the same for every client.
            if isinstance(error, SlowReader):
                self._server_state.count_error(error)
            abort_connection(scope)
        finally:
            self._unwatch()
            self._stream.detach(self._cut)

    async def _follow(self, send: Send) -> None:
        journal, number = self._stream.journal, self._after
        if self._resumes and self._stream.refusal is None:
            await self._write(send, b"")
        while events := await journal.after(number):
            number = journal.last
            if not self._write_now(events):
                await self._write(send, events)
        refusal = self._stream.refusal
        if refusal is not None and not self._started:
            raise refusal
        await self._write(send, b"", more=False)


def resumable_response(
    server_state: ServerState,
    events: Events,
    headers: Mapping[str, str],
    deadline: Deadline,
    request: OpenRequest,
) -> FollowStream:
    """Return the response that streams the events of a request and can be resumed."""
    stream = ResumableStream(server_state, events, deadline, request)
    server_state.resumable_streams.add(stream)
    resume_s = f"{server_state.config.resume_s:g}"
    return FollowStream(server_state, stream, {**headers, "x-quire-resume-seconds": resume_s})


def parse_event_id(event_id: str) -> tuple[str, int]:
    """Return (request id, number) of a Last-Event-ID. Raises ResumeGone if it is malformed."""
    request_id, _, number = event_id.rpartition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
    if not request_id or not is_number or len(event_id) > MAX_ID_CHARS:
        raise ResumeGone(
            f"Last-Event-ID is {show(event_id)}; send the `id` of an event of the stream"
        )
    return request_id, int(number)
