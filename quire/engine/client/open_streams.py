"""OpenStreams: streams an engine has not finished, and their owners; UnreadQueue: unread deltas.

EngineClient and LLM share OpenStreams. An UnreadQueue reports that its reader does not keep up, and
again when it has caught up to a quarter of the bound; it replaces asyncio.Queue, which would cost a
wake-up per token. Invariants: no two streams of an engine have the same id, so late outputs of an
ended stream are dropped; a stream leaves when the engine ends it, when its stop string came or when
its owner releases it; a queue drops nothing and keeps the order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from quire.base.records import Request, RequestOutput
from quire.engine.output.continued_stream import ContinuedStream
from quire.engine.output.output_stream import PLAIN_TEXT, OutputStream, TextDelta, TextRules
from quire.engine.process.messages import Outputs
from quire.text.tokenizer import Tokenizer

Owner = TypeVar("Owner")
Item = TypeVar("Item")

# Maximum items taken in a row before yielding to other tasks of the event loop.
_IN_A_ROW = 16


class OpenStreams(Generic[Owner]):
    """Streams by the id the engine knows them by, each with its text and its owner. prefix: what
    all these ids begin with."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._open: dict[str, tuple[OutputStream, Owner]] = {}
        self._num_requests = 0

    def __len__(self) -> int:
        """How many streams the engine has not finished."""
        return len(self._open)

    def owners(self) -> Iterator[Owner]:
        """Return the owner of each open stream; an owner of several is repeated."""
        return (owner for _, owner in self._open.values())

    def fresh_id(self, request_id: str) -> str:
        """Return an id for the engine: the caller's may come again, the number in it never does."""
        self._num_requests += 1
        return f"{self._prefix}{request_id}#{self._num_requests}"

    def open(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        owner: Owner,
        rules: TextRules = PLAIN_TEXT,
    ) -> None:
        """Expect outputs of these requests; the text goes to `owner`."""
        for request in requests:
            is_new = not (len(request.output_ids) or rules.held_tokens)
            stream = (OutputStream if is_new else ContinuedStream)(tokenizer, request, rules)
            self._open[request.request_id] = (stream, owner)

    def take(self, message: Outputs) -> tuple[list[tuple[Owner, TextDelta]], tuple[str, ...]]:
        """Return each owner's deltas, and the ids of streams that ended before the engine knew.

        The caller must abort the latter. Outputs of streams that are not open are dropped.
        """
        deltas: list[tuple[Owner, TextDelta]] = []
        past_end: list[str] = []
        outputs, step_ms = message.outputs, message.stats.last_step_ms
        if outputs is None:
            return deltas, ()
        for output in outputs.events:
            found = self._open.get(output.request_id)
            if found is not None:
                self._take(output, *found, step_ms, deltas, past_end)
        token_ids = outputs.token_ids.tolist()
        for row, request_id in enumerate(outputs.request_ids):
            found = self._open.get(request_id)
            if found is None:
                continue
            stream, owner = found
            if not stream.is_plain:
                self._take(outputs.row(row), stream, owner, step_ms, deltas, past_end)
                continue
            # What most rows of most steps are: no object but the delta is made for it.
            try:
                delta = stream.push_token(token_ids[row], step_ms)
            except Exception as error:  # noqa: BLE001  as in _pushed
                delta = self._failed(request_id, stream, error, past_end)
            if delta is not None:
                deltas.append((owner, delta))
        return deltas, tuple(past_end)

    def _take(
        self,
        output: RequestOutput,
        stream: OutputStream,
        owner: Owner,
        step_ms: float,
        deltas: list[tuple[Owner, TextDelta]],
        past_end: list[str],
    ) -> None:
        delta = _pushed(stream, output, step_ms)
        if stream.finished:
            self._close(output.request_id, stream, past_end)
        if delta is not None:
            deltas.append((owner, delta))

    def _failed(
        self, request_id: str, stream: OutputStream, error: Exception, past_end: list[str]
    ) -> TextDelta:
        delta = stream.fail(error, engine_knows=False)
        self._close(request_id, stream, past_end)
        return delta

    def _close(self, request_id: str, stream: OutputStream, past_end: list[str]) -> None:
        del self._open[request_id]
        if stream.wants_abort:
            past_end.append(request_id)

    def close(self, stream_ids: Iterable[str]) -> tuple[str, ...]:
        """Expect nothing more of these streams; those that were open."""
        return tuple(id_ for id_ in stream_ids if self._open.pop(id_, None) is not None)

    def refuse(self, stream_ids: Iterable[str], why: str) -> list[tuple[Owner, TextDelta]]:
        """Close these streams and return an error delta for the owner of each."""
        found = [self._open.pop(id_) for id_ in stream_ids if id_ in self._open]
        return [(owner, stream.end_with(why)) for stream, owner in found]

    def end(self, stream_ids: Iterable[str] | None = None) -> list[Owner]:
        """Close these streams (None: all) and return their owners, each once."""
        ids = list(self._open) if stream_ids is None else stream_ids
        owners = [self._open.pop(id_)[1] for id_ in ids if id_ in self._open]
        return list({id(owner): owner for owner in owners}.values())


def _pushed(stream: OutputStream, output: RequestOutput, step_ms: float) -> TextDelta | None:
    try:
        return stream.push(output, step_ms)
    except Exception as error:  # noqa: BLE001  fails this stream; the step's other streams go on
        return stream.fail(error, engine_knows=output.finish_reason is not None)


class UnreadQueue(Generic[Item]):
    """max_items: how many may wait before `on_hold(True)` is called; `on_hold(False)` when few do.

    is_held: whether the last call was the first of these. All in the event loop's thread.
    """

    def __init__(self, max_items: int, on_hold: Callable[[bool], None]) -> None:
        self._max_items = max_items
        self._on_hold = on_hold
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self.is_held = False
        self._num_in_a_row = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Queue one more item for the reader."""
        self._items.append(item)
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            if not waiting.done():  # its reader was cancelled, if it is
                waiting.set_result(None)
        if not self.is_held and len(self._items) > self._max_items:
            self._set_held(True)

    async def get(self) -> Item:
        """Wait for the next item and return it.

        Yields to the event loop even where many items are queued, so that the engine's messages
        are read and backpressure can take effect.
        """
        self._num_in_a_row += 1
        if self._num_in_a_row > _IN_A_ROW:
            self._num_in_a_row = 0
            await asyncio.sleep(0)
        while not self._items:
            self._num_in_a_row = 0
            self._waiting = self._loop.create_future()
            await self._waiting
        item = self._items.popleft()
        if self.is_held and len(self._items) <= self._max_items // 4:
            self._set_held(False)
        return item

    def _set_held(self, is_held: bool) -> None:
        self._on_hold(is_held)
        self.is_held = is_held
