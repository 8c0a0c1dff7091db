"""Rarely used sampling parameters, from words to text, through LLM."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.base.errors import InvalidParameter
from quire.engine.client.token_rules import token_rules
from quire.text.tokenizer import Tokenizer

PLAIN = SamplingParams(seed=3, temperature=0.9, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, threads=1, max_num_seqs=4, max_num_batched_tokens=32)


def test_a_bad_word_is_never_completed(model: Path, llm: LLM) -> None:
    tokenizer = Tokenizer.load(model)
    greedy = replace(PLAIN, temperature=0.0)
    (plain,) = llm.generate("the sea", greedy)
    words = {id_: tokenizer.token_text(id_).strip() for id_ in plain.token_ids}
    banning = {
        id_: replace(greedy, bad_words=(word,))
        for id_, word in words.items()
        if word and "\ufffd" not in word
    }
    alone = {
        id_: sampling
        for id_, sampling in banning.items()
        if (id_,) in token_rules(sampling, tokenizer).banned_sequences
    }
    assert alone
    for id_, sampling in alone.items():
        (without,) = llm.generate("the sea", sampling)
        assert id_ not in without.token_ids


def test_each_parameter_gives_the_same_answer_alone_and_in_a_batch(llm: LLM) -> None:
    ways = [
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 1.0},
        {"mirostat": 1, "mirostat_tau": 3.0, "frequency_penalty": 0.5, "repeat_last_n": 5},
        {
            "temperature": 1.5,
            "top_p": 0.9,
            "min_p": 0.01,
            "samplers": ("top_p", "temperature", "min_p"),
        },
        {"xtc_probability": 0.5, "xtc_threshold": 0.01},
        {"typical_p": 0.4},
        {"dry_multiplier": 2.0, "allowed_token_ids": (5, 6, 7, 8)},
    ]
    samplings = [replace(PLAIN, n=2, **way) for way in ways]  # type: ignore[arg-type]
    together = llm.generate(["a camel"] * len(ways), samplings)
    for sampling, answer in zip(samplings, together, strict=True):
        (alone,) = llm.generate(["a camel"], sampling)
        tokens = [[output.token_ids for output in each.outputs] for each in (alone, answer)]
        assert tokens[0] == tokens[1]
        assert tokens[0][0] != tokens[0][1]


def test_only_allowed_ids_are_generated(llm: LLM) -> None:
    (answer,) = llm.generate("x", replace(PLAIN, allowed_token_ids=(9, 11)))
    assert set(answer.token_ids) == {9, 11}
    with pytest.raises(InvalidParameter, match="ids 0 to"):
        llm.generate("x", replace(PLAIN, allowed_token_ids=(9, 10**6)))


def test_no_n_gram_occurs_twice_in_the_output(llm: LLM) -> None:
    few = replace(PLAIN, allowed_token_ids=(5, 6, 7), max_tokens=9)
    (answer,) = llm.generate("x", replace(few, no_repeat_ngram_size=2))
    pairs = list(zip(answer.token_ids, answer.token_ids[1:], strict=False))
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize("executor", ["native", "reference"])
def test_a_bias_of_minus_infinity_bans_a_token_at_any_temperature(
    model: Path, executor: str
) -> None:
    with LLM(model, threads=1, executor=executor) as llm:
        params = SamplingParams(temperature=100.0, seed=3, max_tokens=40, ignore_eos=True)
        free = llm.generate("ab", params)[0].outputs[0].token_ids
        banned = dict.fromkeys(free[:8], -math.inf)
        told = llm.generate("ab", replace(params, logit_bias=banned))[0].outputs[0]
        assert told.finish_reason == "length"
        assert not set(told.token_ids) & banned.keys()
        assert set(free[8:]) & banned.keys(), "the free answer repeats none of its tokens"
