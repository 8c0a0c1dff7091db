"""PromptAdmission: the prompts of one request before an engine with little room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.router.virtual_time import run_virtual
from quire.api.generation.prompt_admission import PromptAdmission
from quire.base.errors import (
    DeadlineMissed,
    OverloadedError,
    QueueTimedOut,
    QuireError,
    TenantLimit,
)
from quire.engine.client.interleaving import interleaved
from tests.drawn import examples


class _Engine:
    """Runs at most `room` prompts, each for some turns of the event loop; counts what is sent."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_running = 0
        self.num_begun = 0
        self.num_sent = 0
        self.waited_s: list[float] = []
        self.refusal: Callable[[], QuireError] = lambda: OverloadedError("full", retry_after_s=2.0)

    async def prompt(
        self, number: int, num_turns: int, waited_s: float
    ) -> AsyncGenerator[int, None]:
        self.num_sent += 1
        self.waited_s.append(waited_s)
        await asyncio.sleep(0)
        if self.num_running >= self.room:
            raise self.refusal()
        self.num_running += 1
        self.num_begun += 1
        try:
            for _ in range(num_turns):
                await asyncio.sleep(0)
                yield number
        finally:
            self.num_running -= 1


async def _answers(engine: _Engine, turns: list[int], queue_timeout_s: float = 0.0) -> list[int]:
    admission = PromptAdmission(queue_timeout_s)
    sends = [partial(engine.prompt, number, one) for number, one in enumerate(turns)]
    runs = [admission.run(send) for send in sends]
    return [number async for number in interleaved(runs)]


@given(room=st.integers(1, 5), turns=st.lists(st.integers(1, 6), min_size=2, max_size=30))
@settings(max_examples=examples(60), deadline=None)
def test_all_are_computed_however_little_room_there_is(room: int, turns: list[int]) -> None:
    engine = _Engine(room)
    found = asyncio.run(_answers(engine, turns))
    assert sorted(found) == [number for number, one in enumerate(turns) for _ in range(one)]
    assert engine.num_begun == len(turns)
    assert engine.num_sent <= 4 * len(turns), "not each time that one ends"


@pytest.mark.parametrize("kind", [OverloadedError, TenantLimit])
def test_where_none_is_taken_the_request_is_refused(kind: type[OverloadedError]) -> None:
    engine = _Engine(0)
    engine.refusal = lambda: kind("full", retry_after_s=2.0)
    with pytest.raises(kind) as refused:
        asyncio.run(_answers(engine, [1] * 20))
    assert refused.value.retry_after_s == 2.0
    assert (engine.num_sent, engine.num_begun) == (20, 0)


def test_a_refusal_for_another_reason_is_final() -> None:
    engine = _Engine(1)
    engine.refusal = lambda: DeadlineMissed("too late")
    with pytest.raises(DeadlineMissed):
        asyncio.run(_answers(engine, [3] * 4))
    assert engine.num_running == 0


async def _held(
    engine: _Engine, go_on: asyncio.Event, waited_s: float
) -> AsyncGenerator[int, None]:
    """A prompt of the request that has begun, and runs until `go_on` is set."""
    engine.num_running += 1
    try:
        yield 0
        await go_on.wait()
        yield 0
    finally:
        engine.num_running -= 1


@pytest.mark.parametrize("is_begun", [True, False])
def test_room_that_other_requests_leave_is_taken_while_none_of_these_prompts_ends(
    is_begun: bool,
) -> None:
    """One runs; or has ended, and others have taken its room."""
    engine = _Engine(1)

    async def story() -> tuple[list[int], int]:
        go_on, admission = asyncio.Event(), PromptAdmission()
        if not is_begun:
            go_on.set()
        sends = [partial(_held, engine, go_on)]
        sends += [partial(engine.prompt, number, 1) for number in (1, 2)]
        found, runs = list[int](), [admission.run(send) for send in sends]

        async def read() -> None:
            async for number in interleaved(runs):
                found.append(number)

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        engine.room = 0
        await asyncio.sleep(10)
        assert found == [0] * (1 if is_begun else 2)
        num_tries = engine.num_sent
        engine.room = 2
        await asyncio.sleep(1)
        assert sorted(found)[-2:] == [1, 2]
        go_on.set()
        await reading
        return sorted(found), num_tries

    found, num_tries = run_virtual(story())
    assert found == [0, 0, 1, 2]
    assert 35 <= num_tries <= 45, "one of both four times a second"


def test_a_prompt_waits_no_longer_than_in_the_queue_and_nothing_goes_on_after_that() -> None:
    engine = _Engine(1)

    async def story() -> float:
        loop, go_on, admission = asyncio.get_running_loop(), asyncio.Event(), PromptAdmission(3.0)
        began_s = loop.time()
        sends = [partial(_held, engine, go_on), partial(engine.prompt, 1, 1)]
        with pytest.raises(QueueTimedOut, match="for 3000 ms, the most") as refused:
            async for _ in interleaved([admission.run(send) for send in sends]):
                pass
        assert refused.value.retry_after_s == 2.0
        waited_s, num_sent = loop.time() - began_s, engine.num_sent
        assert engine.waited_s == sorted(engine.waited_s), "each time it has waited for longer"
        assert (engine.waited_s[0], round(engine.waited_s[-1] / 0.25)) == (0.0, 11)
        await asyncio.sleep(10)
        assert (engine.num_sent, engine.num_running) == (num_sent, 0)
        return waited_s

    assert 3.0 <= run_virtual(story()) < 3.5
    assert run_virtual(_answers(_Engine(2), [3] * 9, 3.0)), "shorter waits are no matter"
