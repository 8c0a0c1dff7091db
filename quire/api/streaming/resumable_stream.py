"""Resumable streams: a request's events are told into a journal, whoever reads them and when.

A reader that breaks off may come back within `resume_s`, on any connection, while the request runs
or when it has ended. Without a reader for longer, a request that runs is ended. Knows no HTTP.
Always holds: at most `most` journals are kept; where all of them are of requests that run, another
stream is served without.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from quire.api.http.cancellation import Deadline, run_until_disconnect
from quire.api.http.errors import ReadElsewhere, ReaderGone
from quire.api.streaming.event_journal import MOST_BYTES, EventJournal
from quire.base.errors import QuireError

if TYPE_CHECKING:
    from quire.api.generation.request_registry import OpenRequest
    from quire.api.server_state import ServerState
    from quire.api.streaming.sse import Events


class ResumableStream:
    """One request's events, told until they end. Made in the event loop.

    refusal: the error, where the request failed before its first event. never: a future that is
    never set.
    """

    def __init__(
        self,
        serving: ServerState,
        events: Events,
        deadline: Deadline,
        live: OpenRequest,
    ) -> None:
        self.id = live.id
        self.live = live
        self.journal = EventJournal()
        self.refusal: QuireError | None = None
        self._loop = asyncio.get_running_loop()
        self.never: asyncio.Future[None] = self._loop.create_future()
        self._serving = serving
        self._events = events
        self._deadline = deadline
        self._reader: asyncio.Future[QuireError] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._task = asyncio.ensure_future(self._run())

    def attach(self, reader: asyncio.Future[QuireError]) -> None:
        """A reader is there; the one before it is cut."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(
                ReadElsewhere("the stream was resumed on another connection, and goes on there")
            )
        self._reader = reader
        if self._expiry is not None:
            self._expiry.cancel()

    def detach(self, reader: asyncio.Future[QuireError]) -> None:
        """A reader has left; where it was the last, time begins to run."""
        if self._reader is not reader:
            return
        self._reader = None
        self._expire()

    def _expire(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_later(self._serving.config.resume_s, self._give_up)

    def _give_up(self) -> None:
        """Nobody came back."""
        if self.journal.ended:
            self._serving.tellings.drop(self.id)
            return
        limit_s = self._serving.config.resume_s
        self.live.end_with(
            ReaderGone(f"the stream's reader left and did not come back within {limit_s:g} s")
        )

    async def _run(self) -> None:
        failure: QuireError | None = None
        try:
            with self._serving.request(counts=True):
                await run_until_disconnect(
                    self._events.tell(self._put),
                    None,
                    over=self._serving.over,
                    deadline=self._deadline,
                    cut=self.live.cut,
                )
        except QuireError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 (a fault of ours, told like any other)
            self._serving.log.error("stream failed", request=self.id, kind=type(error).__name__)
            failure = QuireError(f"internal error ({type(error).__name__}); the log has it")
        finally:
            if failure is not None:
                self._fail(failure)
            self._serving.live.end(self.live, failure)
            self.journal.end()
            if self._reader is None:
                self._expire()

    def _fail(self, failure: QuireError) -> None:
        if self.journal.last == 0:
            self.refusal = failure
        else:
            self._serving.failed(failure)
            self.journal.put_last(self._events.of_error(failure))
        if isinstance(failure, ReaderGone):
            self._serving.log.warning("stream ended", request=self.id, reason=str(failure))

    async def _put(self, events: list[bytes], _: bool) -> None:
        for event in events:
            await self.journal.put(event)


class ResumableStreams:
    """The resumable streams of one server, by request id."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes // MOST_BYTES
        self._all: OrderedDict[str, ResumableStream] = OrderedDict()

    def has_room(self) -> bool:
        """Whether one more may be kept; the one that ended first makes room."""
        if len(self._all) < self._most:
            return True
        ended = next((id_ for id_, one in self._all.items() if one.journal.ended), None)
        if ended is not None:
            self.drop(ended)
        return ended is not None

    def add(self, telling: ResumableStream) -> None:
        """Keep one; `has_room` was asked."""
        self._all[telling.id] = telling

    def find(self, request_id: str) -> ResumableStream | None:
        """The one of a request, if it is kept."""
        return self._all.get(request_id)

    def drop(self, request_id: str) -> None:
        """Forget one; who reads it reads on."""
        self._all.pop(request_id, None)
