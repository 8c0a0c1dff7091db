"""DataParallelEngine: several engines with one model, as one, seen from an event loop.

It has the interface of EngineClient. A request goes where the beginning of its prompt is cached,
unless that engine has too much to do (quire/routing). Where an engine dies, or its process is
stopped, its requests go on at another (quire/engine/supervised). Knows no HTTP and no processes.
Always holds: all engines have one fingerprint, so an answer does not depend on the engine that
computes it; counters never fall; `dead` is set when no engine is left and none is to come.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import cast

from quire.base.cache_usage import CacheReport
from quire.base.clock import Clock
from quire.base.engine_snapshot import EngineSnapshot
from quire.base.engine_stats import EngineStats
from quire.base.errors import InvalidParameter, QuireError, SettingError, WorkerError
from quire.base.log import Log
from quire.base.sampling_params import SamplingParams
from quire.engine.client.engine_client import EngineClient, id_in_use
from quire.engine.data_parallel.member import Member, MemberEngine
from quire.engine.data_parallel.past_totals import PastTotals, life_of
from quire.engine.data_parallel.routing_state import LocalRouting, RoutingState
from quire.engine.data_parallel.sums import (
    notes_of,
    sum_of_cards,
    sum_of_reports,
    sum_of_snapshots,
    sum_of_stats,
)
from quire.engine.model_card import Health, ModelCard
from quire.engine.output.text_delta import TextDelta
from quire.engine.process.messages import TimelinesReported
from quire.engine.supervised.call import Call, CallEngine
from quire.engine.supervised.supervised_engine import SupervisedEngine, not_idle
from quire.engine.supervised.supervised_request import Life, SupervisedRequest, has_died
from quire.routing.policy import RouteKey
from quire.routing.warm_cache import WarmCache
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Returns an engine that is ready. Raises QuireError where there will be none.
ComingEngine = Callable[[], Awaitable[MemberEngine]]
# How often it is looked for engines that are stopped.
_LOOK_S = 0.25
# After an engine has ended, when the counts that other processes have of it are read.
_REREAD_S = (1.0, 9.0)


class DataParallelEngine(CallEngine):
    """engines: clients of engines with one configuration, at least one, by number. routing: what
    the choice reads. past: counters of engines that have ended. coming: engines that are being
    started again, by number."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def __init__(
        self,
        engines: Mapping[int, MemberEngine],
        log: Log,
        *,
        routing: RoutingState | None = None,
        past: PastTotals | None = None,
        coming: Mapping[int, ComingEngine] | None = None,
    ) -> None:
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.dead = asyncio.Event()
        self._log = log
        self._routing = routing or LocalRouting()
        self._past = past or PastTotals()
        self._members = [self._member(number, engine) for number, engine in engines.items()]
        self._coming = dict(coming or {})
        self._policy = WarmCache(self._routing.history, None)
        self._open: dict[str, Member] = {}  # where each request is
        self._clock = Clock()
        self._watching: list[asyncio.Task[None]] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines of the first engine about its start, and how many there are."""
        return notes_of([member.engine.notes for member in self._members])

    @property
    def loading(self) -> tuple[int, int]:
        """Bytes of the weights that are loaded, and all, of all engines."""
        done, total = zip(*(member.engine.loading for member in self._members), strict=True)
        return sum(done), sum(total)

    async def ready(self) -> None:
        """Wait for all engines but those to come. Raises what kept one from starting; all are
        closed then."""
        starts = [asyncio.ensure_future(member.engine.ready()) for member in self._members]
        try:
            await asyncio.gather(*starts)
            self._take_card()
        except QuireError:
            await self.close()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        for member in self._members:
            self._follow(member)
        for number, coming in self._coming.items():
            self._watching.append(asyncio.ensure_future(self._await(number, coming)))
        self._watching.append(asyncio.ensure_future(self._look_for_silent()))
        self._see()

    def default_sampling(self) -> SamplingParams:
        """Return sampling parameters with the model's generation defaults."""
        return self._members[0].engine.default_sampling()

    def check(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        """Raise the RequestError that `generate` would raise for these, if any."""
        self._members[0].engine.check(prompt_ids, sampling)

    async def deltas(self, call: Call) -> AsyncGenerator[TextDelta, None]:
        """See CallEngine."""
        route = _Route(self, call)
        try:
            async with aclosing(SupervisedRequest(route, call).deltas()) as deltas:
                async for delta in deltas:
                    route.see(delta)
                    yield delta
        finally:
            route.leave()

    def num_waiting(self, request_id: str) -> int:
        """Return the number of unread deltas of a request; 0 where it is not open."""
        member = self._open.get(request_id)
        return 0 if member is None else member.engine.num_waiting(request_id)

    async def cache_report(self, *, num_prefixes: int = 0) -> CacheReport:
        """Return what the prefix caches hold together."""
        reports = [
            await member.engine.cache_report(num_prefixes=num_prefixes) for member in self._alive()
        ]
        return sum_of_reports(reports, num_prefixes)

    async def flush_cache(self) -> int:
        """Nothing computed until now is found again; how many blocks were findable."""
        members = self._alive()
        for member in members:
            self._policy.forget(member)
        return sum([await member.engine.flush_cache() for member in members])

    async def engine_snapshot(self) -> EngineSnapshot:
        """Return the queues, the running batches and the KV blocks as of now."""
        return sum_of_snapshots([await member.engine.engine_snapshot() for member in self._alive()])

    async def timelines(self, request_id: str) -> TimelinesReported:
        """Return the timelines of the streams of a request, wherever it ran."""
        found = [await member.engine.timelines(request_id) for member in self._alive()]
        return TimelinesReported(
            ask_id=found[0].ask_id,
            reports=tuple(report for one in found for report in one.reports),
            kept_steps=min(one.kept_steps for one in found),
            kept_ms=max(one.kept_ms for one in found),
        )

    async def sleep(self) -> None:
        """End all engines, which frees their memory, until `wake` or a request starts them.

        Raises as SupervisedEngine.sleep; then none of them has been ended.
        """
        engines = self._sleepers()
        if (refusal := next(filter(None, (one.refusal() for one in engines)), None)) is not None:
            raise refusal
        if self._open:
            raise not_idle(len(self._open))
        # Each begins in the same turn of the event loop: no request arrives between them.
        await asyncio.gather(*(one.sleep() for one in engines))

    async def wake(self) -> None:
        """Start the engines that sleep, and wait until they are ready. Raises QuireError where one
        does not start; the others serve."""
        ends = await asyncio.gather(
            *(one.wake() for one in self._sleepers()), return_exceptions=True
        )
        if (error := next((one for one in ends if one is not None), None)) is not None:
            raise error

    def refusal(self) -> QuireError | None:
        """Return the error of requests that arrive now; None while any engine takes them."""
        refusals = [member.engine.refusal() for member in self._members]
        return None if None in refusals else refusals[0]

    def health(self) -> Health:
        """As EngineClient.health: ok while any engine is; the reason names those that are not."""
        all_health = [member.engine.health() for member in self._members]
        sick = [one for one in all_health if not one.ok]
        reason = "; ".join(
            f"{member.name}: {one.reason}"
            for member, one in zip(self._members, all_health, strict=True)
            if not one.ok
        )
        is_ok = len(sick) < len(all_health)
        return Health(
            ok=is_ok,
            state="ready" if is_ok else sick[0].state,
            reason="" if is_ok else reason,
            pending=sum(one.pending for one in all_health),
            steps_total=self.stats.steps_total,
            silent_ms=min((one.silent_ms for one in all_health if one.pending), default=0),
        )

    async def close(self) -> None:
        """End all engines; open requests get WorkerError. Does not set `dead`."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching.clear()
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # ---- routing

    def block_names(self, scope: str, prompt: bytes) -> list[int]:
        """Return the names of the full blocks of a prompt."""
        return self._routing.block_names(scope, prompt)

    def choose(self, key: RouteKey, request_id: str) -> Member:
        """Return the engine for a request. Raises what all of them refuse it with."""
        if request_id in self._open:
            raise id_in_use(request_id)
        able = [member for member in self._members if member.engine.refusal() is None]
        if not able:
            raise self.refusal() or WorkerError("the engine is gone")
        well = [one for one in able if one.engine.health().ok and not one.is_silent]
        if len(well) < len(able):  # engines sleep together: one request wakes all
            for one in able:
                if isinstance(one.engine, SupervisedEngine):
                    one.engine.begin_waking()
        member = self._policy.choose(well or able, key)
        new_tokens = self._policy.new_tokens(member, key)
        self._policy.sent(member, key)
        self._open[request_id] = member
        member.begin(request_id, key, new_tokens, self._clock.now_ms())
        return member

    def began(self, member: Member, request_id: str) -> None:
        """Learn from the time that a request took to its first output there."""
        before = member.gave_output(request_id)
        seconds = (self._clock.now_ms() - before.came_ms) / 1000
        self._policy.note_first_token(member, before.new_tokens, before.ahead_tokens, seconds)

    def forget(self, member: Member, request_id: str) -> None:
        """Note that a request has ended there."""
        del self._open[request_id]
        member.end(request_id)

    # ---- the engines

    def _member(self, number: int, engine: MemberEngine) -> Member:
        # A SupervisedEngine has the interface of a client.
        return Member(
            number, engine, Life(cast(EngineClient, engine), asyncio.Lock()), self._routing
        )

    def _take_card(self) -> None:
        cards = [member.engine.card for member in self._members]
        check_equal(cards)
        first = self._members[0].engine
        for member in self._members[1:]:
            # One tokenizer: what a request was read with.
            member.engine.tokenizer, member.engine.template = first.tokenizer, first.template
        self.tokenizer, self.template = first.tokenizer, first.template
        self.card = sum_of_cards(cards)

    def _sleepers(self) -> list[SupervisedEngine]:
        """Return the engines that are not gone for ever. Raises InvalidParameter where they cannot
        sleep."""
        left = [member.engine for member in self._members if not member.engine.dead.is_set()]
        able = [engine for engine in left if isinstance(engine, SupervisedEngine)]
        if len(able) < len(left):
            raise InvalidParameter(
                "this server cannot put its engines to sleep; start it with --restart-engine"
            )
        if not able:
            raise self.refusal() or WorkerError("the engine is gone")
        return able

    def _alive(self) -> list[Member]:
        alive = [member for member in self._members if member.engine.refusal() is None]
        if not alive:
            raise self.refusal() or WorkerError("the engine is gone")
        return alive

    def _follow(self, member: Member) -> None:
        """Pass on the counters of an engine, and watch it."""
        member.engine.on_stats = partial(self._see_life, member)
        if isinstance(member.engine, SupervisedEngine):
            member.engine.on_end = partial(self._end_life, member)
        self._watching.append(asyncio.ensure_future(self._watch(member)))

    def _see_life(self, member: Member, latest: EngineStats) -> None:
        """Note the counters of an engine that has made a step, or begins."""
        member.has_ended = False
        self._see(latest)

    def _end_life(self, member: Member) -> None:
        """Count an engine among those of the past; its cache is gone."""
        if not member.has_ended:
            self._policy.forget(member)
            self._past.add(member.number, member.engine.stats, sleeps=member.sleeps)
            member.has_ended = True
            self._see()
            if self._past.is_shared:
                self._watching.append(asyncio.ensure_future(self._reread()))

    async def _reread(self) -> None:
        """Count what other processes have seen of an engine that has ended."""
        for wait_s in _REREAD_S:
            await asyncio.sleep(wait_s)
            self._past.read()
            self._see()

    def _see(self, latest: EngineStats | None = None) -> None:
        """Add the counters of all. latest: of the engine that has made a step."""
        parts = [member.stats() for member in self._members]
        running = {
            life_of(member.number, member.engine.stats, sleeps=member.sleeps)
            for member in self._members
            if not member.has_ended
        }
        if (past := self._past.without(running)) is not None:
            parts.append(past)
        self.stats = sum_of_stats(parts)
        if latest is not None and len(parts) > 1:
            self.stats.step_rows, self.stats.step_tokens = latest.step_rows, latest.step_tokens
        if self.on_stats is not None:
            self.on_stats(self.stats)

    async def _look_for_silent(self) -> None:
        """Let requests go on elsewhere where the process of their engine is stopped: it sends
        something twice a second while it has work, however long its steps are."""
        while True:
            await asyncio.sleep(_LOOK_S)
            stopped = {one for one in self._members if not one.has_ended and one.look()}
            others = [
                one
                for one in self._members
                if one not in stopped and one.engine.refusal() is None and one.engine.health().ok
            ]
            for member in self._members:
                was_silent, member.is_silent = member.is_silent, member in stopped and bool(others)
                if member.is_silent and not was_silent:
                    reason = f"{member.name} has sent nothing for {member.silence.known_s:.1f} s"
                    self._log.warning(
                        "an engine is silent; its requests go on elsewhere",
                        engine=member.number,
                        reason=reason,
                        open=len(member.requests),
                    )
                    member.engine.give_up_requests(reason)

    async def _watch(self, member: Member) -> None:
        await member.engine.dead.wait()
        self._end_life(member)
        self._note_death(member.number, member.engine.health().reason)

    async def _await(self, number: int, coming: ComingEngine) -> None:
        """Let an engine join that is being started again."""
        try:
            member = self._member(number, await coming())
            try:
                check_equal([self.card, member.engine.card])
            except SettingError:
                await member.engine.close()
                raise
        except QuireError as error:
            del self._coming[number]
            self._note_death(number, str(error))
            return
        del self._coming[number]
        self._members.append(member)
        self._past.read()
        self._take_card()
        self._follow(member)
        self._see()

    def _note_death(self, number: int, reason: str) -> None:
        left = sum(not member.engine.dead.is_set() for member in self._members)
        left += len(self._coming)
        self._log.error("an engine died", engine=number, reason=reason, left=left)
        if not left:
            self.dead.set()


def check_equal(cards: Sequence[ModelCard]) -> None:
    """Raise SettingError unless engines give equal answers."""
    first, *others = cards
    for other in others:
        if other.fingerprint != first.fingerprint:
            raise SettingError(
                f"engines of data_parallel_size differ: one has fingerprint "
                f"{first.fingerprint} and context {first.max_model_len}, another "
                f"{other.fingerprint} and {other.max_model_len}; give "
                "--max-model-len or --kv-cache-memory, so that all plan alike, and leave the "
                "model's files as they are during the start"
            )


class _Route:
    """Where one request is computed: the Lives of its SupervisedRequest."""

    def __init__(self, engine: DataParallelEngine, call: Call) -> None:
        self._engine = engine
        self._call = call
        ids = array("i", call.prompt_ids).tobytes()
        expected = (call.sampling.max_tokens or 0) * call.sampling.num_sequences
        self._prompt_tokens = len(call.prompt_ids)
        self._has_output = False  # at the engine that computes it
        self._key = RouteKey(
            blocks=engine.block_names(f"{call.terms.tenant}\0{call.cache_salt}", ids),
            tokens=self._prompt_tokens + expected,
            prompt_tokens=self._prompt_tokens,
        )
        self._member: Member | None = None

    async def now(self) -> Life:
        """Return the engine that computes it, another one after a death."""
        member = self._member
        if member is None or member.engine.dead.is_set() or member.is_silent:
            self.leave()
            self._has_output = False
            self._member = member = self._engine.choose(self._key, self._call.request_id)
        return member.life

    async def has_died(self, life: Life, error: QuireError) -> bool:
        """Return whether an error of the request came from the death of its engine."""
        if type(error) is QuireError:  # it was given up
            return True
        return await has_died(life, error)

    def see(self, delta: TextDelta) -> None:
        """Note what is computed."""
        if self._member is None or delta.prompt_progress is not None:
            return
        request_id = self._call.request_id
        if not self._has_output:
            self._has_output = True
            self._engine.began(self._member, request_id)
        if delta.token_ids:
            self._member.reduce(request_id, len(delta.token_ids))

    def leave(self) -> None:
        """Note that it is computed there no more."""
        if self._member is not None:
            self._engine.forget(self._member, self._call.request_id)
            self._member = None
