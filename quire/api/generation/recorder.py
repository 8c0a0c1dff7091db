"""Record the requests of this process while `GET /admin/record` is read.

`RecordingEngine` takes the engine's place while there is a Recorder, so that requests pay nothing
at other times. Always holds: a recorder keeps at most MAX_PENDING_BYTES; a request that has no room
there is counted as dropped, and waits for nothing. Without `content` a recorder keeps no token id,
text or grammar; block ids are digests under a key of this recording only.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np

from quire.api.engine_protocol import Engine
from quire.base.clock import Clock
from quire.base.errors import QuireError, RequestError
from quire.base.records import RequestTimes
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.engine.output.output_stream import TextDelta
from quire.obs.recording import DroppedRequests, Line, RecordedRequest, encode_line
from quire.obs.request_fields import sampling_fields, scheduling_fields

MAX_PENDING_BYTES = 32 << 20
# `lines` yields no more bytes at once than these and one line.
_PART_BYTES = 1 << 20
# Lines of more tokens are made in a thread: 131,072 tokens take 24 ms.
MAX_INLINE_TOKENS = 4096
# Reserved for a line that is being made in a thread: a token id is 4 to 8 digits with its comma.
_BYTES_PER_TOKEN = 8
_DIGEST_BYTES = 8
# Block ids are numbers that every JSON reader keeps exactly.
_ID_BITS = 53


class Recorder:
    """The lines of one recording in this process. Created and used in the event loop's thread.

    key: of the digests; shared by the processes of one recording. stop: takes no new requests.
    """

    def __init__(self, *, key: bytes, block_tokens: int, content: bool) -> None:
        self._key = key
        self.block_tokens = block_tokens
        self.content = content
        self._lines: deque[bytes] = deque()
        self._pending_bytes = 0
        self._num_dropped = 0
        self._num_open = 0
        self._is_stopped = self._is_closed = False
        self._changed = asyncio.Event()
        self._making: set[asyncio.Task[None]] = set()

    def begin(self) -> bool:
        """Return whether a request that arrives now is recorded; `end` must follow then."""
        if not self._is_stopped:
            self._num_open += 1
        return not self._is_stopped

    def end(self, make: Callable[[], Line] | None, *, num_tokens: int = 0) -> None:
        """Add the line of a request that ended, or None for one that was refused.

        num_tokens: of its prompt and outputs; `make` is called in a thread where these are many.
        """
        reserved = _BYTES_PER_TOKEN * num_tokens
        if make is None or self._is_closed:
            self._ended()
        elif num_tokens <= MAX_INLINE_TOKENS:
            self._keep(encode_line(make()))
            self._ended()
        elif self._pending_bytes + reserved > MAX_PENDING_BYTES:
            self._num_dropped += 1
            self._ended()
        else:
            self._pending_bytes += reserved
            task = asyncio.ensure_future(self._end_in_thread(make, reserved))
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    async def _end_in_thread(self, make: Callable[[], Line], reserved: int) -> None:
        try:
            encoded = await asyncio.to_thread(lambda: encode_line(make()))
            if not self._is_closed:
                self._pending_bytes -= reserved
                self._keep(encoded)
        finally:
            self._ended()

    def _keep(self, encoded: bytes) -> None:
        if self._pending_bytes + len(encoded) <= MAX_PENDING_BYTES:
            self._pending_bytes += len(encoded)
            self._lines.append(encoded)
        else:
            self._num_dropped += 1

    def _ended(self) -> None:
        self._num_open -= 1
        self._changed.set()

    def drop(self) -> None:
        """Count a request that ended without any output as dropped, such as one of a full queue."""
        self._num_dropped += not self._is_closed
        self._ended()

    def stop(self) -> None:
        """Record no further requests; `lines` ends when those that are open have ended."""
        self._is_stopped = True
        self._changed.set()

    def close(self) -> None:
        """Discard all lines, also of requests that are still open: the recording has ended."""
        self._is_closed = True
        self._lines.clear()
        self._pending_bytes = self._num_dropped = 0
        self.stop()

    async def lines(self, wait_s: float | None = None) -> AsyncGenerator[bytes, None]:
        """Yield lines as requests end, several at once; b"" after `wait_s` without any."""
        while True:
            self._changed.clear()
            if self._lines or self._num_dropped:
                yield self._take_part()
                continue
            if self._is_stopped and not self._num_open:
                return
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                yield b""

    def _take_part(self) -> bytes:
        """Return some of the lines, and how many requests were dropped."""
        part, size = list[bytes](), 0
        while self._lines and size < _PART_BYTES:
            part.append(self._lines.popleft())
            size += len(part[-1])
        self._pending_bytes -= size
        if self._num_dropped:
            part.append(encode_line(DroppedRequests(dropped=self._num_dropped)))
            self._num_dropped = 0
        return b"".join(part)

    def block_ids(self, prompt_ids: Sequence[int], salt: str) -> tuple[int, ...]:
        """Return a digest for each full block of a prompt, chained from its beginning."""
        tokens = np.asarray(prompt_ids, np.int32).tobytes()
        size = self.block_tokens * np.dtype(np.int32).itemsize
        digest, found = salt.encode("utf-8", "surrogatepass"), []
        for at in range(0, len(tokens) - size + 1, size):
            chained = digest + tokens[at : at + size]
            digest = hashlib.blake2b(chained, key=self._key, digest_size=_DIGEST_BYTES).digest()
            found.append(int.from_bytes(digest, "little") >> (8 * _DIGEST_BYTES - _ID_BITS))
        return tuple(found)


class RecordingEngine:
    """An Engine that records the requests to the engine it stands for; all else is that one's."""

    def __init__(self, engine: Engine, recorders: set[Recorder]) -> None:
        self._engine = engine
        self._recorders = recorders
        self._clock = Clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        """As the engine's; the request is recorded when it ends, however it does."""
        recorders = [one for one in self._recorders if one.begin()]
        outcome = _Outcome(prompt_ids, sampling, options, arrival_ms=self._clock.now_ms())
        stream = self._engine.generate(prompt_ids, sampling, **options)
        failure: QuireError | None = None
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    outcome.add(delta)
                    yield delta
        except QuireError as error:
            failure = error
            raise
        finally:
            if failure is not None:
                outcome.fail()
            for recorder in recorders:
                if failure is None or outcome.has_output:
                    recorder.end(partial(outcome.line, recorder), num_tokens=outcome.num_tokens)
                elif isinstance(failure, RequestError):
                    recorder.end(None)
                else:
                    recorder.drop()


