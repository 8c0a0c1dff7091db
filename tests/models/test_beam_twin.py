"""Beam search against an independent exhaustive search, on the built-in model.

The model's log-probabilities are computed for one history at a time; what edits them and what ends
answers is written here in NumPy and plain Python. Sequences, order and scores must be equal to the
last bit: sums are of the same numbers in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM, SamplingParams
from quire.base.errors import StepRowError
from quire.base.grammar import choice, regex
from quire.base.records import FinishReason
from quire.models.model_folder import box_path
from quire.text.tokenizer import Tokenizer
from tests.models.grammar_answers import GrammarAnswers
from tests.unit.scheduler.beam.beam_oracle import Wishes, beams

PROMPT = "Lily and Tom saw a big dog. The dog"
MAX_TOKENS = 7
ANSWERS = ("a cat", "a camel", "a cat and a camel", "the dog", "the")
STOPS = ((".",), (" th", "ee "), ("o",), ("to s", " to"))
PATTERNS = {"choice": "|".join(ANSWERS), "regex": "[a-z]{2,5} (at|[0-9]{1,2})"}
GRAMMARS = {"choice": choice(list(ANSWERS)), "regex": regex(PATTERNS["regex"])}
Float32s = NDArray[np.float32]
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(box_path(), max_num_seqs=8, num_threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(box_path())


@pytest.fixture(scope="module")
def logprobs_after(llm: LLM, tokenizer: Tokenizer) -> Callable[[Tokens], Float32s]:
    """Return all log-probabilities after the prompt and the given tokens, a thousand ids at
    a time.
    """
    prompt = tokenizer.encode(PROMPT)
    size = llm.card.vocab_size
    parts = [tuple(range(first, min(first + 1000, size))) for first in range(0, size, 1000)]

    @cache
    def ask(tokens: Tokens) -> Float32s:
        wishes = [
            SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=ids) for ids in parts
        ]
        answers = llm.generate([[*prompt, *tokens]] * len(parts), wishes)
        listed = [one.logprob for answer in answers for one in answer.outputs[0].logprobs[0].listed]
        return np.array(listed, np.float32)

    return ask


def check(
    llm: LLM,
    logprobs: Callable[[Tokens], Float32s],
    search: dict[str, Any],
    **of_twin: Any,
) -> list[Any]:
    """Check the outputs against the independent search."""
    sampling = SamplingParams(
        use_beam_search=True, temperature=0.0, **{"max_tokens": MAX_TOKENS, **search}
    )
    wishes = Wishes(
        width=sampling.num_sequences,
        max_new=sampling.max_tokens or 0,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
        stop_ids=(() if sampling.ignore_eos else llm.card.eos_ids),
        **of_twin,
    )
    expected = beams(lambda tokens: logprobs(tokens).tolist(), wishes)
    outputs = llm.generate([PROMPT], sampling)[0].outputs
    found = [(one.score, one.token_ids) for one in outputs if one.error is None]
    assert found == expected[: sampling.n]
    assert len(found) == min(sampling.n, len(expected))
    return [one for one in outputs if one.error is None]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.8, "frequency_penalty": 0.6},
        {"logit_bias": {300: 4.0, 17: -9.0}},
        {"no_repeat_ngram_size": 1},
        {"allowed_token_ids": tuple(range(200, 420, 3))},
        {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": {301: 2.5}},
    ],
    ids=str,
)
def test_beams_rank_by_processed_log_probabilities(
    llm: LLM,
    tokenizer: Tokenizer,
    logprobs_after: Callable[[Tokens], Float32s],
    fields: dict[str, Any],
) -> None:
    prompt = tuple(tokenizer.encode(PROMPT))

    def logprobs(tokens: Tokens) -> Float32s:
        return processed(logprobs_after(tokens), prompt, tokens, **fields)

    for search in ({"n": 3}, {"n": 2, "best_of": 4, "length_penalty": 0.0}):
        for one in check(llm, logprobs, {**search, **fields, "logprobs": 0}):
            raw = [logprobs_after(one.token_ids[:i])[id_] for i, id_ in enumerate(one.token_ids)]
            assert [told.logprob for told in one.logprobs] == raw


def processed(
    raw: Float32s,
    prompt: Tokens,
    tokens: Tokens,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    no_repeat_ngram_size: int = 0,
    allowed_token_ids: Tokens | None = None,
) -> Float32s:
    """Return log-probabilities after bias, penalties and bans, in f32; n-grams of one token
    only.
    """
    values = raw.copy()
    for id_, bias in (logit_bias or {}).items():
        values[id_] += np.float32(bias)
    for id_ in set(prompt + tokens):
        value, penalty = values[id_], np.float32(repetition_penalty)
        values[id_] = value / penalty if value > 0 else value * penalty
    for id_ in set(tokens):
        count = np.float32(tokens.count(id_))
        values[id_] -= np.float32(frequency_penalty) * count + np.float32(presence_penalty)
    if no_repeat_ngram_size:
        values[list(prompt + tokens)] = -np.inf
    if allowed_token_ids is not None:
        banned = np.ones(len(values), np.bool_)
        banned[list(allowed_token_ids)] = False
        values[banned] = -np.inf
    return values


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_beams_end_where_their_text_completes_a_stop_string(
    llm: LLM,
    tokenizer: Tokenizer,
    logprobs_after: Callable[[Tokens], Float32s],
    min_tokens: int,
) -> None:
    def text(tokens: Tokens) -> str:
        return b"".join(tokenizer.token_bytes(id_) for id_ in tokens).decode(errors="replace")

    def end(stop: tuple[str, ...], tokens: Tokens) -> tuple[int, str] | None:
        """Return where the first complete stop string begins, and which it is."""
        for count in range(1, len(tokens) + 1):
            for size in range(len(text(tokens[: count - 1])) + 1, len(text(tokens[:count])) + 1):
                seen = text(tokens[:count])[:size]
                ends = [one for one in stop if seen.endswith(one)]
                if ends and count > min_tokens:
                    longest = max(ends, key=len)
                    return size - len(longest), longest
        return None

    ended = 0
    for stop, search in product(STOPS, ({"n": 3}, {"n": 4, "early_stopping": True})):
        outputs = check(
            llm,
            logprobs_after,
            {**search, "stop": stop, "min_tokens": min_tokens, "ignore_eos": True},
            ends=lambda tokens, stop=stop: end(stop, tokens) is not None,
        )
        for one in outputs:
            found = end(stop, one.token_ids)
            assert (one.finish_reason is FinishReason.STOP) == (found is not None)
            if found is not None:
                ended += 1
                assert (one.text, one.stop_reason) == (text(one.token_ids)[: found[0]], found[1])
    assert ended >= 6


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("kind", ["choice", "regex"])
def test_beams_follow_a_grammar_and_end_where_it_completes(
    llm: LLM,
    tokenizer: Tokenizer,
    logprobs_after: Callable[[Tokens], Float32s],
    kind: str,
    *,
    ignore_eos: bool,
) -> None:
    """The allowed tokens come from a fresh matcher per history."""
    grammar, size = GRAMMARS[kind], llm.card.vocab_size
    answers = GrammarAnswers(grammar, eos_ids=llm.card.eos_ids)

    def logprobs(tokens: Tokens) -> Float32s:
        values = np.full(size, -np.inf, np.float32)
        allowed = [
            id_ for id_ in answers.allowed(tokens) if not (ignore_eos and id_ in llm.card.eos_ids)
        ]
        values[allowed] = logprobs_after(tokens)[allowed]
        return values

    def text(tokens: Tokens) -> str:
        return b"".join(tokenizer.token_bytes(id_) for id_ in tokens).decode()

    def ends(tokens: Tokens) -> bool:
        return answers.is_complete(tokens)

    searches: tuple[dict[str, Any], ...] = (
        {"n": 3},
        {"n": 2, "best_of": 5, "length_penalty": 2.0},
        {"n": 2, "early_stopping": True},
    )
    for search in searches:
        fields = {**search, "structured_outputs": grammar, "max_tokens": 20}
        for one in check(llm, logprobs, {**fields, "ignore_eos": ignore_eos}, ends=ends):
            assert one.finish_reason is FinishReason.STOP
            assert re.fullmatch(PATTERNS[kind], one.text)
    fields = {"n": 3, "structured_outputs": grammar, "max_tokens": 20, "stop": "at"}
    stopped = check(
        llm,
        logprobs,
        {**fields, "ignore_eos": ignore_eos},
        ends=lambda tokens: ends(tokens) or "at" in text(tokens),
    )
    for one in stopped:
        assert one.stop_reason == ("at" if "at" in text(one.token_ids) else None)


def test_fewer_answers_than_beams_are_returned_with_a_reason_for_the_others(llm: LLM) -> None:
    sampling = SamplingParams(
        n=4,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=5,
        allowed_token_ids=(300, 301),
        no_repeat_ngram_size=1,
    )
    plain = SamplingParams(max_tokens=1)
    outputs = llm.generate([PROMPT, PROMPT], [sampling, plain])[0].outputs
    # Each of the two once: nothing can follow the second, which reached no end.
    assert [one.finish_reason for one in outputs] == [FinishReason.ERROR] * 4
    assert "0 sequences for 4 streams" in (outputs[0].error or "")
    with pytest.raises(StepRowError, match="0 sequences for 4 streams"):
        llm.generate([PROMPT], sampling)
