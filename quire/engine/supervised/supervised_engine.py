"""SupervisedEngine: an engine that is started again when it dies, seen from an event loop.

It has the interface of EngineClient. A dead engine, or one that makes no progress while work is
pending, is replaced by another that loads the same model; open requests go on there
(supervised_request.py). Knows no HTTP, and no processes: Successors start them. Always holds: every
open request ends, by a finish reason or by an error; answers come from one fingerprint only; `dead`
is set when there will be no further engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from quire.base.cache_usage import CacheReport
from quire.base.clock import Clock
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import InvalidParameter, OverloadedError, QuireError, WorkerError
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.tokenizer_side import TokenizerSide
from quire.engine.model_card import EngineState, Health, ModelCard
from quire.engine.output.text_delta import TextDelta
from quire.engine.process.messages import TimelinesReported
from quire.engine.supervised.call import Call, CallEngine
from quire.engine.supervised.supervised_request import Life, SupervisedRequest, has_died
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# How often progress is checked, at most.
_LOOK_S = 0.25
_MAX_STALLED = 3
# After so long in sleep a process waits for the wake. It takes a core for a part of a second, which
# another engine may need that wakes in this one's place.
_SPARE_AFTER_S = 3.0
# `retry-after` before the duration of a start is known.
_USUAL_START_S = 5.0


class Successors(Protocol):
    """Starts engines, or waits for those that a supervisor starts."""

    @property
    def num_restarts(self) -> int:
        """Restarts so far."""

    def kill(self, reason: str) -> None:
        """End the engine that runs, which makes no progress."""

    async def next(self, reason: str, text_side: TokenizerSide | None = None) -> EngineClient:
        """Return a client of the next engine once it is ready. Raises QuireError if there will be
        none. reason: of the death of the one before. text_side: of the model."""


class Wakers(Protocol):
    """Starts the engine again that was put to sleep."""

    def prepare(self) -> None:
        """Start a process that waits for `wake`, which then takes less time."""

    async def wake(self, text_side: TokenizerSide | None = None) -> EngineClient:
        """Return a client of the next engine once it is ready. Raises QuireError."""

    async def end_spare(self) -> None:
        """End the process that waits, if there is one."""


class SupervisedEngine(CallEngine):
    """first: a client of the engine that was started first. wakers: None where it cannot sleep."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def __init__(
        self,
        first: EngineClient,
        successors: Successors,
        log: Log,
        wakers: Wakers | None = None,
    ) -> None:
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_end: Callable[[], None] | None = None  # of an engine that another follows
        self.dead = asyncio.Event()
        self._successors = successors
        self._wakers = wakers
        self.num_sleeps = 0
        self._num_restarts = 0  # before this life; the next one may run before its end is noted
        self._is_asleep = False
        self._to_sleep = asyncio.Event()
        self._to_wake = asyncio.Event()
        self._has_ended = asyncio.Event()  # the engine that was put to sleep
        self._log = log
        self._clock = Clock()
        self._life = Life(first, asyncio.Lock())
        self._changed = asyncio.Event()  # another life has begun, or there will be none
        self._fault: QuireError | None = None
        self._reason = ""
        self._start_s = _USUAL_START_S
        self._num_open = 0
        self._closed = False
        self._supervising: asyncio.Future[None] | None = None
        self._ending: asyncio.Future[None] | None = None  # of an engine that is put to sleep

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines of the engine about its start."""
        return self._life.client.notes

    @property
    def loading(self) -> tuple[int, int]:
        """Bytes of the weights that are loaded, and all."""
        return self._life.client.loading

    async def ready(self) -> None:
        """Wait for the first engine. Raises what kept it from starting."""
        first = self._life.client
        await first.ready()
        self.card, self.tokenizer, self.template = first.card, first.tokenizer, first.template
        self._follow(first)
        self._supervising = asyncio.ensure_future(self._supervise())

    def default_sampling(self) -> SamplingParams:
        """Return sampling parameters with the model's generation defaults."""
        return self._life.client.default_sampling()

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise the RequestError that `generate` would raise for these, if any."""
        self._life.client.check(prompt_ids, sampling)

    def deltas(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        """See CallEngine."""
        return SupervisedRequest(self, call, self._count_open).deltas()

    def num_waiting(self, request_id: str) -> int:
        """Return the number of unread deltas of a request; 0 where it is not known."""
        return self._life.client.num_waiting(request_id)

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport:
        """Return what the prefix cache of the running engine holds."""
        return await self._running().cache_report(num_prefixes=num_prefixes)

    async def flush_cache(self) -> int:
        """Forget all cached prefixes; return how many blocks were findable."""
        return await self._running().flush_cache()

    async def engine_snapshot(self) -> EngineSnapshot:
        """Return the queue, the running batch and the KV blocks as of now."""
        return await self._running().engine_snapshot()

    async def timelines(self, request_id: str) -> TimelinesReported:
        """Return the timelines of the running engine's streams of a request."""
        return await self._running().timelines(request_id)

    async def sleep(self) -> None:
        """End the engine, which frees its memory, until `wake` or a request starts another.

        Raises InvalidParameter where the server cannot, and OverloadedError while requests are
        open.
        """
        if self._wakers is None:
            raise InvalidParameter(
                "a server with several API processes cannot sleep; start it with --api-processes 1"
            )
        if (refusal := self.refusal()) is not None:
            raise refusal
        if self._num_open:
            raise not_idle(self._num_open)
        if not self._is_asleep:
            self._to_wake.clear()
            self._has_ended.clear()
            self._is_asleep = True  # before the engine ends, so that its end is no death
            self._to_sleep.set()
            self._ending = asyncio.ensure_future(self._end_engine())
            await asyncio.shield(self._ending)  # it ends, too, where this call is cancelled

    async def _end_engine(self) -> None:
        """End the engine that is put to sleep."""
        try:
            await self._life.client.close()
        finally:
            self._has_ended.set()
            if self.on_end is not None:
                self.on_end()
            self.num_sleeps += 1  # the next life's
        self._log.event("the engine sleeps")

    async def wake(self) -> None:
        """Start the engine if it sleeps, and wait until it is ready. Raises QuireError."""
        await self.now()

    def give_up_requests(self, reason: str) -> None:
        """See EngineClient."""
        self._life.client.give_up_requests(reason)

    def begin_waking(self) -> None:
        """Start the engine if it sleeps; does not wait for it."""
        if self._is_asleep:
            self._to_wake.set()

    def refusal(self) -> QuireError | None:
        """Return the error of requests that arrive now; None while an engine runs or sleeps."""
        if self._fault is not None:
            return WorkerError(f"the engine is gone: {self._fault}")
        if self._is_asleep:
            return None  # the request wakes it
        if self._life.client.dead.is_set():
            return OverloadedError(
                f"the engine is being restarted ({self._why_down()}); try again",
                retry_after_s=max(self._start_s, 1.0),
            )
        return None

    def health(self) -> Health:
        """As EngineClient.health; between two engines the state is "restarting"."""
        if self._fault is not None:
            return self._health_of("dead", str(self._fault))
        if self._is_asleep:
            doing = "is being started" if self._to_wake.is_set() else "is started by a request"
            return self._health_of("asleep", f"the engine sleeps and {doing}")
        if self._life.client.dead.is_set():
            return self._health_of("restarting", f"the engine is restarted: {self._why_down()}")
        return self._life.client.health()

    async def close(self) -> None:
        """End the engine; open requests get WorkerError. Does not set `dead`."""
        self._closed = True
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        if self._wakers is not None:
            await self._wakers.end_spare()
        self._fault = self._fault or WorkerError("the engine was closed")
        self._changed.set()
        if self._ending is not None:
            await asyncio.gather(self._ending, return_exceptions=True)
        await self._life.client.close()

    # ---- the engines, as SupervisedRequest sees them

    async def now(self) -> Life:
        """Return the engine that serves; waits while there is none. Raises QuireError."""
        while True:
            if self._fault is not None:
                raise self._fault
            self.begin_waking()
            if not self._is_asleep and not self._life.client.dead.is_set():
                return self._life
            await self._changed.wait()

    async def has_died(self, life: Life, error: QuireError) -> bool:
        """Return whether an error of a request came from the death of its engine."""
        return life.client.dead.is_set() if self._closed else await has_died(life, error)

    # ---- supervision

    def _count_open(self, change: int) -> None:
        self._num_open += change

    async def _supervise(self) -> None:
        try:
            while True:
                await self._until_dead(self._life.client)
                if self._is_asleep and self._wakers is not None:
                    await self._sleep_until_woken(self._wakers)
                    continue
                self._reason = self._life.client.health().reason
                self._log.error(
                    "the engine died and is restarted", reason=self._reason, open=self._num_open
                )
                if self.on_end is not None:
                    self.on_end()
                await self._life.client.close()
                began_ms = self._clock.now_ms()
                client = await self._next()
                self._begin(client, began_ms)
                self._log.event(
                    "the engine was restarted",
                    restarts=self._successors.num_restarts,
                    took_ms=round(self._start_s * 1000),
                    open=self._num_open,
                )
        except QuireError as error:
            self._end(error)
        except Exception as error:  # a bug: end the server rather than leave it without an engine
            self._end(WorkerError(f"the engine cannot be restarted: {error!r}"))
            raise

    async def _sleep_until_woken(self, wakers: Wakers) -> None:
        await self._has_ended.wait()
        try:
            # wait_for of Python 3.11 loses a cancellation that comes with the wake.
            async with asyncio.timeout(_SPARE_AFTER_S):
                await self._to_wake.wait()
        except TimeoutError:
            wakers.prepare()
            await self._to_wake.wait()
        began_ms = self._clock.now_ms()
        try:
            client = await self._checked(await wakers.wake(self._text_side()))
        except QuireError as error:
            self._reason = str(error)
            self._log.error("the engine does not wake and is restarted", reason=self._reason)
            client = await self._next()
        self._is_asleep = False
        self._to_sleep.clear()
        self._begin(client, began_ms)
        self._log.event("the engine woke", took_ms=round(self._start_s * 1000))

    def _begin(self, client: EngineClient, began_ms: float) -> None:
        """Serve with another engine, which was started at began_ms."""
        self._start_s = (self._clock.now_ms() - began_ms) / 1000.0
        self._follow(client)
        self._life = Life(client, asyncio.Lock())
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_dead(self, client: EngineClient) -> None:
        """Wait for the death or the sleep of an engine; end one that makes no progress."""
        num_stalled = 0
        while not (client.dead.is_set() or self._is_asleep):
            ends = [asyncio.ensure_future(one.wait()) for one in (client.dead, self._to_sleep)]
            await asyncio.wait(ends, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                end.cancel()
            if not (client.dead.is_set() or self._is_asleep):
                health = client.health()
                # Once may be because this process was stopped and has read no messages since.
                num_stalled = num_stalled + 1 if health.state == "ready" and not health.ok else 0
                if num_stalled == _MAX_STALLED:
                    self._log.error("the engine makes no progress", reason=health.reason)
                    self._successors.kill(health.reason)

    async def _next(self) -> EngineClient:
        return await self._checked(await self._successors.next(self._reason, self._text_side()))

    def _text_side(self) -> TokenizerSide:
        """Return what open requests and templates were read with, which need not be read again."""
        return TokenizerSide(tokenizer=self.tokenizer, template=self.template)

    async def _checked(self, client: EngineClient) -> EngineClient:
        """Return the client of an engine that gives the same answers. Raises WorkerError."""
        if client.card.fingerprint != self.card.fingerprint:
            await client.close()
            raise WorkerError(
                f"the restarted engine has fingerprint {client.card.fingerprint} and open answers "
                f"have {self.card.fingerprint}: the model's files have changed; start the server "
                "again"
            )
        return client

    def _follow(self, client: EngineClient) -> None:
        """Pass on the counters of an engine, beginning with the latest."""
        self._num_restarts = self._successors.num_restarts
        client.on_stats = self._see
        self._see(client.stats)

    def _see(self, stats: EngineStats) -> None:
        if self._num_restarts:
            stats = replace(stats, restarts_total=self._num_restarts)
        self.stats = stats
        if self.on_stats is not None:
            self.on_stats(stats)

    def _end(self, error: QuireError) -> None:
        self._fault = error
        self._changed.set()
        self.dead.set()

    def _running(self) -> EngineClient:
        refusal = self.refusal()
        if refusal is None and self._is_asleep:
            refusal = OverloadedError("the engine sleeps; wake it (POST /admin/wake)")
        if refusal is not None:
            raise refusal
        return self._life.client

    def _why_down(self) -> str:
        return self._life.client.health().reason

    def _health_of(self, state: EngineState, reason: str) -> Health:
        return Health(
            ok=False,
            state=state,
            reason=reason,
            pending=self._num_open,
            steps_total=self.stats.steps_total,
        )


def not_idle(num_open: int) -> OverloadedError:
    """Return the error of a server that is to sleep with open requests."""
    return OverloadedError(
        f"{num_open} requests are open, and only an idle engine is put to sleep; drain the server "
        "or try again",
        retry_after_s=1.0,
    )
