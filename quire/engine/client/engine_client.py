"""EngineClient: the engine's face in an event loop, whether it runs in a process or a thread.

    client = EngineClient.spawn(config)        # returns at once; the engine starts beside us
    await client.ready()                       # raises what the engine could not do
    async for delta in client.generate(prompt_ids, sampling, request_id="r1"): ...
    await client.close()

Makes Requests (one a stream), sends them, and turns what comes back into text. Knows no HTTP and
no scheduling. Always holds: each open generate ends, by a finish reason or by an error; a dead
engine raises WorkerError in all of them; closing a generator aborts what still runs; what waits for
a reader that does not keep up is bounded, because its request then stands aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from quire.base.cache_usage import CacheReport
from quire.base.clock import Clock
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import InvalidParameter, QuireError, WorkerError
from quire.base.records import Request
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import DEFAULT_SCHEDULING, SchedulingParams
from quire.config.groups import EngineConfig
from quire.engine.client.deliveries import MAX_AT_ONCE, Deliveries, Unread
from quire.engine.client.launch import EngineProcess, SharedEngine
from quire.engine.client.open_streams import OpenStreams, UnreadQueue
from quire.engine.client.pending_queries import PendingQueries
from quire.engine.client.request_builder import default_sampling, make_requests
from quire.engine.client.tokenizer_side import TokenizerSide, load_tokenizer_side
from quire.engine.model_card import EngineState, Health, ModelCard
from quire.engine.output.best_of import Ranking
from quire.engine.output.output_stream import PLAIN_TEXT, TextDelta, TextRules
from quire.engine.process.message_routing import id_prefix, query_number_base
from quire.engine.process.messages import (
    PROTOCOL_VERSION,
    Abort,
    Beat,
    CacheReported,
    Failed,
    Fault,
    FromEngine,
    Hello,
    Hold,
    Loading,
    Outputs,
    QueryCache,
    QuerySnapshot,
    QueryTimelines,
    Ready,
    Refused,
    SnapshotReported,
    Submit,
    TimelinesReported,
    ToEngine,
    error_of,
    fault_of,
)
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Maximum unread numbers of a request before it is held: tokens, and the log-probabilities
# delivered with each.
MAX_UNREAD = 2048
NOT_SENT = "the engine takes no messages; it is gone, or about to be"


class Link(Protocol):
    """Carries messages to an engine and back into the event loop."""

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[FromEngine], None],
        on_end: Callable[[str], None],
    ) -> None: ...

    def send(self, message: ToEngine) -> bool: ...

    async def close(self) -> None: ...


class EngineClient:
    """One engine, seen from an event loop. All methods belong to that loop's thread.

    `card`, `tokenizer` and `template` may be read once `ready()` has returned; `notes` are the
    engine's lines about its start (the memory sum). `stats` is the latest known (all zeros at
    first); `on_stats`, where set, is called with those of every step. `loading` is (done, total)
    bytes of the weights. `dead` is set when the engine is gone, for whatever reason but close().
    `watchdog_s`: without progress for so long (a step that ends, or operations done within one)
    while work is pending, health() says no. number: among several clients of one engine, or 0.
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def __init__(
        self, link: Link, config: EngineConfig, *, watchdog_s: float = 60.0, number: int = 0
    ) -> None:
        self.config = config
        self.notes: tuple[str, ...] = ()
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.loading = (0, 0)
        self.dead = asyncio.Event()
        self._link = link
        self._clock = Clock()
        self._watchdog_ms = watchdog_s * 1000
        self._state: EngineState = "starting"
        self._closed = False
        self._fault: Fault | None = None
        self._started: asyncio.Future[ModelCard] | None = None
        self._streams: OpenStreams[Unread] = OpenStreams(id_prefix(number))
        self._callers: dict[str, tuple[str, ...]] = {}  # stream ids by the caller's id
        self._unread: dict[str, Unread] = {}  # what waits, by the caller's id
        self._deliveries = Deliveries()
        self._queries: PendingQueries[Any] = PendingQueries(query_number_base(number))
        self._id_prefix = id_prefix(number)
        self._progress_ms = self._message_ms = 0.0
        self._num_given_up = 0  # since the engine's last message
        self._ops_done = -1
        self._defaults: SamplingParams | None = None  # made once, by the card

    @classmethod
    def spawn(cls, config: EngineConfig, *, watchdog_s: float = 60.0) -> EngineClient:
        """Start an engine process; returns at once, needs no running loop. Imports overlap."""
        return cls.attach(EngineProcess.launch(config), config, watchdog_s=watchdog_s)

    @classmethod
    def attach(
        cls,
        process: EngineProcess | SharedEngine,
        config: EngineConfig,
        *,
        watchdog_s: float = 60.0,
    ) -> EngineClient:
        """Return a client of a process that was launched with `config`, perhaps one of several."""
        from quire.engine.client.process_link import (
            ProcessLink,  # zmq: the in-process engine needs none
        )

        link = ProcessLink(process)
        return cls(link, config, watchdog_s=watchdog_s, number=process.client)

    @classmethod
    def in_process(cls, config: EngineConfig, *, watchdog_s: float = 60.0) -> EngineClient:
        """Start an engine in a thread of this process."""
        config.check_one_engine()
        from quire.engine.client.thread_link import (
            ThreadLink,  # all that computes: a process's client needs none
        )

        return cls(ThreadLink(config), config, watchdog_s=watchdog_s)

    async def ready(self, text_side: TokenizerSide | None = None) -> None:
        """Wait until the engine can answer. Raises what kept it from starting; it is closed then.

        text_side: of the model, if it is loaded already.
        ConfigError, WeightsError, TokenizerError, CapacityError, SettingError, WorkerError.
        """
        if self._started is None:
            loop = asyncio.get_running_loop()
            self._started = loop.create_future()
            self._link.open(loop, self._on_message, self._on_end)
        reading = asyncio.create_task(
            asyncio.to_thread(lambda: text_side or load_tokenizer_side(self.config.model))
        )
        try:
            # Report a wrong template at once: loading weights may take minutes.
            both: set[asyncio.Future[Any]] = {self._started, reading}
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
            if reading.done():
                reading.result()
            self.card = await asyncio.shield(self._started)
            text = await reading
        except QuireError:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await self.close()
            raise
        self.tokenizer, self.template = text.tokenizer, text.template
        if self._state == "starting":
            self._state = "ready"

    def default_sampling(self) -> SamplingParams:
        """Return sampling parameters with the model's generation defaults."""
        if self._defaults is None:
            self._defaults = default_sampling(self.card)
        return self._defaults

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise the RequestError that `generate` would raise for these, if any."""
        make_requests(
            self.card, prompt_ids, sampling, request_id="", arrival_ms=0.0, encoder=self.tokenizer
        )

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        first_stream: int = 0,
        cache_salt: str = "",
        terms: SchedulingParams = DEFAULT_SCHEDULING,
        text_rules: TextRules = PLAIN_TEXT,
        output_ids: Sequence[int] = (),
    ) -> AsyncGenerator[TextDelta, None]:
        """Stream the n choices of one request, interleaved; each delta has its `index`.

        With best_of above n, and with beams, each choice comes as one delta at the end.
        Indexes count from `first_stream`: requests that share a seed and differ in it draw
        different noise. Requests with different `cache_salt` share no prefix; answers do not
        depend on it. output_ids: known tokens of the answer; deltas begin after them.

        An async generator: close it (`aclose`) to abort what still runs. Raises at the first
        step RequestError where the request cannot be served (ContextTooLong with both numbers),
        OverloadedError where the queue is full, and at any step WorkerError where the engine
        died. An error of one stream comes as a delta with finish_reason "error" and does not end
        the others.
        """
        self._check_takes_requests(request_id)
        requests = make_requests(
            self.card,
            prompt_ids,
            sampling,
            request_id=self._streams.fresh_id(request_id),
            arrival_ms=self._clock.now_ms(),
            first_stream=first_stream,
            cache_salt=cache_salt,
            terms=terms,
            encoder=self.tokenizer,
            shown_ids=text_rules.shown_ids,
            output_ids=output_ids,
        )
        unread, stream_ids = self._register(request_id, requests, text_rules)
        ranking = Ranking(sampling, first_stream) if sampling.is_ranked else None
        try:
            if not self._link.send(Submit(requests=requests)):
                raise WorkerError(NOT_SENT)
            num_open = len(requests)
            while num_open:
                item = await unread.get()
                if isinstance(item, Fault):
                    raise error_of(item)
                if item.finish_reason is not None:
                    num_open -= 1
                if ranking is None:
                    yield item
                    continue
                for delta in ranking.take(item):
                    yield delta
        finally:
            del self._callers[request_id], self._unread[request_id]
            self._send_abort(self._streams.close(stream_ids))

    def num_waiting(self, request_id: str) -> int:
        """Return the number of unread deltas of a request; 0 where it is not open."""
        unread = self._unread.get(request_id)
        return 0 if unread is None else len(unread)

    async def abort(self, request_id: str) -> None:
        """End the streams of a request; its generator yields their last deltas ("abort")."""
        self._send_abort(self._callers.get(request_id, ()))

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport:
        """Return what the prefix cache holds, with the prefixes that spared most tokens."""
        reported: CacheReported = await self._ask(QueryCache, num_prefixes=num_prefixes)
        return reported.report

    async def flush_cache(self) -> int:
        """Forget all cached prefixes; return how many blocks were findable."""
        reported: CacheReported = await self._ask(QueryCache, flush=True)
        return reported.flushed_blocks

    async def engine_snapshot(self) -> EngineSnapshot:
        """Return the queue, the running batch and the KV blocks as of now."""
        reported: SnapshotReported = await self._ask(QuerySnapshot)
        return reported.snapshot

    async def timelines(self, request_id: str) -> TimelinesReported:
        """Return the timelines of the streams of a request, whether it runs or has ended."""
        own = f"{self._id_prefix}{request_id}"
        prefixes = (f"{own}#", f"{own}.")  # of one prompt, or of each of several
        reported: TimelinesReported = await self._ask(QueryTimelines, prefixes=prefixes)
        return reported

    def give_up_requests(self, reason: str) -> None:
        """Fail what is open with a QuireError; the engine drops it once it goes on, and answers."""
        self._num_given_up += len(self._streams)
        ask_id, answer = self._queries.open()
        answer.cancel()  # any message of the engine will do
        self._link.send(QuerySnapshot(ask_id=ask_id))
        self._send_abort(tuple(id_ for ids in self._callers.values() for id_ in ids))
        self._deliveries.finish()
        for unread in self._streams.end():
            unread.put(Fault(kind=QuireError.__name__, message=reason))

    def refusal(self) -> QuireError | None:
        """Return the error of requests that arrive now; None while the engine takes them."""
        is_dead = self.dead.is_set()
        return WorkerError(f"the engine is gone: {self.health().reason}") if is_dead else None

    def health(self) -> Health:
        """Progress: ok only in state ready, and if something is computed while work is pending."""
        reason = ""
        now_ms = self._clock.now_ms()
        quiet_ms = now_ms - self._progress_ms
        if self._state == "dead":
            reason = self._fault.message if self._fault is not None else "the engine is gone"
        elif self._state != "ready":
            reason = f"the engine is {self._state}"
        elif quiet_ms > self._watchdog_ms and self._is_working:
            reason = (
                f"{self._pending} requests are open and nothing was computed for {quiet_ms:.0f} ms"
            )
        return Health(
            ok=not reason,
            state=self._state,
            reason=reason,
            pending=self._pending,
            steps_total=self.stats.steps_total,
            silent_ms=round(now_ms - self._message_ms) if self._is_working else 0,
        )

    async def close(self) -> None:
        """End the engine; open streams get WorkerError. Does not set `dead`. Twice is once."""
        if self._closed:
            return
        self._closed = True
        self._end(Fault(kind=WorkerError.__name__, message="the engine was closed"))
        await self._link.close()

    # ---- what comes from the engine

    def _on_message(self, message: FromEngine) -> None:
        self._message_ms, self._num_given_up = self._clock.now_ms(), 0
        if isinstance(message, Outputs):
            if message.stats.steps_total != self.stats.steps_total:
                self._progress_ms = self._message_ms
            if not message.stats.expert_tokens_total:
                message.stats.expert_tokens_total = self.stats.expert_tokens_total
            self.stats = message.stats
            if self.on_stats is not None:
                self.on_stats(self.stats)
            deltas, past_end = self._streams.take(message)
            if len(deltas) > MAX_AT_ONCE or self._deliveries.is_active:
                self._deliveries.add(deltas)
            else:
                for unread, delta in deltas:
                    unread.put(delta)
            self._send_abort(past_end)
        elif isinstance(message, Beat):
            if message.ops_done != self._ops_done:
                self._progress_ms = self._message_ms
            self._ops_done = message.ops_done
        elif isinstance(message, Refused):
            for unread in self._streams.end(message.request_ids):
                unread.put(message.fault)
        elif isinstance(message, CacheReported | SnapshotReported | TimelinesReported):
            self._queries.answered(message.ask_id, message)
        elif isinstance(message, Failed):
            self._die(message.fault)
        elif isinstance(message, Ready):
            self.notes = message.notes
            if self._started is not None and not self._started.done():
                self._started.set_result(message.card)
        elif isinstance(message, Loading):
            self.loading = (message.done_bytes, message.total_bytes)
        elif isinstance(message, Hello) and message.protocol_version != PROTOCOL_VERSION:
            error = WorkerError(
                f"the engine speaks version {message.protocol_version}, this client "
                f"{PROTOCOL_VERSION}; install one version of quire in both places"
            )
            self._die(fault_of(error))

    def _on_end(self, reason: str) -> None:
        self._die(fault_of(WorkerError(reason)))

    def _die(self, fault: Fault) -> None:
        if self._state != "dead":
            self._end(fault)
            self.dead.set()

    def _end(self, fault: Fault) -> None:
        """Fail every waiting caller. Later calls keep the first reason."""
        self._state = "dead"
        self._fault = self._fault or fault
        if self._started is not None and not self._started.done():
            self._started.set_exception(error_of(fault))
            self._started.exception()  # retrieved here: its waiter may have been cancelled
        self._deliveries.finish()
        for unread in self._streams.end():
            unread.put(fault)
        self._queries.fail(error_of(fault))

    async def _ask(self, query: Callable[..., ToEngine], **content: Any) -> Any:
        """Return the engine's answer to a query."""
        self._check_answers()
        ask_id, answer = self._queries.open()
        if not self._link.send(query(ask_id=ask_id, **content)):
            self._queries.fail(WorkerError(NOT_SENT))
        return await answer

    # ---- open streams

    def _check_answers(self) -> None:
        if self._state == "dead":
            raise error_of(self._fault) if self._fault else WorkerError("the engine is gone")
        if self._state == "starting":
            raise WorkerError("the engine is still starting; wait for ready()")

    def _check_takes_requests(self, request_id: str) -> None:
        self._check_answers()
        if request_id in self._callers:
            raise id_in_use(request_id)

    def _register(
        self, request_id: str, requests: tuple[Request, ...], text_rules: TextRules
    ) -> tuple[Unread, tuple[str, ...]]:
        if not self._is_working:
            self._progress_ms = self._message_ms = self._clock.now_ms()
        stream_ids = tuple(request.request_id for request in requests)
        sampling = requests[0].sampling
        numbers = 1 + abs(sampling.logprobs or 0) + len(sampling.logprob_token_ids)
        most = max(MAX_UNREAD // numbers, 16)
        unread: Unread = UnreadQueue(most, lambda is_held: self._hold(stream_ids, is_held=is_held))
        self._streams.open(self.tokenizer, requests, unread, text_rules)
        self._callers[request_id], self._unread[request_id] = stream_ids, unread
        return unread, stream_ids

    @property
    def _is_working(self) -> bool:
        """Return whether the engine has streams to compute: open ones that are not held."""
        if self.stats.running + self.stats.waiting + self._num_given_up:
            return True  # perhaps another client's, or aborted when the engine hung already
        return any(not unread.is_held for unread in self._streams.owners())

    @property
    def _pending(self) -> int:
        """Streams that are not finished, of all clients, and aborted ones that still are there."""
        own, stats = len(self._streams) + self._num_given_up, self.stats
        return max(own, stats.running + stats.waiting + stats.held)

    def _hold(self, stream_ids: tuple[str, ...], *, is_held: bool) -> None:
        if not is_held and not self._is_working:
            self._progress_ms = self._message_ms = self._clock.now_ms()
        if self._state != "dead":
            self._link.send(Hold(request_ids=stream_ids, is_held=is_held))

    def _send_abort(self, stream_ids: tuple[str, ...]) -> None:
        if stream_ids and self._state != "dead":
            self._link.send(Abort(request_ids=stream_ids))


def id_in_use(request_id: str) -> InvalidParameter:
    """Return the error of a request with the id of one that runs."""
    return InvalidParameter(
        f"request id {request_id!r} is in use by a request that still runs; use another",
        param="request_id",
    )
