"""Structured output in a whole engine: answers follow their grammar, however they are computed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.base.errors import InvalidParameter
from quire.base.grammar import Grammar, choice, grammar, json_schema, regex
from quire.base.records import FinishReason
from quire.engine.assembly import assemble, features
from quire.structured import source as written
from quire.structured.compiler import GrammarCompiler
from quire.structured.matcher import Matcher

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "is_here": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "is_here", "tags"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Grammar] = {
    "schema": json_schema(SCHEMA),
    "regex": regex("[a-z]{2,6} [0-9]{2}"),
    "choice": choice(["a cat", "a camel", "a cat and a camel"]),
    "grammar": grammar('start: "<" item ("|" item){0,3} ">"\nitem: /[a-z]{1,4}/'),
}
_LONG = {"type": "string", "minLength": 400}
PROMPTS = ["Tom is a boy.", "Say it in JSON: Anna has a red ball.", "Hello"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=8, num_threads=1) as llm:
        yield llm


def ids(llm: LLM, sampling: SamplingParams) -> list[tuple[tuple[int, ...], str]]:
    """Return token ids and finish reason of each choice of each prompt."""
    answers = llm.generate(PROMPTS, sampling)
    assert all(output.error is None for answer in answers for output in answer.outputs)
    return [
        (output.token_ids, output.finish_reason) for answer in answers for output in answer.outputs
    ]


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_every_answer_is_what_the_grammar_allows(llm: LLM, kind: str, temperature: float) -> None:
    sampling = SamplingParams(
        n=4 if temperature else 1,
        temperature=temperature,
        seed=3,
        max_tokens=120,
        structured_outputs=GRAMMARS[kind],
    )
    for answer in llm.generate(PROMPTS, sampling):
        for output in answer.outputs:
            assert (output.finish_reason, output.error) == (FinishReason.STOP, None)
            if kind == "schema":
                jsonschema.validate(json.loads(output.text), SCHEMA)
            elif kind == "choice":
                assert output.text in json.loads(GRAMMARS[kind].text)
            else:
                pattern = (
                    r"[a-z]{2,6} \d\d" if kind == "regex" else r"<[a-z]{1,4}(\|[a-z]{1,4}){0,3}>"
                )
                import re

                assert re.fullmatch(pattern, output.text)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_beams_follow_a_grammar_alone_and_in_a_batch(llm: LLM, kind: str) -> None:
    beams = SamplingParams(
        n=2,
        best_of=4,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=60,
        repetition_penalty=1.1,
        structured_outputs=GRAMMARS[kind],
    )
    drawn = SamplingParams(seed=1, max_tokens=30, structured_outputs=GRAMMARS["regex"])
    [alone] = llm.generate(PROMPTS[:1], beams)
    crowd = llm.generate([*PROMPTS[:1] * 2, *PROMPTS], [beams, beams, drawn, drawn, drawn])
    for answer in (alone, *crowd[:2]):
        told = [(one.token_ids, one.score, one.finish_reason) for one in answer.outputs]
        assert told == [(one.token_ids, one.score, FinishReason.STOP) for one in alone.outputs]
    for one in alone.outputs:
        if kind == "schema":
            jsonschema.validate(json.loads(one.text), SCHEMA)
        elif kind == "choice":
            assert one.text in json.loads(GRAMMARS[kind].text)


@pytest.mark.parametrize(
    "wishes",
    [
        {},
        {"n": 3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0},
        {"min_tokens": 30},
        {"ignore_eos": True},
        {"stop": ('"is',)},
        {"max_tokens": 9},
        {"max_tokens": 2},
        {"mirostat": 2},
        {"dry_multiplier": 0.8, "xtc_probability": 0.5},
        {"bad_words": ("zebra",)},
        {"logit_bias": {100: 5.0}},
        {"stop_token_ids": (30,)},
        {"best_of": 2},
    ],
    ids=str,
)
def test_jumping_ahead_gives_the_ids_of_single_steps(
    wishes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []
    for jump_ahead in (True, False):
        plain = features.ModelRunner

        def runner(*args: Any, _plain: Any = plain, _jump: bool = jump_ahead, **kwargs: Any) -> Any:
            kwargs["constraints"] = replace(kwargs["constraints"], jump_ahead=_jump)
            return _plain(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(features, "ModelRunner", runner)
            with LLM(max_num_seqs=4, num_threads=1) as llm:
                given = {"seed": 5, "max_tokens": 100, **wishes}
                sampling = SamplingParams(structured_outputs=GRAMMARS["schema"], **given)
                got.append(ids(llm, sampling))
    assert got[0] == got[1]


def test_plans_in_flight_and_preemption_change_no_id(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=9, max_tokens=80, structured_outputs=GRAMMARS["schema"])
    wanted = ids(llm, sampling)
    with LLM(max_num_seqs=4, num_threads=1, plans_in_flight=2) as overlapping:
        assert ids(overlapping, sampling) == wanted
    with LLM(
        max_num_seqs=8, num_threads=1, max_model_len=128, kv_cache_memory_bytes=2_000_000
    ) as small:
        assert ids(small, sampling) == wanted


def test_preempted_requests_keep_their_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers: list[SmallCompiler] = []

    class SmallCompiler(GrammarCompiler):
        num_matchers = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, max_kept=2)
            compilers.append(self)

        def matcher(self, grammar: Grammar) -> Matcher:
            self.num_matchers += 1
            return super().matcher(grammar)

    monkeypatch.setattr(assemble, "GrammarCompiler", SmallCompiler)
    asked = [
        SamplingParams(
            seed=number,
            max_tokens=100,
            structured_outputs=json_schema({**_LONG, "title": str(number)}),
        )
        for number in range(12)
    ]
    with LLM(
        max_num_seqs=8, num_threads=1, max_model_len=128, kv_cache_memory_bytes=2_000_000
    ) as llm:
        answers = llm.generate(["Say it."] * len(asked), asked)
    outputs = [answer.outputs[0] for answer in answers]
    assert [output.error for output in outputs] == [None] * len(asked)
    assert compilers[0].num_matchers > len(asked), "no request was preempted"
    assert compilers[0].num_compiled == len(asked)


def test_forced_tokens_share_a_step(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=80)
    plain = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs=GRAMMARS["schema"])
    told = SamplingParams(
        temperature=0.0, max_tokens=80, logprobs=0, structured_outputs=GRAMMARS["schema"]
    )
    llm.generate(PROMPTS[:1], sampling)
    steps = []
    for one in (plain, told):
        before = llm.stats.steps_total if hasattr(llm, "stats") else 0
        [answer] = llm.generate(PROMPTS[:1], one)
        steps.append(((llm.stats.steps_total if hasattr(llm, "stats") else 0) - before, answer))
    assert steps[0][1].token_ids == steps[1][1].token_ids
    assert len(steps[1][1].logprobs) == len(steps[1][1].token_ids)


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    """Of the raw logits: the same first alternatives as without a grammar."""
    asked = {"temperature": 0.0, "max_tokens": 1, "logprobs": 3}
    [free] = llm.generate(PROMPTS[:1], SamplingParams(**asked))
    [held] = llm.generate(
        PROMPTS[:1], SamplingParams(**asked, structured_outputs=GRAMMARS["schema"])
    )
    assert [token.token_id for token in held.logprobs[0].top] == [
        token.token_id for token in free.logprobs[0].top
    ]
    assert held.logprobs[0].logprob < free.logprobs[0].logprob


def test_an_answer_that_may_continue_does_while_ends_are_banned(llm: LLM) -> None:
    endless = regex("(ab)*")
    sampling = SamplingParams(seed=1, max_tokens=20, structured_outputs=endless)
    for wishes in ({"ignore_eos": True}, {"min_tokens": 20}):
        [answer] = llm.generate(PROMPTS[:1], sampling.changed(**wishes))
        assert answer.finish_reason == FinishReason.LENGTH
        assert len(answer.token_ids) == 20
        assert set(answer.text) == {"a", "b"}
    [answer] = llm.generate(
        PROMPTS[:1],
        SamplingParams(
            seed=1, max_tokens=20, min_tokens=15, structured_outputs=choice(["yes", "no"])
        ),
    )
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == FinishReason.STOP


def test_bans_that_leave_no_token_fail_one_choice_with_a_reason(llm: LLM) -> None:
    good = SamplingParams(max_tokens=20, seed=1, structured_outputs=GRAMMARS["schema"])
    bad = SamplingParams(max_tokens=20, allowed_token_ids=(50, 51), structured_outputs=regex("x+"))
    answers = llm.generate(PROMPTS[:2], [good, bad])
    assert answers[0].outputs[0].error is None
    assert answers[1].finish_reason == FinishReason.ERROR
    assert "all that the grammar allows here is banned" in str(answers[1].outputs[0].error)


def test_an_unusable_grammar_is_rejected_and_the_others_continue(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r"uniqueItems \(at #/uniqueItems\)"):
        llm.generate(
            PROMPTS[:1], SamplingParams(structured_outputs=json_schema({"uniqueItems": True}))
        )
    assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3))[0].outputs[0].error is None


def test_while_a_grammar_compiles_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = written.llguidance_grammar
    slow = regex("slow[0-9]")

    def source(asked: Grammar, names: frozenset[str]) -> str:
        if asked.text == slow.text:
            time.sleep(0.1)
        return plain(asked, names)

    monkeypatch.setattr(written, "llguidance_grammar", source)
    with LLM(max_num_seqs=4, num_threads=1) as llm:
        sampling = SamplingParams(max_tokens=12, seed=1)
        answers = llm.generate(PROMPTS[:2], [sampling.changed(structured_outputs=slow), sampling])
    first, other = (answer.outputs[0] for answer in answers)
    assert first.text.startswith("slow")
    assert other.error is None


def test_compiler_threads_end_with_the_engine() -> None:
    with LLM(max_num_seqs=2, num_threads=1) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3, structured_outputs=regex("x+y")))
        assert "quire-grammar" in {thread.name for thread in threading.enumerate()}
        mine = [one for one in threading.enumerate() if one.name.startswith("quire-grammar")]
    for thread in mine[-1:]:
        thread.join(30)
        assert not thread.is_alive()


def test_vllms_object_form_is_a_grammar() -> None:
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == regex("a+")  # type: ignore[arg-type]
    for wrong in ({}, {"regex": "a", "choice": ["b"]}, {"backend": "x"}, {"json_object": 1}, 3):
        with pytest.raises(InvalidParameter, match="structured_outputs"):
            SamplingParams(structured_outputs=wrong)  # type: ignore[arg-type]