class _Outcome:
    """What came of one request so far. options: further arguments of Engine.generate.

    A request with output_ids is recorded as the whole answer: that is what a replay computes.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        options: Mapping[str, Any],
        *,
        arrival_ms: float,
    ) -> None:
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._arrival_ms = arrival_ms
        self._salt: str = options.get("cache_salt", "")
        self._first_stream: int = options.get("first_stream", 0)
        self._terms: SchedulingParams = options.get("terms", DEFAULT_SCHEDULING)
        self._output_ids: list[list[int]] = [[] for _ in range(sampling.n)]
        self._known_ids: list[int] = list(options.get("output_ids", ()))  # of the only choice
        self._reasons = ["abort"] * sampling.n
        self._times: list[RequestTimes] = []

    @property
    def has_output(self) -> bool:
        return any(self._output_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all outputs."""
        return len(self._prompt_ids) + sum(map(len, self._output_ids))

    def fail(self) -> None:
        """Note that an error ended the choices that have not finished."""
        self._reasons = ["error" if reason == "abort" else reason for reason in self._reasons]

    def add(self, delta: TextDelta) -> None:
        at = delta.index - self._first_stream
        if delta.known is not None:  # tokens after output_ids that the client has
            self._output_ids[at] += delta.known.token_ids
        self._output_ids[at] += delta.token_ids
        if delta.finish_reason is not None:
            self._reasons[at] = delta.finish_reason.value
            if delta.times is not None:
                self._times.append(delta.times)

    def line(self, recorder: Recorder) -> RecordedRequest:
        """Return the line of a request that has ended, as `recorder` records it."""
        content = recorder.content
        begin_ms = min((times.arrival_ms for times in self._times), default=0.0)
        first_ms = min((times.first_token_ms for times in self._times), default=math.nan)
        last_ms = max((times.last_token_ms for times in self._times), default=math.nan)
        output_ids = list(self._output_ids)
        if self._known_ids:
            output_ids[0] = self._known_ids + output_ids[0]
        return RecordedRequest(
            arrival_ms=self._arrival_ms,
            prompt_tokens=len(self._prompt_ids),
            output_tokens=tuple(map(len, output_ids)),
            finish_reasons=tuple(self._reasons),
            block_ids=recorder.block_ids(self._prompt_ids, self._salt),
            ttft_ms=_positive(first_ms - begin_ms),
            total_ms=_positive(last_ms - begin_ms),
            sampling=sampling_fields(self._sampling, content=content),
            scheduling=scheduling_fields(self._terms),
            first_stream=self._first_stream,
            prompt_ids=tuple(self._prompt_ids) if content else None,
            output_ids=tuple(map(tuple, output_ids)) if content else None,
        )


def _positive(duration_ms: float) -> float | None:
    return None if math.isnan(duration_ms) else round(max(duration_ms, 0.0), 3)
