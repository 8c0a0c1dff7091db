"""The time after which a silent replica is given up: longer while replicas turn out to be slow."""

from __future__ import annotations

import asyncio
import io
from collections import namedtuple
from typing import Any

import pytest

from quire.base.log import Log
from quire.router.silence import (
    ALONE_FACTOR,
    BACK_WITHIN_S,
    CALM_S,
    MAX_FACTOR,
    TOGETHER_FACTOR,
    TOGETHER_S,
    SilenceLimit,
)
from tests.unit.router.fake_replica import FakeReplica, Router, run
from tests.unit.router.test_failover import ANSWER, STREAM, _until, stream

Named = namedtuple("Named", ["name"])
ONE: Any = Named("one")
TWO: Any = Named("two")


def limit() -> SilenceLimit:
    return SilenceLimit(Log("router", stream=io.StringIO()))


def test_a_replica_that_is_back_at_once_doubles_the_limit() -> None:
    silence = limit()
    for number in range(6):
        silence.given_up(ONE, 10.0 * number)
        silence.works(ONE, 10.0 * number + BACK_WITHIN_S / 2)
        silence.works(ONE, 10.0 * number + BACK_WITHIN_S / 2)  # once for each time it was given up
        assert silence.factor == min(2.0 ** (number + 1), MAX_FACTOR)


def test_one_that_was_stopped_for_longer_or_never_given_up_does_not() -> None:
    silence = limit()
    silence.works(ONE, 0.0)
    silence.given_up(ONE, 1.0)
    silence.works(TWO, 1.1)
    silence.works(ONE, 1.0 + BACK_WITHIN_S)
    assert silence.factor == 1.0


def test_silence_of_several_and_of_all_is_waited_for_longer() -> None:
    silence = limit()
    assert silence.factor_of(ONE, 0.0, others_work=True) == 1.0
    assert silence.factor_of(ONE, 0.0, others_work=False) == ALONE_FACTOR
    silence.given_up(ONE, 10.0)
    assert silence.factor_of(ONE, 11.0, others_work=True) == 1.0, "only others count"
    assert silence.factor_of(TWO, 11.0, others_work=True) == TOGETHER_FACTOR
    assert silence.factor_of(TWO, 11.0, others_work=False) == MAX_FACTOR
    assert silence.factor_of(TWO, 10.0 + TOGETHER_S, others_work=True) == 1.0
    silence.keep([TWO])
    assert silence.factor_of(TWO, 11.0, others_work=True) == 1.0, "it is gone"


def test_calm_minutes_halve_it_and_replicas_that_are_gone_are_forgotten() -> None:
    silence = limit()
    for _ in range(2):
        silence.given_up(ONE, 0.0)
        silence.works(ONE, 0.5)
    found = []
    for at_s in (1.0, 0.5 + CALM_S, 0.6 + CALM_S, 0.5 + 2 * CALM_S, 0.5 + 3 * CALM_S):
        silence.tick(at_s)
        found.append(silence.factor)
    assert found == [4.0, 2.0, 2.0, 1.0, 1.0]
    silence.given_up(ONE, 1.0)
    silence.keep([TWO])
    silence.works(ONE, 1.1)
    assert silence.factor == 1.0


def test_a_slow_server_makes_all_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.router.prober.ANSWER_S", 0.3)
    first, second = FakeReplica(), FakeReplica()
    gate = asyncio.Event()
    first.silent_after = 3
    first.before_token = lambda token: setattr(first, "health_gate", gate)

    async def story(router: Router) -> None:
        assert (await stream(router))[2] == ANSWER  # given up, and continued at the second one
        gate.set()
        first.steps_total += 1
        await _until(lambda: router.fleet.num_available == 2)
        await _until(lambda: any("silent ones are given up later" in at for at in router.lines))

    run([first, second], story, stall_s=600.0)


def test_an_idle_api_process_among_several_is_no_stall() -> None:
    """Each reports its own open requests and the steps that it has heard of."""
    only = FakeReplica()
    only.silent_after, only.process = 3, 2

    async def story(router: Router) -> None:
        answering = asyncio.ensure_future(stream(router))
        await asyncio.sleep(3.0)  # several times its stall time
        assert not any("fenced" in line for line in router.lines), router.lines
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)

    run([only], story)


def test_a_client_that_is_slow_to_read_the_end_is_no_stall() -> None:
    """The replica has sent everything, and says that nothing is open there."""
    only = FakeReplica()

    async def story(router: Router) -> None:
        slow = asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, slow.set)
        pieces = list[bytes]()

        async def read(piece: bytes) -> None:
            pieces.append(piece)
            if len(pieces) == 2:
                await slow.wait()

        _, _, body = await router.post("/generate", STREAM, on_piece=read)
        assert body == ANSWER
        assert not any("fenced" in line for line in router.lines), router.lines

    run([only], story)


def test_a_stream_that_has_failed_behind_a_slow_client_is_no_stall() -> None:
    """Nothing more comes of it, so its replica may be idle."""
    first, second = FakeReplica(), FakeReplica()
    first.fails_after = 3

    async def story(router: Router) -> None:
        slow = asyncio.Event()

        async def read(piece: bytes) -> None:
            await slow.wait()

        answering = asyncio.ensure_future(router.post("/generate", STREAM, on_piece=read))
        await _until(lambda: first.num_closed > 0)
        await asyncio.sleep(3.0)  # several times its stall time
        assert not any("fenced" in line for line in router.lines), router.lines
        slow.set()
        assert (await answering)[2] == ANSWER

    run([first, second], story)
