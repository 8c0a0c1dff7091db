"""Deadlines of requests with which an engine has died: they count from the arrival.

Always holds: a story is in virtual time, so what it finds depends on no load.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from bench.router.virtual_time import run_virtual
from quire.base.errors import DeadlineMissed, TimedOut
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.engine.output.text_delta import TextDelta
from quire.engine.supervised.supervised_engine import SupervisedEngine
from tests.unit.engine.supervised.test_supervised_engine import (
    NUM_TOKENS,
    WHOLE,
    FakeClient,
    FakeSuccessors,
    supervised,
    text_of,
)

TIMES = SchedulingParams(deadline_ms=5000.0, ttft_slo_ms=3000.0)
RESTART_S = 2.0


def run(
    story: Callable[[SupervisedEngine, FakeSuccessors], Awaitable[None]], *clients: FakeClient
) -> None:
    """Run a story with an engine of which each restart takes RESTART_S."""

    async def go() -> None:
        engine, successors = await supervised(*clients)
        next_now = successors.next

        async def next_later(*arguments: Any) -> Any:
            await asyncio.sleep(RESTART_S)
            return await next_now(*arguments)

        successors.next = next_later  # type: ignore[method-assign]
        async with asyncio.timeout(600):
            await story(engine, successors)
        await engine.close()

    run_virtual(go())


async def seconds_until(error: type[Exception], answer: Awaitable[str], match: str) -> float:
    """Return after how many seconds a request ends with an error."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(error, match=match):
        await answer
    return loop.time() - began_s


def terms_of(client: FakeClient) -> SchedulingParams:
    [asked] = client.asked
    terms = asked["terms"]
    assert isinstance(terms, SchedulingParams)
    return terms


@pytest.mark.parametrize("num_delivered", [0, 3])
def test_the_next_engine_has_what_is_left_of_the_deadline(num_delivered: int) -> None:
    first, second = FakeClient({1: num_delivered}), FakeClient()

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        assert await text_of(engine, 1, terms=TIMES) == WHOLE

    run(story, first, second)
    assert terms_of(first) == TIMES
    left = terms_of(second)
    assert left.deadline_ms == pytest.approx(3000.0, abs=1.0)
    if num_delivered:
        assert left.ttft_slo_ms is None, "its first token is delivered"
    else:
        assert left.ttft_slo_ms == pytest.approx(1000.0, abs=1.0)


def test_a_request_that_was_accepted_is_served_though_its_first_token_is_late() -> None:
    first, second = FakeClient({1: 0}), FakeClient()

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        assert await text_of(engine, 1, terms=SchedulingParams(ttft_slo_ms=500.0)) == WHOLE

    run(story, first, second)
    assert terms_of(second) == SchedulingParams()


def test_a_request_that_came_during_the_restart_has_waited_for_it() -> None:
    first, second = FakeClient(), FakeClient()

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        first.die()
        await asyncio.sleep(0.5)
        soon = SchedulingParams(deadline_ms=5000.0, ttft_slo_ms=500.0)
        assert await text_of(engine, 1, terms=soon) == WHOLE

    run(story, first, second)
    left = terms_of(second)
    assert left.deadline_ms == pytest.approx(3500.0, abs=1.0)
    assert left.ttft_slo_ms == 1.0, "it was not accepted before: the engine judges it"


@pytest.mark.parametrize(
    ("num_delivered", "error", "match"),
    [
        (0, DeadlineMissed, "no engine had given any of the answer until its deadline, 1500 ms"),
        (3, TimedOut, "the answer was not complete 1500 ms after the request came"),
    ],
)
def test_no_engine_is_waited_for_beyond_the_deadline(
    num_delivered: int, error: type[Exception], match: str
) -> None:
    first, second = FakeClient({1: num_delivered}), FakeClient()

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        answer = text_of(engine, 1, terms=SchedulingParams(deadline_ms=1500.0))
        assert await seconds_until(error, answer, match) == pytest.approx(1.5, abs=0.01)
        assert await text_of(engine, 2) == WHOLE, "others wait"

    run(story, first, second)
    assert [one["prompt"] for one in second.asked] == [[2]]


def test_room_at_the_next_engine_is_not_waited_for_beyond_the_deadline() -> None:
    first, second = FakeClient({1: 3}), FakeClient(refuses=10_000)

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        answer = text_of(engine, 1, terms=TIMES)
        found_s = await seconds_until(TimedOut, answer, "not complete 5000 ms")
        assert found_s == pytest.approx(5.0, abs=0.01)

    run(story, first, second)
    assert second.refuses < 10_000


class Ending(FakeClient):
    """An engine that ends a request at its deadline, after so many tokens."""

    after = 3

    async def generate(
        self, prompt_ids: Any, sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        count, loop = 0, asyncio.get_running_loop()
        until_s = loop.time() + options["terms"].deadline_ms / 1000.0
        async for delta in super().generate(prompt_ids, sampling, **options):
            if count == self.after:
                await asyncio.sleep(until_s - loop.time())
                raise TimedOut("the answer was not complete, says the engine")
            count += 1
            yield delta


def test_a_deadline_that_passes_ends_a_request_that_has_begun() -> None:
    """It is no engine that is full, where it would be tried again."""
    only = Ending()

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        answer = text_of(engine, 1, terms=TIMES)
        assert await seconds_until(TimedOut, answer, "says the engine") == pytest.approx(5.0)

    run(story, only)
    assert terms_of(only) == TIMES


def test_the_error_of_the_next_engine_has_the_deadline_of_the_client() -> None:
    first, second = FakeClient({1: 2}), Ending()
    assert Ending.after < NUM_TOKENS - 2

    async def story(engine: SupervisedEngine, _: FakeSuccessors) -> None:
        answer = text_of(engine, 1, terms=TIMES)
        found_s = await seconds_until(TimedOut, answer, "not complete 5000 ms")
        assert found_s == pytest.approx(5.0, abs=0.01)

    run(story, first, second)
