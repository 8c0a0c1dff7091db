"""SupervisedEngine over scripted engines that die at chosen tokens."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from quire.base.engine_stats import EngineStats
from quire.base.errors import InvalidParameter, OverloadedError, PoisonRequest, WorkerError
from quire.base.log import Log
from quire.base.records import FinishReason
from quire.base.sampling_params import SamplingParams
from quire.engine.client.tokenizer_side import TokenizerSide
from quire.engine.model_card import Health
from quire.engine.output.text_delta import PromptProgress, TextDelta
from quire.engine.supervised import supervised_engine
from quire.engine.supervised.restarts import SETTLED_S, Restarts
from quire.engine.supervised.supervised_engine import SupervisedEngine
from tests.unit.api.fake_engine import CARD

NUM_TOKENS = 6


def delta(stream: int, token: int, **fields: Any) -> TextDelta:
    is_last = token == NUM_TOKENS - 1
    return TextDelta(
        index=stream,
        text=f"{stream}.{token} ",
        token_ids=(token,),
        logprobs=(),
        finish_reason=FinishReason.LENGTH if is_last else None,
        stop_reason=None,
        num_prompt_tokens=2,
        cached_tokens=fields.pop("cached_tokens", 0),
        num_output_tokens=token + 1,
        times=None,
        seed=1,
        error=None,
        **fields,
    )


@dataclass
class FakeClient:
    """An engine that answers token i with "stream.i ".

    dies_at: by prompt, the token at which the engine dies; every request that is open then fails.
    """

    dies_at: dict[int, int] = field(default_factory=dict)
    fingerprint: str = CARD.fingerprint
    cached_tokens: int = 0
    refuses: int = 0
    stalls: bool = False

    def __post_init__(self) -> None:
        self.card = replace(CARD, fingerprint=self.fingerprint)
        self.tokenizer = self.template = None
        self.notes: tuple[str, ...] = ()
        self.loading = (0, 0)
        self.stats = EngineStats()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.dead = asyncio.Event()
        self.is_closed = False
        self.asked: list[dict[str, Any]] = []

    async def ready(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True

    def die(self) -> None:
        self.dead.set()

    def health(self) -> Health:
        state = "dead" if self.dead.is_set() else "ready"
        ok = state == "ready" and not self.stalls
        return Health(ok=ok, state=state, reason="signal 9", pending=0, steps_total=3)

    def num_waiting(self, request_id: str) -> int:
        return 0

    async def generate(
        self, prompt_ids: Any, sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        if self.dead.is_set():
            raise WorkerError("it is dead")
        if self.refuses:
            self.refuses -= 1
            raise OverloadedError("the queue is full")
        if prompt_ids[0] < 0:
            raise InvalidParameter("a negative token")
        self.asked.append({"prompt": prompt_ids, "sampling": sampling, **options})
        first, begin = options["first_stream"], len(options["output_ids"])
        known = delta(first, 0) if begin else None
        if options["terms"].report_progress:
            progress = PromptProgress(processed=2, time_ms=0.0)
            yield replace_delta(delta(first, 0), token_ids=(), text="", prompt_progress=progress)
        for token in range(begin, NUM_TOKENS):
            for stream in range(first, first + sampling.n):
                await asyncio.sleep(0)
                if self.stalls:
                    await self.dead.wait()
                if self.dies_at.get(prompt_ids[0]) == token:
                    self.die()
                if self.dead.is_set():
                    raise WorkerError("ended by signal 9")
                yield replace_delta(
                    delta(stream, token, cached_tokens=self.cached_tokens),
                    known=known if token == begin else None,
                )


def replace_delta(one: TextDelta, **fields: Any) -> TextDelta:
    from msgspec import structs

    return structs.replace(one, **fields)


class FakeSuccessors:
    """step: restarts that are counted when the next engine is asked for."""

    def __init__(self, *clients: FakeClient) -> None:
        self.clients = list(clients)
        self.num_restarts, self.step = 0, 1
        self.current: FakeClient | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    def kill(self, reason: str) -> None:
        assert self.current is not None
        self.current.die()

    async def next(self, reason: str, text_side: TokenizerSide | None = None) -> Any:
        await self.gate.wait()
        if not self.clients:
            raise WorkerError(f"no restart is left after {reason}")
        self.num_restarts += self.step
        self.current = self.clients.pop(0)
        return self.current


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(limited())


async def supervised(*clients: FakeClient) -> tuple[SupervisedEngine, FakeSuccessors]:
    successors = FakeSuccessors(*clients[1:])
    successors.current = clients[0]
    engine = SupervisedEngine(clients[0], successors, Log("test"))  # type: ignore[arg-type]
    await engine.ready()
    return engine, successors


async def text_of(engine: SupervisedEngine, prompt: int, **options: Any) -> str:
    sampling = SamplingParams(max_tokens=NUM_TOKENS, **options.pop("sampling", {}))
    texts: dict[int, str] = {}
    async for one in engine.generate([prompt], sampling, request_id=f"r{prompt}", **options):
        texts[one.index] = texts.get(one.index, "") + one.text
    return "|".join(texts[index] for index in sorted(texts))


WHOLE = "".join(f"0.{token} " for token in range(NUM_TOKENS))


def test_deltas_pass_one_generator_beside_the_engines() -> None:
    async def test() -> None:
        engine, _ = await supervised(FakeClient())
        before, names = sys.get_asyncgen_hooks(), list[str]()
        sys.set_asyncgen_hooks(firstiter=lambda one: names.append(one.__qualname__))
        try:
            assert await text_of(engine, 1) == WHOLE
        finally:
            sys.set_asyncgen_hooks(firstiter=before.firstiter)
        assert names == ["SupervisedRequest.deltas", "FakeClient.generate"]

    run(test)


def test_an_answer_goes_on_at_the_next_engine() -> None:
    async def test() -> None:
        clients = (FakeClient({1: 3}, cached_tokens=1), FakeClient({1: 5}), FakeClient())
        engine, successors = await supervised(*clients)
        seen = []
        sampling = SamplingParams(max_tokens=NUM_TOKENS)
        async for one in engine.generate([1], sampling, request_id="a"):
            seen.append(one)
        assert "".join(one.text for one in seen) == WHOLE
        assert [one.num_output_tokens for one in seen] == [1, 2, 3, 4, 5, 6]
        assert {one.cached_tokens for one in seen} == {1}
        assert all(one.known is None for one in seen)
        assert successors.num_restarts == 2
        seeds = {client.asked[0]["sampling"].seed for client in clients}
        assert len(seeds) == 1
        assert None not in seeds
        assert [client.asked[0]["output_ids"] for client in clients] == [
            (),
            (0, 1, 2),
            (0, 1, 2, 3, 4),
        ]
        assert clients[0].is_closed
        await engine.close()

    run(test)


@pytest.mark.parametrize("n", [2, 3])
def test_each_choice_goes_on_alone(n: int) -> None:
    async def test() -> None:
        clients = (FakeClient({1: 2}), FakeClient())
        engine, _ = await supervised(*clients)
        text = await text_of(engine, 1, sampling={"n": n})
        wanted = ["".join(f"{s}.{t} " for t in range(NUM_TOKENS)) for s in range(n)]
        assert text == "|".join(wanted)
        assert sorted(call["first_stream"] for call in clients[1].asked) == list(range(n))
        assert {call["sampling"].n for call in clients[1].asked} == {1}
        await engine.close()

    run(test)


def test_mirostat_is_computed_anew_and_nothing_is_repeated() -> None:
    async def test() -> None:
        clients = (FakeClient({1: 3}), FakeClient())
        engine, _ = await supervised(*clients)
        assert await text_of(engine, 1, sampling={"mirostat": 2}) == WHOLE
        assert clients[1].asked[0]["output_ids"] == ()
        await engine.close()

    run(test)


def test_progress_is_not_repeated() -> None:
    async def test() -> None:
        from quire.base.scheduling_params import SchedulingParams

        clients = (FakeClient({1: 0}), FakeClient())
        engine, _ = await supervised(*clients)
        terms = SchedulingParams(report_progress=True)
        reports = [
            one.prompt_progress
            async for one in engine.generate(
                [1], SamplingParams(max_tokens=NUM_TOKENS), request_id="a", terms=terms
            )
            if one.prompt_progress is not None
        ]
        assert len(reports) == 1
        await engine.close()

    run(test)


def test_a_poison_request_is_not_tried_a_third_time_and_others_go_on() -> None:
    async def test() -> None:
        clients = [FakeClient({7: 2}) for _ in range(3)]
        engine, successors = await supervised(*clients)
        others = [asyncio.ensure_future(text_of(engine, prompt)) for prompt in range(1, 6)]
        with pytest.raises(PoisonRequest, match="died 2 times"):
            await text_of(engine, 7)
        assert await asyncio.gather(*others) == [WHOLE] * 5
        assert successors.num_restarts == 2
        assert sum(call["prompt"] == [7] for client in clients for call in client.asked) == 2
        assert await text_of(engine, 3) == WHOLE
        await engine.close()

    run(test)


def test_two_deaths_with_tokens_between_are_no_poison() -> None:
    async def test() -> None:
        engine, successors = await supervised(
            *(FakeClient({1: token}) for token in range(1, NUM_TOKENS)), FakeClient()
        )
        assert await text_of(engine, 1) == WHOLE
        assert successors.num_restarts == NUM_TOKENS - 1
        await engine.close()

    run(test)


def test_a_stalled_engine_is_killed() -> None:
    async def test() -> None:
        engine, successors = await supervised(FakeClient(stalls=True), FakeClient())
        assert await text_of(engine, 1) == WHOLE
        assert successors.num_restarts == 1
        await engine.close()

    run(test)


def test_the_last_death_ends_open_requests_and_sets_dead() -> None:
    async def test() -> None:
        engine, _ = await supervised(FakeClient({1: 3}))
        with pytest.raises(WorkerError, match="no restart is left"):
            await text_of(engine, 1)
        await engine.dead.wait()
        assert engine.health().state == "dead"
        assert isinstance(engine.refusal(), WorkerError)
        with pytest.raises(WorkerError):
            await text_of(engine, 1)
        await engine.close()

    run(test)


def test_an_engine_of_another_fingerprint_ends_the_server() -> None:
    async def test() -> None:
        other = FakeClient(fingerprint="fp_other")
        engine, _ = await supervised(FakeClient({1: 3}), other)
        with pytest.raises(WorkerError, match="the model's files have changed"):
            await text_of(engine, 1)
        assert other.is_closed
        assert engine.dead.is_set()
        await engine.close()

    run(test)


def test_between_two_engines_requests_are_refused_with_a_time() -> None:
    async def test() -> None:
        first = FakeClient()
        engine, successors = await supervised(first, FakeClient())
        assert engine.refusal() is None
        successors.gate.clear()
        first.die()
        await asyncio.sleep(0)
        assert engine.health().state == "restarting"
        refusal = engine.refusal()
        assert isinstance(refusal, OverloadedError)
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s >= 1
        with pytest.raises(OverloadedError):
            await engine.flush_cache()
        waiting = asyncio.ensure_future(text_of(engine, 1))  # accepted just before the death
        await asyncio.sleep(0)
        assert not waiting.done()
        successors.gate.set()
        assert await waiting == WHOLE
        assert engine.health().state == "ready"
        assert engine.stats.restarts_total == 1
        await engine.close()

    run(test)


def test_a_full_engine_is_tried_again_by_what_has_begun_only() -> None:
    async def test() -> None:
        engine, _ = await supervised(FakeClient({1: 3}), FakeClient(refuses=2))
        assert await text_of(engine, 1) == WHOLE
        await engine.close()
        engine, _ = await supervised(FakeClient(refuses=1))
        with pytest.raises(OverloadedError):
            await text_of(engine, 1)
        with pytest.raises(InvalidParameter):
            await text_of(engine, -1)
        await engine.close()

    run(test)


class FakeWakers:
    def __init__(self, client: FakeClient) -> None:
        self.client = client
        self.num_spares = 0
        self.text_side: TokenizerSide | None = None

    def prepare(self) -> None:
        self.num_spares += 1

    async def wake(self, text_side: TokenizerSide | None = None) -> Any:
        self.text_side = text_side
        return self.client

    async def end_spare(self) -> None:
        self.num_spares = 0


async def asleep(wakers: FakeWakers) -> SupervisedEngine:
    first: Any = FakeClient()
    engine = SupervisedEngine(first, FakeSuccessors(), Log("test"), wakers=wakers)
    await engine.ready()
    await engine.sleep()
    return engine


def test_a_process_waits_for_the_wake_once_the_sleep_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervised_engine, "_SPARE_AFTER_S", 0.01)

    async def test() -> None:
        wakers = FakeWakers(FakeClient())
        engine = await asleep(wakers)
        while not wakers.num_spares:
            await asyncio.sleep(0)
        assert await text_of(engine, 1) == WHOLE
        assert wakers.text_side is not None, "the tokenizer is not read again"
        assert wakers.text_side.tokenizer is engine.tokenizer
        await engine.close()
        wakers = FakeWakers(FakeClient())
        engine = await asleep(wakers)
        while not wakers.num_spares:
            await asyncio.sleep(0)
        await engine.close()
        assert not wakers.num_spares

    run(test)


def test_a_short_sleep_starts_no_further_process() -> None:
    async def test() -> None:
        wakers = FakeWakers(FakeClient())
        engine = await asleep(wakers)
        assert await text_of(engine, 1) == WHOLE
        assert wakers.num_spares == 0
        await engine.close()

    run(test)


@pytest.mark.parametrize("num_turns", range(6))
def test_closing_ends_an_engine_that_begins_to_wake(num_turns: int) -> None:
    """The cancellation may come in the turn of the event loop in which the wait has ended."""

    async def test() -> None:
        engine = await asleep(FakeWakers(FakeClient()))
        await asyncio.sleep(0)  # its supervision waits for the wake
        engine.begin_waking()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(engine.close(), 10.0)
        assert not engine.dead.is_set()

    run(test)


def test_closing_ends_what_waits_for_an_engine() -> None:
    async def test() -> None:
        first = FakeClient()
        engine, successors = await supervised(first, FakeClient())
        successors.gate.clear()
        first.die()
        waiting = asyncio.ensure_future(text_of(engine, 1))
        await asyncio.sleep(0.01)
        await engine.close()
        with pytest.raises(WorkerError, match="closed"):
            await waiting
        assert not engine.dead.is_set()

    run(test)


def test_restarts_are_delayed_more_and_more_and_limited() -> None:
    restarts = Restarts(4)
    restarts.served(0.0)
    assert [restarts.next_delay_s(1.0) for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    assert "failed 5 times in a row" in restarts.given_up()
    restarts.served(10.0)
    assert restarts.next_delay_s(10.0 + SETTLED_S - 1) is None
    restarts.served(20.0)
    assert restarts.next_delay_s(20.0 + SETTLED_S) == 0.0
    assert restarts.num_total == 5
