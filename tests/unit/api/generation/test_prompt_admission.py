"""PromptAdmission: the prompts of one request before an engine with little room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.api.generation import prompt_admission
from quire.api.generation.prompt_admission import PromptAdmission
from quire.base.errors import DeadlineMissed, OverloadedError, QuireError, TenantLimit
from quire.engine.client.interleaving import interleaved
from tests.drawn import examples


class _Engine:
    """Runs at most `room` prompts, each for some turns of the event loop; counts what is sent."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.num_running = 0
        self.num_begun = 0
        self.num_sent = 0
        self.refusal: Callable[[], QuireError] = lambda: OverloadedError("full", retry_after_s=2.0)

    async def prompt(self, number: int, num_turns: int) -> AsyncGenerator[int, None]:
        self.num_sent += 1
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


async def _answers(engine: _Engine, turns: list[int]) -> list[int]:
    admission = PromptAdmission()
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


def test_room_that_other_requests_have_taken_meanwhile_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_admission, "_RETRY_S", 0.0)
    engine = _Engine(1)

    async def story() -> list[int]:
        task = asyncio.ensure_future(_answers(engine, [1] * 3))
        while engine.num_begun < 1:
            await asyncio.sleep(0)
        engine.room = 0
        while engine.num_sent < 10:  # 3, and those of one that tries again and again
            await asyncio.sleep(0)
        engine.room = 2
        return await task

    assert sorted(asyncio.run(story())) == [0, 1, 2]
