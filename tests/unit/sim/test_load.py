"""From traces to requests: how fast, how long, who shares what, and whose they are."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.obs.trace import Arrival
from quire.sim.load import HEAVY, LIGHT, Asks, Requests, flooded, jobs_of
from tests.unit.sim.made import ASKS, job


def _trace(count: int) -> list[Arrival]:
    return [
        Arrival(arrival_s=float(number), prompt_tokens=20 + number, output_tokens=10)
        for number in range(count)
    ]


def test_a_trace_is_replayed_as_fast_as_asked_for() -> None:
    jobs, left_out = jobs_of(_trace(4), speed=4, asks=ASKS)
    assert [one.arrival_ms for one in jobs] == [0, 250, 500, 750]
    assert left_out == 0


def test_answers_are_cut_to_what_is_asked_for_and_what_cannot_fit_is_left_out() -> None:
    trace = [
        Arrival(arrival_s=0, prompt_tokens=500, output_tokens=13),
        Arrival(arrival_s=0, prompt_tokens=100, output_tokens=900),
    ]
    jobs, left_out = jobs_of(trace, speed=1, asks=ASKS)
    assert left_out == 1
    assert [(one.prompt_tokens, one.output_tokens) for one in jobs] == [(100, 64)]
    with pytest.raises(SettingError, match="none of the 1 requests"):
        jobs_of(trace[:1], speed=1, asks=ASKS)
    with pytest.raises(SettingError, match="speed is 0"):
        jobs_of(trace, speed=0, asks=ASKS)


def test_requests_ask_for_the_same_and_are_told_what_they_want_kept() -> None:
    asks = Asks(max_tokens=64, max_model_len=100, ttft_slo_ms=500.0, tpot_slo_ms=50.0)
    jobs = [job(0, 10, 5, tenant="a"), job(7, 90, 5)]
    requests = Requests(jobs, asks)
    first, second = (requests.make(number, one) for number, one in enumerate(jobs))
    assert (first.max_total_tokens, second.max_total_tokens) == (74, 100)
    assert (first.tenant, first.ttft_slo_ms, first.tpot_slo_ms) == ("a", 500.0, 50.0)
    assert second.arrival_ms == 7
    assert [one.total_tokens for one in requests.planned.values()] == [15, 95]
    requests.forget(first.request_id)
    assert list(requests.planned) == [second.request_id]


@pytest.mark.parametrize("vocab_size", [None, 50])
def test_equal_blocks_are_equal_tokens_and_nothing_else_is_shared(vocab_size: int | None) -> None:
    asks = Asks(max_tokens=8, max_model_len=4096)
    jobs = [
        job(0, 1100, 5, block_ids=(7, 8, 9)),
        job(0, 1300, 5, block_ids=(7, 8, 10)),
        job(0, 1100, 5),
        job(0, 1100, 5),
        job(0, 600, 5, block_ids=(7,)),
    ]
    requests = Requests(jobs, asks, vocab_size=vocab_size)
    prompts = [requests.make(number, one).prompt_ids for number, one in enumerate(jobs)]
    assert [len(prompt) for prompt in prompts] == [1100, 1300, 1100, 1100, 600]

    def alike(left: int, right: int) -> int:
        most = min(len(prompts[left]), len(prompts[right])) // 16 * 16
        same = (prompts[left][:most] == prompts[right][:most]).reshape(-1, 16).all(axis=1)
        return int(np.argmin(same)) if not same.all() else len(same)

    assert alike(0, 1) == 64
    assert alike(0, 4) == 32
    assert [alike(2, 3), alike(0, 2), alike(1, 3)] == [0, 0, 0]
    if vocab_size is not None:
        assert all(prompt.min() > 0 and prompt.max() < vocab_size for prompt in prompts)


def test_a_vocabulary_too_small_to_tell_contents_apart_is_refused() -> None:
    with pytest.raises(SettingError, match="pairs of them are too few"):
        Requests([job(0, 4, 1)] * 30, ASKS, vocab_size=6)


def test_a_light_tenant_keeps_its_pace_while_the_others_flood() -> None:
    jobs, calm = flooded(_trace(100), every=10, light_speed=2, speed=20, asks=ASKS)
    assert [one.arrival_ms for one in jobs] == sorted(one.arrival_ms for one in jobs)
    heavy = [one for one in jobs if one.tenant == HEAVY]
    light = [one for one in jobs if one.tenant == LIGHT]
    assert len(heavy) == 90
    assert light == calm
    assert [one.arrival_ms for one in light] == [0]  # the flood is over before it asks again
    jobs, calm = flooded(_trace(100), every=10, light_speed=2, speed=1, asks=ASKS)
    assert [one.arrival_ms for one in calm] == [5000 * number for number in range(10)]
    with pytest.raises(SettingError, match="must leave some"):
        flooded(_trace(1), every=10, light_speed=1, speed=1, asks=ASKS)
