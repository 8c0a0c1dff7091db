"""SamplingParams for library users: types, limits, and conversion of values."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from quire.base import sampling_checks
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import FILTERS_OFF
from quire.base.sampling_params import SamplingParams
from tests.cases import each_case


@each_case(
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
        ("top_p", -0.1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -2),
        ("prompt_logprobs", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("logprob_token_ids", [-1]),
        ("logprob_token_ids", [1.0]),
        ("logprob_token_ids", 5),
        ("logprob_token_ids", range(1025)),
        ("ignore_eos", 1),
        ("include_stop_str_in_output", "yes"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_numpy_numbers_are_accepted_and_converted() -> None:
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


def test_a_prompt_may_be_scored_without_output() -> None:
    params = SamplingParams(prompt_logprobs=0, max_tokens=0)
    assert (params.max_tokens, params.prompt_logprobs, params.logprobs) == (0, 0, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "max_tokens"),
        ({"prompt_logprobs": 0, "n": 2}, "n"),
        ({"prompt_logprobs": 0, "logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"prompt_logprobs": 0, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_parameters_without_effect_without_output_are_rejected(
    fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(max_tokens=0, **fields)
    assert caught.value.param == param


def test_listed_ids_request_log_probabilities() -> None:
    params = SamplingParams(logprob_token_ids=[5, np.int64(3), 5])
    assert params.logprob_token_ids == (5, 3, 5)
    assert params.logprobs == 0
    assert SamplingParams(logprob_token_ids=[5], logprobs=3).logprobs == 3
    assert SamplingParams(logprob_token_ids=[]).logprobs is None


def test_a_stop_string_alone_is_a_list_of_one() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_equal_parameters_have_equal_hashes_and_are_immutable() -> None:
    biases = {3: 1.0}
    first, second = SamplingParams(logit_bias=biases), SamplingParams(logit_bias={3: 1.0})
    biases[4] = 2.0
    assert first == second
    assert hash(first) == hash(second)
    assert first != SamplingParams()


def test_resolve_sets_only_a_missing_seed() -> None:
    assert SamplingParams(seed=3).resolve().seed == 3
    drawn = {SamplingParams().resolve().seed for _ in range(8)}
    assert None not in drawn
    assert len(drawn) == 8


@each_case(
    ("name", "value"),
    [
        ("typical_p", 0.0),
        ("typical_p", 1.1),
        ("top_n_sigma", -2),
        ("top_n_sigma", "1"),
        ("epsilon_cutoff", 2),
        ("eta_cutoff", -0.1),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -1),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_allowed_length", 51),
        ("dry_penalty_last_n", -2),
        ("repeat_last_n", -2),
        ("repeat_last_n", 2**31),
        ("repeat_last_n", 1.5),
        ("repeat_last_n", True),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["x"] * 33),
        ("dry_sequence_breakers", None),
        ("no_repeat_ngram_size", 51),
        ("mirostat", 3),
        ("mirostat", True),
        ("mirostat_tau", -1),
        ("mirostat_eta", 11),
        ("bad_words", [1]),
        ("bad_words", [" "]),
        ("bad_words", ["\ud800"]),
        ("bad_words", ["x"] * 129),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", range(40_000)),
    ],
)
def test_rare_fields_have_limits_too(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize("name", sorted(FILTERS_OFF))
def test_mirostat_excludes_filters(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"mirostat is 2 and {name} is"):
        SamplingParams(mirostat=2, **{name: 2 if name == "top_k" else 0.5})
    SamplingParams(mirostat=2, **FILTERS_OFF)
    SamplingParams(mirostat=2, top_k=-1, top_n_sigma=-1)


@each_case(
    "fields, said",
    [
        ({"samplers": ("top_k", "typ_p")}, 'samplers holds "typ_p"; a list of temperature, top_n'),
        ({"samplers": "kt"}, 'samplers holds "kt"'),
        ({"samplers": 5}, "samplers holds 5"),
        ({"samplers": [["top_k"]]}, "samplers holds"),
        ({"samplers": ("top_k", "top_k")}, "names a step twice"),
        ({"samplers": ("top_k",), "temperature": 0.5}, "name temperature, and temperature is 0.5"),
        ({"samplers": ("top_k",), "xtc_probability": 0.5}, "does not name xtc, and xtc_probab"),
        ({"samplers": ("top_k",), "mirostat": 1}, "mirostat is 1 and samplers is given"),
        ({"samplers": ("temperature",), "use_beam_search": True, "n": 2}, "use_beam_search"),
    ],
)
def test_an_order_names_each_step_that_is_on_once(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert said in str(caught.value)
    assert caught.value.param == "samplers"


def test_an_order_may_name_steps_that_are_off() -> None:
    order = ("top_p", "temperature", "xtc")
    off = {"top_k": -1, "top_n_sigma": -1, "min_p": 0}
    assert SamplingParams(samplers=list(order), top_p=0.5, **off).samplers == order  # type: ignore[arg-type]
    assert SamplingParams(samplers=()).samplers == ()


def test_a_model_with_an_order_may_be_asked_for_mirostat_and_beams() -> None:
    model = SamplingParams(samplers=("top_k", "temperature"), top_k=5)
    assert model.changed(mirostat=1).samplers == ()
    assert model.changed(use_beam_search=True, n=2).samplers == ()


@pytest.mark.parametrize("fields", [{"mirostat": 2}, {"xtc_probability": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 1e-13])
def test_parameters_that_need_randomness_are_rejected_without(
    fields: dict[str, Any], temperature: float
) -> None:
    with pytest.raises(InvalidParameter, match="always takes the likeliest token"):
        SamplingParams(temperature=temperature, **fields)


def test_model_filters_yield_to_mirostat_and_request_filters_do_not() -> None:
    model = SamplingParams(top_k=20, top_p=0.8, temperature=0.7)
    changed = model.changed(mirostat=2, mirostat_tau=3)
    assert (changed.top_k, changed.top_p, changed.temperature) == (0, 1.0, 0.7)
    assert changed.mirostat_tau == 3.0
    assert model.changed(seed=5).top_k == 20
    with pytest.raises(InvalidParameter, match="top_k is 9"):
        model.changed(mirostat=2, top_k=9)


@each_case(
    ("named", "found"),
    [
        ({"top_k": 5}, {"mirostat": 0, "top_k": 5}),
        ({"top_p": 1.0, "top_k": -1}, {"mirostat": 2}),
        ({"temperature": 0}, {"mirostat": 0, "temperature": 0.0}),
        ({"temperature": 0.5}, {"mirostat": 2, "temperature": 0.5}),
        ({"mirostat": 0}, {"mirostat": 0}),
        ({"samplers": ["top_k"]}, {"mirostat": 0, "samplers": ("top_k",)}),
    ],
)
def test_a_models_mirostat_yields_to_filters_and_to_temperature_0(
    named: dict[str, Any], found: dict[str, Any]
) -> None:
    changed = SamplingParams(mirostat=2).changed(**named)
    assert {name: getattr(changed, name) for name in found} == found


def test_a_models_xtc_yields_to_temperature_0_only() -> None:
    model = SamplingParams(xtc_probability=0.5)
    assert model.changed(temperature=0).xtc_probability == 0.0
    assert model.changed(temperature=0.5, top_k=3).xtc_probability == 0.5
    with pytest.raises(InvalidParameter, match="always takes the likeliest token"):
        model.changed(temperature=0, xtc_probability=0.5)


def test_a_step_that_a_models_order_lacks_comes_last() -> None:
    model = SamplingParams(samplers=("top_k", "temperature"), top_k=5)
    assert model.changed(top_p=0.5, top_k=7).samplers == ("top_k", "temperature", "top_p")
    assert model.changed(top_p=1.0, seed=1).samplers == ("top_k", "temperature")
    assert model.changed(samplers=("top_k",)).samplers == ("top_k",)


def test_duplicate_allowed_ids_are_merged_and_one_word_is_a_list() -> None:
    params = SamplingParams(allowed_token_ids=[3, 1, 3], bad_words="no", top_n_sigma=-1)  # type: ignore[arg-type]
    assert params.allowed_token_ids == (3, 1)
    assert params.bad_words == ("no",)
    assert params.top_n_sigma == 0.0


def test_breakers_written_as_one_text_are_rejected() -> None:
    with pytest.raises(InvalidParameter, match="a list written as a text") as caught:
        SamplingParams(dry_sequence_breakers='["\\n", ":"]')  # type: ignore[arg-type]
    assert caught.value.param == "dry_sequence_breakers"


@pytest.mark.parametrize("ids", [[3, 1, 3], (3, 1, 3), [np.int64(3), 1, 3]])
def test_allowed_ids_of_any_kind_become_ints_once_each(ids: Any) -> None:
    allowed = SamplingParams(allowed_token_ids=ids).allowed_token_ids
    assert allowed == (3, 1)
    assert all(type(id_) is int for id_ in allowed or ())


@pytest.mark.parametrize("odd", [-1, 2**31, True, 1.0, "1", None])
def test_an_invalid_id_among_valid_ones_is_found(odd: Any) -> None:
    with pytest.raises(InvalidParameter, match="stop_token_ids holds"):
        SamplingParams(stop_token_ids=(1, odd, 2))


def test_an_invalid_bias_is_named_with_its_token() -> None:
    with pytest.raises(InvalidParameter, match="logit_bias of token 7 is 1000; a finite number"):
        SamplingParams(logit_bias={3: 1.0, 7: 1000})


def test_beams_without_an_explicit_temperature_have_none() -> None:
    assert SamplingParams(use_beam_search=True, n=2).temperature == 0.0
    drawn = SamplingParams(n=2)
    assert drawn.temperature == 1.0
    assert type(drawn.temperature) is float
    with pytest.raises(InvalidParameter, match=r"temperature is 1\.0"):
        SamplingParams(use_beam_search=True, temperature=1.0)
    assert drawn.changed(use_beam_search=True) == SamplingParams(use_beam_search=True, n=2)


@each_case(
    ("name", "value"),
    [
        ("mirostat", False),
        ("min_p", False),
        ("top_n_sigma", "0.0"),
        ("dry_allowed_length", 2.0),
        ("length_penalty", True),
        ("stop", 5),
        ("bad_words", {"a": 1}),
        ("dry_sequence_breakers", "\n"),
        ("prompt_logprobs", False),
        ("top_k", False),
        ("n", True),
    ],
)
def test_a_value_that_only_equals_a_default_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match=name):
        SamplingParams(**{name: value})
    with pytest.raises(InvalidParameter, match=name):
        SamplingParams().changed(**{name: value})


def test_values_are_converted_to_the_fields_type() -> None:
    made = SamplingParams(min_p=0, stop=[], bad_words=(word for word in ()), top_n_sigma=-1)  # type: ignore[arg-type]
    assert repr(made) == repr(SamplingParams())
    named: dict[str, Any] = {"top_k": 7, "min_p": 0.5, "stop": "x", "seed": 3}
    assert SamplingParams(top_p=0.5).changed(**named) == SamplingParams(top_p=0.5, **named)
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams().changed(top_q=1)


def test_only_the_fields_that_are_named_are_checked_by_their_own_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records are made for each request, and again where the engine reads them."""
    checked = []
    for name in ("whole", "number"):
        check = getattr(sampling_checks, name)
        monkeypatch.setattr(
            sampling_checks,
            name,
            lambda field, *rest, check=check, **more: (
                checked.append(field) or check(field, *rest, **more)
            ),
        )
    SamplingParams(frequency_penalty=0.5, dry_multiplier=0.8, mirostat=0, stop=("end",), top_p=0.5)
    assert checked == ["frequency_penalty", "dry_multiplier"]
