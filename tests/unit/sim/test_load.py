"""From traces to requests: speed, lengths, sharing and tenants."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.obs.trace import Arrival
from quire.sim.load import HEAVY, LIGHT, RequestDefaults, RequestFactory, trace_requests, with_flood
from tests.unit.sim.made import DEFAULTS, request


def _trace(count: int) -> list[Arrival]:
    return [
        Arrival(arrival_s=float(number), prompt_tokens=20 + number, output_tokens=10)
        for number in range(count)
    ]


def test_a_trace_is_replayed_at_the_requested_speed() -> None:
    requests, left_out = trace_requests(_trace(4), speed=4, defaults=DEFAULTS)
    assert [one.arrival_ms for one in requests] == [0, 250, 500, 750]
    assert left_out == 0


def test_answers_are_cut_to_the_limit_and_impossible_requests_are_left_out() -> None:
    trace = [
        Arrival(arrival_s=0, prompt_tokens=500, output_tokens=13),
        Arrival(arrival_s=0, prompt_tokens=100, output_tokens=900),
    ]
    requests, left_out = trace_requests(trace, speed=1, defaults=DEFAULTS)
    assert left_out == 1
    assert [(one.prompt_tokens, one.output_tokens) for one in requests] == [(100, 64)]
    with pytest.raises(SettingError, match="none of the 1 requests"):
        trace_requests(trace[:1], speed=1, defaults=DEFAULTS)
    with pytest.raises(SettingError, match="speed is 0"):
        trace_requests(trace, speed=0, defaults=DEFAULTS)


def test_requests_have_the_defaults_and_their_own_objectives() -> None:
    defaults = RequestDefaults(
        max_tokens=64, max_model_len=100, ttft_slo_ms=500.0, tpot_slo_ms=50.0
    )
    requests = [request(0, 10, 5, tenant="a"), request(7, 90, 5)]
    factory = RequestFactory(requests, defaults)
    first, second = (factory.make(number, one) for number, one in enumerate(requests))
    assert (first.max_total_tokens, second.max_total_tokens) == (74, 100)
    assert (first.tenant, first.ttft_slo_ms, first.tpot_slo_ms) == ("a", 500.0, 50.0)
    assert second.arrival_ms == 7
    assert [one.total_tokens for one in factory.planned.values()] == [15, 95]
    factory.forget(first.request_id)
    assert list(factory.planned) == [second.request_id]


@pytest.mark.parametrize("vocab_size", [None, 50])
def test_equal_blocks_are_equal_tokens_and_nothing_else_is_shared(vocab_size: int | None) -> None:
    defaults = RequestDefaults(max_tokens=8, max_model_len=4096)
    requests = [
        request(0, 1100, 5, block_ids=(7, 8, 9)),
        request(0, 1300, 5, block_ids=(7, 8, 10)),
        request(0, 1100, 5),
        request(0, 1100, 5),
        request(0, 600, 5, block_ids=(7,)),
    ]
    factory = RequestFactory(requests, defaults, vocab_size=vocab_size)
    prompts = [factory.make(number, one).prompt_ids for number, one in enumerate(requests)]
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


def test_a_vocabulary_too_small_for_distinct_contents_is_rejected() -> None:
    with pytest.raises(SettingError, match="pairs of them cannot encode"):
        RequestFactory([request(0, 4, 1)] * 30, DEFAULTS, vocab_size=6)


def test_a_light_tenant_keeps_its_pace_during_a_flood() -> None:
    requests, calm = with_flood(_trace(100), every=10, light_speed=2, speed=20, defaults=DEFAULTS)
    assert [one.arrival_ms for one in requests] == sorted(one.arrival_ms for one in requests)
    heavy = [one for one in requests if one.tenant == HEAVY]
    light = [one for one in requests if one.tenant == LIGHT]
    assert len(heavy) == 90
    assert light == calm
    assert [one.arrival_ms for one in light] == [0]  # the flood is over before its second request
    requests, calm = with_flood(_trace(100), every=10, light_speed=2, speed=1, defaults=DEFAULTS)
    assert [one.arrival_ms for one in calm] == [5000 * number for number in range(10)]
    with pytest.raises(SettingError, match="must leave some"):
        with_flood(_trace(1), every=10, light_speed=1, speed=1, defaults=DEFAULTS)
