"""Building requests: unservable ones are rejected with numbers before they are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import ContextTooLong, InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.base.scheduling_params import SchedulingParams
from quire.base.wire import Wire
from quire.engine.client.request_builder import default_sampling, make_requests
from quire.engine.model_card import ModelCard
from tests.cases import each_case

CARD = ModelCard(
    name="m",
    path="/m",
    max_model_len=32,
    vocab_size=100,
    eos_ids=(1, 2),
    fingerprint="fp_0",
    generation_defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 16},
    dtype="f32",
    recipe="portable",
    num_blocks=4,
    block_size=16,
    max_num_seqs=4,
    created_s=0,
)


def _made(prompt: Any, **settings: Any) -> Any:
    sampling = SamplingParams(**settings)
    return make_requests(CARD, prompt, sampling, request_id="r", arrival_ms=5.0)


def test_streams_share_one_seed() -> None:
    requests = _made([5, 6], n=3)
    assert [request.request_id for request in requests] == ["r/0", "r/1", "r/2"]
    assert [request.stream for request in requests] == [0, 1, 2]
    assert {request.group_id for request in requests} == {"r"}
    assert len({request.sampling.seed for request in requests}) == 1
    assert requests[0].sampling.seed is not None
    assert requests[0].prompt_ids.dtype == np.int32
    assert requests[0].arrival_ms == 5.0


def test_the_limit_is_the_context_or_the_requested_length() -> None:
    assert _made([5] * 30)[0].max_total_tokens == 32
    assert _made([5] * 30, max_tokens=1)[0].max_total_tokens == 31


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    assert _made([5] * 32, max_tokens=0, prompt_logprobs=0)[0].max_total_tokens == 32


def test_stop_ids_are_the_models_and_the_requests() -> None:
    assert _made([5], stop_token_ids=(9, 2))[0].stop_ids == (1, 2, 9)
    assert _made([5], stop_token_ids=(9,), ignore_eos=True)[0].stop_ids == (9,)


@pytest.mark.parametrize(
    ("prompt", "settings", "told"),
    [
        ([5] * 32, {}, "length is 32 tokens, prompt and output together; the prompt has 32 tokens"),
        ([5] * 99, {}, "the prompt has 99 tokens"),
        ([5] * 30, {"max_tokens": 3}, "lower max_tokens to 2"),
        (
            [5] * 33,
            {"max_tokens": 0, "prompt_logprobs": 0},
            "length is 32 tokens, .* 33 tokens; shorten",
        ),
        ([5] * 30, {"min_tokens": 3}, "min_tokens is 3 and the prompt has 30 tokens"),
    ],
)
def test_requests_beyond_the_context_are_rejected_with_the_numbers(
    prompt: list[int], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ContextTooLong, match=told):
        _made(prompt, **settings)


@each_case(
    ("prompt", "settings", "param"),
    [
        ([], {}, "prompt"),
        ([100], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([2**40], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        (["5"], {}, "prompt"),
        ([5], {"stop_token_ids": (100,)}, "stop_token_ids"),
        ([5], {"logit_bias": {100: 1.0}}, "logit_bias"),
        ([5], {"logprob_token_ids": [5, 100]}, "logprob_token_ids"),
    ],
)
def test_unknown_ids_are_rejected(prompt: list[Any], settings: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as told:
        _made(prompt, **settings)
    assert told.value.param == param


def test_the_models_defaults_never_exceed_the_context() -> None:
    assert default_sampling(CARD).max_tokens is None
    assert default_sampling(CARD, num_prompt_tokens=4).max_tokens == 16
    assert default_sampling(CARD, num_prompt_tokens=30).max_tokens == 2
    assert default_sampling(CARD, num_prompt_tokens=32).max_tokens is None
    assert default_sampling(CARD).temperature == 0.6
    assert default_sampling(CARD).top_k == 20


def test_an_invalid_stop_string_is_rejected_by_name() -> None:
    with pytest.raises(InvalidParameter, match=r"'a\\ud800', with a lone surrogate"):
        SamplingParams(stop=("a\ud800",))


def test_every_stream_has_the_objectives_of_its_request() -> None:
    terms = SchedulingParams(
        tenant="a", priority=-3, deadline_ms=900.0, ttft_slo_ms=100.0, tpot_slo_ms=20.0
    )
    requests = make_requests(
        CARD, [5], SamplingParams(n=2), request_id="r", arrival_ms=0.0, terms=terms
    )
    assert len(requests) == 2
    for request in requests:
        found = SchedulingParams(
            tenant=request.tenant,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            ttft_slo_ms=request.ttft_slo_ms,
            tpot_slo_ms=request.tpot_slo_ms,
        )
        assert found == terms


def test_every_kind_of_default_crosses_to_another_process() -> None:
    defaults = {"top_k": 20, "temperature": 1, "min_p": 0.5, "samplers": ("top_k", "min_p")}
    wire = Wire(ModelCard)
    card = wire.decode(wire.encode(replace(CARD, generation_defaults=defaults)))
    assert default_sampling(card) == SamplingParams(
        top_k=20, temperature=1.0, min_p=0.5, samplers=("top_k", "min_p")
    )
