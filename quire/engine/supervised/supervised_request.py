"""SupervisedRequest: the deltas of one request, from as many engines as it takes.

Where an engine dies, each choice continues at the next engine from what was delivered of it.
Rankings (beams, best_of) and embeddings have delivered nothing before their end and are computed
anew. Always holds: the client sees the deltas of one engine that never died; a request with which
two engines in a row died, without a token between, is not tried again; its deadline counts from its
arrival, whatever engines it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from quire.base.deadline import until_deadline
from quire.base.errors import (
    DeadlineMissed,
    OverloadedError,
    PoisonRequest,
    QuireError,
    TimedOut,
    WorkerError,
)
from quire.base.scheduling_params import SchedulingParams
from quire.engine.client.engine_client import EngineClient
from quire.engine.client.interleaving import interleaved
from quire.engine.output.text_delta import TextDelta
from quire.engine.supervised.call import Call
from quire.engine.supervised.choice_journal import ChoiceJournal

MAX_DEATHS = 2
# Requests that continue are sent one after the other, each once the one before has a token, so that
# an engine that dies again died with one of them. A long prompt or a full engine delays the next by
# this much.
_TURN_S = 1.0
# So long a request that continues tries to enter a full queue.
_FULL_S = 30.0
_RETRY_S = 0.25
# After an error that may come from a death, so long until the death is known.
_DEATH_S = 2.0
# Shorter waits are not taken from the times of a request; the least time that an engine is given.
_MIN_WAITED_MS = 1.0


@dataclass(slots=True, eq=False)
class Life:
    """One engine from its start to its death. turns: of requests that continue with it."""

    client: EngineClient
    turns: asyncio.Lock


class Lives(Protocol):
    """The engines, one after another."""

    async def now(self) -> Life:
        """Return the engine that serves; waits while there is none. Raises QuireError where there
        will be none."""

    async def has_died(self, life: Life, error: QuireError) -> bool:
        """Return whether an error of a request came from the death of its engine."""


async def has_died(life: Life, error: QuireError) -> bool:
    """Return whether an error of a request came from the death of its engine.

    A message that could not be sent is the first sign of a death: that is waited for.
    """
    dead = life.client.dead
    if not dead.is_set() and isinstance(error, WorkerError):
        try:
            async with asyncio.timeout(_DEATH_S):
                await dead.wait()
        except TimeoutError:
            return False
    return dead.is_set()


class SupervisedRequest:
    """One call of generate. count: called with 1 when it begins, with -1 when it has ended."""

    def __init__(
        self, lives: Lives, call: Call, count: Callable[[int], None] = lambda change: None
    ) -> None:
        self._lives, self._count = lives, count
        # One seed for all engines; none is drawn for a request that has one.
        self._call = replace(call, sampling=call.sampling.resolve())
        self._journals: dict[int, ChoiceJournal] = {}  # by stream
        self._num_deaths = 0
        self._progress = 0  # prompt tokens that were reported
        self._was_sent = False
        self._has_moved = False  # since it was sent to the engine that runs
        self._was_shortened = False  # its deadline, by what it has waited
        self._full_since_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._came_s = self._loop.time()
        self._deadline_s: float | None = None
        if call.terms.deadline_ms is not None:
            left_ms = call.terms.deadline_ms - call.terms.waited_ms
            self._deadline_s = self._came_s + left_ms / 1000.0

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield the deltas. Raises as Engine.generate does."""
        is_first = True
        self._count(1)
        try:
            while True:
                async with self._in_time():
                    life = await self._lives.now()
                self._was_sent = self._has_moved = False
                run = self._run(life, self._call_now()) if is_first else self._resent(life)
                is_first = False
                try:
                    async with aclosing(run) as deltas:
                        async for delta in deltas:
                            if (found := self._noted(delta)) is not None:
                                yield found
                    return
                except QuireError as error:
                    async with self._in_time():
                        has_died = await self._lives.has_died(life, error)
                    if has_died:
                        self._count_death(error)
                    else:
                        await self._wait_for_room(error)
        finally:
            self._count(-1)

    def _count_death(self, error: QuireError) -> None:
        """Raise PoisonRequest at the second death without a token between."""
        if not self._was_sent:
            return
        self._num_deaths = 1 if self._has_moved else self._num_deaths + 1
        if self._num_deaths >= MAX_DEATHS:
            raise PoisonRequest(
                f"the engine died {self._num_deaths} times with this request, so it is not tried "
                f"again; the last time because {error}"
            ) from error

    async def _wait_for_room(self, error: QuireError) -> None:
        """Wait before the next try where an engine that is full refused what has begun; raise any
        other error, and this one after some time."""
        now_s = self._loop.time()
        if isinstance(error, TimedOut | DeadlineMissed) and self._was_shortened and self._is_late:
            raise self._late() from error
        if self._full_since_s is None:
            self._full_since_s = now_s
        has_begun = self._journals or self._num_deaths
        is_full = isinstance(error, OverloadedError) and not isinstance(error, TimedOut)
        if not (has_begun and is_full) or now_s - self._full_since_s > _FULL_S:
            raise error
        async with self._in_time():
            await asyncio.sleep(_RETRY_S)

    # ---- its deadline

    @property
    def _is_late(self) -> bool:
        return self._deadline_s is not None and self._loop.time() >= self._deadline_s

    def _late(self) -> OverloadedError:
        """Return the error of a request that was not complete at its deadline."""
        wanted = f"{self._call.terms.deadline_ms or 0.0:g} ms after the request came"
        if self._journals:
            return TimedOut(
                f"the answer was not complete {wanted}, its deadline_ms; it was ended while "
                "another engine was to continue it: allow more time, or ask for fewer tokens"
            )
        return DeadlineMissed(
            f"no engine had given any of the answer until its deadline, {wanted}: try again later, "
            "or allow more time"
        )

    def _in_time(self) -> AbstractAsyncContextManager[None]:
        """Run a block that waits; raise once the deadline has passed."""
        return until_deadline(self._deadline_s, self._late)

    def _call_now(self) -> Call:
        """Return the call with what is left of its times."""
        terms = self._terms_left()
        return self._call if terms is self._call.terms else replace(self._call, terms=terms)

    def _terms_left(self) -> SchedulingParams:
        """Return the terms with what is left of the deadline and of the time to the first token.

        Each engine counts them from when it gets the request. Raises where the deadline has passed.
        A request that was accepted by an engine is served where its first token is late.
        """
        terms, elapsed_ms = self._call.terms, (self._loop.time() - self._came_s) * 1000.0
        has_times = terms.deadline_ms is not None or terms.ttft_slo_ms is not None
        if not has_times or elapsed_ms < _MIN_WAITED_MS:
            return terms
        if self._is_late:
            raise self._late()
        self._was_shortened = True
        deadline_ms, ttft_ms = terms.deadline_ms, terms.ttft_slo_ms
        if deadline_ms is not None:
            deadline_ms -= elapsed_ms
        if ttft_ms is not None:
            is_over = ttft_ms <= elapsed_ms and self._num_deaths > 0
            ttft_ms = None if is_over else max(ttft_ms - elapsed_ms, _MIN_WAITED_MS)
        return replace(terms, deadline_ms=deadline_ms, ttft_slo_ms=ttft_ms)

    # ---- what an engine is sent

    async def _resent(self, life: Life) -> AsyncGenerator[TextDelta, None]:
        """Send the request when its turn has come; the turn ends with its first token."""
        turn = Turn(life.turns)
        async with self._in_time():
            await turn.take()
        try:
            async with aclosing(self._continued(life)) as deltas:
                async for delta in deltas:
                    if delta.prompt_progress is None:
                        turn.leave()
                    yield delta
        finally:
            turn.leave()

    def _continued(self, life: Life) -> AsyncGenerator[TextDelta, None]:
        """Return what follows the deltas that were delivered."""
        if not self._journals:
            return self._run(life, self._call_now())
        first, sampling = self._call.first_stream, self._call.sampling
        runs = []
        for stream in range(first, first + sampling.num_sequences):
            journal = self._journals.setdefault(stream, ChoiceJournal(self._call.output_ids))
            if not journal.has_ended:
                runs.append(self._run(life, self._rest_of(stream, journal)))
        return runs[0] if len(runs) == 1 else interleaved(runs)

    def _rest_of(self, stream: int, journal: ChoiceJournal) -> Call:
        """Return the call that continues one choice."""
        call, sampling = self._call, replace(self._call.sampling, n=1, best_of=None)
        is_anew = bool(sampling.mirostat)
        journal.resume(is_anew=is_anew)
        if any(each.has_prompt_logprobs for each in self._journals.values()):
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            call,
            sampling=sampling,
            request_id=f"{call.request_id}.{stream}" if call.sampling.n > 1 else call.request_id,
            first_stream=stream,
            # Its first token was delivered.
            terms=replace(self._terms_left(), ttft_slo_ms=None, report_progress=False),
            text_rules=replace(call.text_rules, held_tokens=0 if is_anew else journal.held_tokens),
            output_ids=() if is_anew else tuple(journal.output_ids),
        )

    def _run(self, life: Life, call: Call) -> AsyncGenerator[TextDelta, None]:
        """Run a call with an engine."""
        self._was_sent = not life.client.dead.is_set()
        return life.client.generate(
            call.prompt_ids,
            call.sampling,
            request_id=call.request_id,
            first_stream=call.first_stream,
            cache_salt=call.cache_salt,
            terms=call.terms,
            text_rules=call.text_rules,
            output_ids=call.output_ids,
        )

    def _noted(self, delta: TextDelta) -> TextDelta | None:
        """Note a delta of an engine; return what of it is delivered, None for nothing."""
        if delta.prompt_progress is not None:
            if delta.prompt_progress.processed <= self._progress:
                return None
            self._progress = delta.prompt_progress.processed
            return delta
        self._full_since_s = None
        journal = self._journals.get(delta.index)
        if journal is None:
            journal = self._journals[delta.index] = ChoiceJournal(self._call.output_ids)
        found = journal.continued(delta)
        if found is not None:
            self._has_moved = True
            journal.delivered(found)
        return found


class Turn:
    """The right to continue a request now; it is lost after a while, so that others go on."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns = turns
        self._limit: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Wait for it."""
        await self._turns.acquire()
        self._limit = asyncio.get_running_loop().call_later(_TURN_S, self.leave)

    def leave(self) -> None:
        """Let the next go on. A second call has no effect."""
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._turns.release()
