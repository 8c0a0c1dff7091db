"""SamplingParams as the library's users meet it: types, limits, and what becomes of values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", None),
        ("stop", {"a": 1}),
        ("stop", ["a", 3]),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [-1]),
        ("logit_bias", None),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: float("nan")}),
        ("n", True),
        ("n", 1.0),
        ("n", None),
        ("n", "1"),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("temperature", float("nan")),
        ("temperature", 10**400),
        ("top_p", 0),
        ("seed", 2**63),
        ("seed", 1.5),
        ("logprobs", 21),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_what_is_not_allowed_is_an_error_that_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_numbers_of_numpy_are_numbers_and_are_kept_as_pythons_own() -> None:
    params = SamplingParams(
        n=np.int64(2),
        temperature=np.float32(0.5),
        top_k=np.int32(3),
        top_p=1,
        seed=np.uint64(2**63 - 1),
        max_tokens=np.int16(4),
        stop_token_ids=np.array([5, 6]),  # type: ignore[arg-type]
        logit_bias={np.int64(7): np.float32(1.5)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(
        n=2,
        temperature=0.5,
        top_k=3,
        seed=2**63 - 1,
        max_tokens=4,
        stop_token_ids=(5, 6),
        logit_bias={7: 1.5},
    )
    kept = [getattr(params, field.name) for field in fields(params)]
    assert not any(isinstance(value, np.generic) for value in kept)
    assert type(params.top_p) is float
    assert [type(value) for pair in params.logit_bias.items() for value in pair] == [int, float]


def test_a_stop_string_alone_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_equal_parameters_have_equal_hashes_and_nobody_can_change_them_from_outside() -> None:
    biases = {3: 1.0}
    first, second = SamplingParams(logit_bias=biases), SamplingParams(logit_bias={3: 1.0})
    biases[4] = 2.0
    assert first == second
    assert hash(first) == hash(second)
    assert first != SamplingParams()


def test_resolve_gives_a_seed_only_where_there_is_none() -> None:
    assert SamplingParams(seed=3).resolve().seed == 3
    drawn = {SamplingParams().resolve().seed for _ in range(8)}
    assert None not in drawn
    assert len(drawn) == 8
