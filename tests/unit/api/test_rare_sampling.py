"""Rarely used sampling fields through the routes: what is passed on, what is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.generation.fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    known_fields,
    sampling_of,
)
from quire.api.generation.unknown_fields import OTHER_NAMES
from quire.base.errors import InvalidParameter
from quire.base.sampling_checks import FILTERS_OFF
from quire.base.sampling_params import SamplingParams
from quire.obs.request_fields import body_fields, sampling_fields
from tests.cases import each_case
from tests.unit.api.fake_engine import FakeEngine
from tests.unit.api.test_values import asked, chat, completion

FIELDS: dict[str, Any] = {
    "typical_p": 0.5,
    "top_n_sigma": 1.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "no_repeat_ngram_size": 4,
    "mirostat": 2,
    "mirostat_tau": 3,
    "mirostat_eta": 0.2,
}


@each_case("name", sorted(FIELDS))
def test_a_field_reaches_the_engine(name: str) -> None:
    assert getattr(asked(**{name: FIELDS[name]}), name) == FIELDS[name]


def test_recorded_parameters_are_fields_that_ask_for_the_same() -> None:
    recorded = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        epsilon_cutoff=0.1,
        samplers=("top_p", "epsilon_cutoff", "temperature"),
        repetition_penalty=1.5,
        repeat_last_n=9,
        dry_multiplier=0.5,
        no_repeat_ngram_size=3,
        seed=7,
        max_tokens=4,
    )
    assert asked(**body_fields(sampling_fields(recorded, content=True))) == recorded


def test_lists_of_words_and_ids_reach_the_engine() -> None:
    params = asked(bad_words=["no", "nay"], allowed_token_ids=[5, 6], dry_sequence_breakers=[])
    assert params.bad_words == ("no", "nay")
    assert params.allowed_token_ids == (5, 6)
    assert params.dry_sequence_breakers == ()
    assert asked(dry_sequence_breakers='["\\n", ":"]').dry_sequence_breakers == ("\n", ":")
    params = asked(allowed_token_ids=None, bad_words=None)
    assert (params.allowed_token_ids, params.bad_words) == (None, ())


@each_case(
    ("field", "value", "said"),
    [
        ("mirostat", 3, "whole number"),
        ("mirostat", 2.5, "whole number"),
        ("xtc_probability", "0.5", "finite number"),
        ("allowed_token_ids", [], "empty list"),
        ("allowed_token_ids", "12", "a list"),
        ("bad_words", {"a": 1}, "a list"),
        ("bad_words", [""], "1 to 256 characters"),
        ("dry_sequence_breakers", [3], "1 to 40 characters"),
        ("dry_sequence_breakers", "\\n", "a list written as a text"),
        ("no_repeat_ngram_size", -1, "from 0 to 50"),
    ],
)
def test_invalid_values_are_rejected_by_name(field: str, value: Any, said: str) -> None:
    for route in (completion, chat):
        engine = FakeEngine()
        reply = route(engine, **{field: value})
        assert reply.status == 400
        assert reply.json["error"]["param"] == field
        assert said in reply.json["error"]["message"]
        assert not engine.asked


def test_mirostat_overrides_model_filters_and_conflicts_with_request_filters() -> None:
    defaults = SamplingParams(top_k=20, top_p=0.8, min_p=0.1)
    params = sampling_of({"mirostat": 2}, defaults, logprobs=None)
    assert {name: getattr(params, name) for name in FILTERS_OFF} == dict(FILTERS_OFF)
    with pytest.raises(InvalidParameter, match=r"top_p is 0\.5"):
        sampling_of({"mirostat": 2, "top_p": 0.5}, defaults, logprobs=None)
    assert sampling_of({"mirostat": 0}, defaults, logprobs=None).top_k == 20


def ours(name: str) -> str:
    return OTHER_NAMES[name]


@each_case("name", sorted(OTHER_NAMES))
def test_a_name_of_another_program_is_rejected_with_ours(name: str) -> None:
    tables = [table for table in (CHAT, COMPLETIONS, TOKENIZE, DETOKENIZE) if ours(name) in table]
    assert tables
    for honoured in tables:
        with pytest.raises(InvalidParameter, match=f'did you mean "{ours(name)}"'):
            known_fields({name: 1}, honoured, warn_unknown=False)


def test_fields_of_other_programs_are_accepted_at_their_neutral_values() -> None:
    off = {"tfs": 1, "top_a": 0, "smoothing_factor": 0.0, "dynatemp_range": 0}
    assert known_fields(off, CHAT, warn_unknown=False) == ({}, ())
    with pytest.raises(InvalidParameter, match=r"top_a is 0\.2: .*min_p"):
        known_fields({"top_a": 0.2}, CHAT, warn_unknown=False)
