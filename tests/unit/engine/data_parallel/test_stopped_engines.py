"""DataParallelEngine: engines with too much to do, and engines with a process that is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from quire.base.errors import QuireError
from quire.base.sampling_params import SamplingParams
from quire.engine.data_parallel.routing_state import OpenCounts
from quire.engine.model_card import Health
from quire.engine.output.text_delta import TextDelta
from tests.unit.engine.data_parallel.test_data_parallel_engine import (
    PARAMS,
    WHOLE,
    Fake,
    answer,
    engine_of,
)
from tests.unit.engine.supervised.test_supervised_engine import run


class Stopped(Fake):
    """A Fake with a process that is stopped at a token. silent_ms: as its health says."""

    stops_at: int | None = None
    silent_ms = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given_up = asyncio.Event()

    def health(self) -> Health:
        return replace(super().health(), silent_ms=self.silent_ms, pending=1)

    def give_up_requests(self, reason: str) -> None:
        self.given_up.set()

    async def generate(
        self, prompt_ids: Any, sampling: SamplingParams, **options: Any
    ) -> AsyncGenerator[TextDelta, None]:
        async for delta in super().generate(prompt_ids, sampling, **options):
            if self.stops_at is not None and delta.token_ids == (self.stops_at,):
                await self.given_up.wait()
                raise QuireError("it is silent")
            yield delta


def test_the_backlog_is_calibrated_by_first_tokens() -> None:
    """The policy learns what each prompt had to compute, and what was queued before it."""

    async def check() -> None:
        fakes = [Fake(), Fake()]
        engine = engine_of(*fakes)
        await engine.ready()
        learned: list[tuple[int, int, int]] = []
        policy: Any = engine._policy
        assert policy._backlog_tokens is None
        policy.note_first_token = lambda member, new, ahead, seconds: learned.append(
            (member.number, new, ahead)
        )
        prompt = list(range(128))  # two blocks of the history
        await answer(engine, prompt, "a")
        warm = learned[0][0]
        assert learned == [(warm, 128, 0)]
        fakes[warm].gate = asyncio.Event()
        two = [asyncio.ensure_future(answer(engine, [*prompt, one], f"b{one}")) for one in (1, 2)]
        await asyncio.sleep(0)
        counts = engine._members[warm].routing.counts(warm)
        assert counts == (2 * (129 + PARAMS.max_tokens), 2, 2 * 129, 2 * 26)
        assert engine._members[warm].expected_tokens == 2 * PARAMS.max_tokens
        fakes[warm].gate.set()
        assert [await one for one in two] == [WHOLE, WHOLE]
        assert learned[1:] == [(warm, 26, 0), (warm, 26, 26)]
        assert all(
            member.routing.counts(member.number) == OpenCounts() for member in engine._members
        )
        await engine.close()

    run(check)


def test_requests_of_a_stopped_engine_go_on_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is silent while it has work, and the other one's is not."""
    monkeypatch.setattr("quire.engine.data_parallel.data_parallel_engine._LOOK_S", 0.001)

    async def check() -> None:
        fakes = [Stopped(), Stopped()]
        engine = engine_of(*fakes)
        await engine.ready()
        prompt = list(range(200))
        await answer(engine, prompt, "first")
        warm, cold = fakes if fakes[0].asked else reversed(fakes)
        warm.stops_at, warm.silent_ms = 3, 9000
        assert await answer(engine, prompt, "next") == WHOLE
        assert (len(warm.asked), len(cold.asked)) == (2, 1)
        assert cold.asked[0]["output_ids"] == (0, 1, 2)
        await answer(engine, prompt, "later")
        assert (len(warm.asked), len(cold.asked)) == (2, 2), "it is left alone while it is silent"
        warm.stops_at, warm.silent_ms = None, 0
        while engine._members[fakes.index(warm)].is_silent:
            await asyncio.sleep(0.001)
        # Where all are silent the machine is slow, and none could take over.
        for fake in fakes:
            fake.silent_ms = 9000
        await asyncio.sleep(0.02)
        assert not any(member.is_silent for member in engine._members)
        await engine.close()

    run(check)
