"""llama.cpp's native routes: answers, events, fields, views of the server, errors in its form."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any, cast
from unittest.mock import ANY as ANY_COUNT

import pytest
from msgspec import structs

from quire.api.llama_cpp.infill import InfillTexts
from quire.api.llama_cpp.line_limits import AnswerLines, LineLimits
from quire.base.errors import WorkerError
from quire.base.records import FinishReason
from quire.base.sampling_params import SamplingParams
from quire.engine.output.output_stream import TextDelta
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

PATH, INFILL, OPENAI = "/completion", "/infill", "/v1/completions"
ADAPTERS = "/lora-adapters"
ASKED: dict[str, Any] = {"prompt": "ab", "n_predict": 8, "seed": 7}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GBNF = 'root ::= "yes" | "no"'


def engine(*script: str, reason: FinishReason = FinishReason.STOP) -> Any:
    made = FakeEngine(*script, card=replace(CARD, max_model_len=512))
    made.last_reason = reason
    return made


def ask(
    body: Any,
    *,
    path: str = PATH,
    on: Any = None,
    method: str = "POST",
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Reply:
    async def exchange() -> Reply:
        client = {"client": options.pop("client")} if "client" in options else {}
        site = Site(on or engine(), **options)
        raw = b"" if body is None else json.dumps(body).encode()
        path_alone, _, query = path.partition("?")
        more = {"headers": headers, "query": query.encode(), **client}
        return await site.call(method, path_alone, raw, **more)

    return asyncio.run(exchange())


def asked_by(body: dict[str, Any], path: str = PATH) -> Any:
    """Return what the engine was asked by a request."""
    made = engine()
    reply = ask(body, path=path, on=made)
    assert reply.status == 200, reply.body
    return made.asked[0]


def refusal(body: Any, **options: Any) -> str:
    reply = ask(body, **options)
    assert reply.status == 400, reply.body
    assert (reply.error["code"], reply.error["type"]) == (400, "invalid_request_error")
    words: str = reply.error["message"]
    return words


def test_a_whole_answer_has_counts_settings_and_timings() -> None:
    answer = ask(ASKED).json
    settings = answer.pop("generation_settings")
    assert (settings["seed"], settings["n_predict"], settings["repeat_last_n"]) == (7, 8, 64)
    timings = answer.pop("timings")
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (0, 2, 2)
    assert answer == {
        "index": 0,
        "content": "Hello",
        "tokens": [],
        "id_slot": -1,
        "stop": True,
        "model": "fake",
        "tokens_predicted": 2,
        "tokens_evaluated": 2,
        "prompt": "ab",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "word",
        "stopping_word": "END",
        "tokens_cached": 4,
    }


def test_a_stream_has_the_text_in_parts_and_the_rest_in_its_last_event() -> None:
    whole = ask(ASKED).json
    reply = ask({**ASKED, "stream": True})
    assert b"[DONE]" not in reply.body
    *parts, last = reply.events
    assert [part["content"] for part in parts] == ["Hel", "lo"]
    assert [part["tokens"] for part in parts] == [[0], [1]]
    assert [part["tokens_predicted"] for part in parts] == [1, 2]
    settings = {**whole["generation_settings"], "stream": True}
    assert last == {**whole, "content": "", "generation_settings": settings}


def test_requested_parts_are_in_the_answer() -> None:
    more = {"return_tokens": True, "n_probs": 1, "id_slot": 2, "stop": ["x"]}
    answer = ask({**ASKED, **more}).json
    assert (answer["tokens"], answer["id_slot"]) == ([0, 1], 2)
    first, _ = answer["completion_probabilities"]
    assert (first["id"], first["token"], first["logprob"]) == (0, "Hel", -0.5)
    assert first["top_logprobs"][0]["token"] == "Hel"
    live = {"stream": True, "return_progress": True, "timings_per_token": True}
    progress, *parts, _ = ask({**ASKED, **more, **live}).events
    assert progress["prompt_progress"]["processed"] == 2
    found = [one for part in parts for one in part["completion_probabilities"]]
    assert found == answer["completion_probabilities"]
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2]


@pytest.mark.parametrize(
    ("reason", "kind", "word"),
    [(FinishReason.STOP, "word", "END"), (FinishReason.LENGTH, "limit", "")],
)
def test_the_reason_of_the_end_is_named(reason: FinishReason, kind: str, word: str) -> None:
    answer = ask(ASKED, on=engine("a\n", "b", reason=reason)).json
    assert (answer["stop_type"], answer["stopping_word"]) == (kind, word)
    assert answer["has_new_line"]


WARM = {"temperature": 0.5, "top_p": 0.5}
# Fields here, and those of the same request to OpenAI's route.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"n_predict": 3}, {"max_tokens": 3}),
    ({"n_predict": -1}, {"max_tokens": 510}),
    ({"n_predict": 4096}, {"max_tokens": 510}),
    ({"prompt": [97, 98]}, {"prompt": [97, 98]}),
    ({"prompt": [[97, 98]]}, {"prompt": [97, 98]}),
    ({"prompt": ["ab"]}, {}),
    ({"prompt": [97, "b"]}, {"prompt": [97, 98]}),
    (
        {"repeat_penalty": 1.5, "typical_p": 0.5},
        {"repetition_penalty": 1.5, "typical_p": 0.5, "repeat_last_n": 64},
    ),
    (
        {"presence_penalty": 1.5, "repeat_last_n": 0},
        {"presence_penalty": 1.5, "repeat_last_n": 0},
    ),
    ({"repeat_last_n": 9, "repeat_penalty": 1.0}, {"repeat_last_n": 9}),
    (WARM, {**WARM, "temperature_last": True}),
    ({**WARM, "min_p": 0.1}, {**WARM, "min_p": 0.1, "samplers": ["top_p", "min_p", "temperature"]}),
    ({**WARM, "samplers": ["temperature", "top_p"]}, WARM),
    ({**WARM, "samplers": "tp"}, WARM),
    ({**WARM, "mirostat": 1, "top_p": 1}, {"temperature": 0.5, "mirostat": 1}),
    ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
    ({"grammar": GBNF}, {"structured_outputs": {"grammar": GBNF}}),
    ({"n_probs": 3}, {"logprobs": 3}),
    ({"n_probs": 3, "logprobs": 3, "penalize_nl": False}, {"logprobs": 3}),
    ({"cache_prompt": False, "id_slot": 1, "n_keep": 4}, {}),
    ({"samplers": ["top_k", "temperature"], "top_k": 5}, {"top_k": 5}),
    ({"samplers": ["top_k"], "top_k": 5, "top_p": 0.5, "temperature": 0.5}, {"top_k": 5}),
    ({"logit_bias": [[5, -1.5]]}, {"logit_bias": {"5": -1.5}}),
    ({"dry_multiplier": 0.5}, {"dry_multiplier": 0.5, "dry_penalty_last_n": 64}),
    ({"dry_multiplier": 0.5, "dry_range": 9}, {"dry_multiplier": 0.5, "dry_penalty_last_n": 9}),
    ({"temperature": -0.5}, {"temperature": 0}),
    ({"stop": ["", "x"]}, {"stop": ["x"]}),
    ({"stop": ["x"], "ignore_eos": True}, {"stop": ["x"], "ignore_eos": True}),
]


@each_case(("sent", "of_openai"), SAME)
def test_a_completion_asks_the_engine_for_what_the_same_one_of_openai_asks(
    sent: dict[str, Any], of_openai: dict[str, Any]
) -> None:
    own = asked_by({**ASKED, **sent})
    other = asked_by({"prompt": "ab", "max_tokens": 8, "seed": 7, **of_openai}, OPENAI)
    grammars = [each.sampling.structured_outputs for each in (own, other)]
    assert [each and each.text for each in grammars[:1]] == [g and g.text for g in grammars[1:]]
    sampling = [replace(each.sampling, structured_outputs=None) for each in (own, other)]
    assert sampling[0] == sampling[1]
    assert own.prompt_ids == other.prompt_ids


def test_without_output_the_prompt_is_computed() -> None:
    asked = asked_by({**ASKED, "n_predict": 0}).sampling
    assert (asked.max_tokens, asked.prompt_logprobs) == (0, 0)


@pytest.mark.parametrize("seed", [-1, 4_294_967_295])
def test_a_seed_of_minus_one_is_random(seed: int) -> None:
    seeds = {asked_by({**ASKED, "seed": seed}).sampling.seed for _ in range(4)}
    assert len(seeds) == 4
    assert min(seeds) >= 0


def test_a_gap_is_filled_in_by_models_with_infill_tokens() -> None:
    sent = {"input_prefix": "a", "input_suffix": "b", "prompt": "c", "n_predict": 3, "seed": 7}
    assert "no tokens for infilling" in refusal(sent, path=INFILL)
    made = engine()
    made.tokenizer.marks = dict.fromkeys(MARKS, 1)
    assert ask({**sent, "input_extra": []}, path=INFILL, on=made).json["content"] == "Hello"
    # What the gap begins with ends the text before it, as in llama.cpp's server.
    assert bytes(made.asked[0].prompt_ids) == b"<|fim_prefix|>ac<|fim_suffix|>b<|fim_middle|>"
    other = {"prompt": "a", "suffix": "b", "max_tokens": 3, "seed": 7}
    again = engine()
    again.tokenizer.marks = made.tokenizer.marks
    del sent["prompt"]
    assert ask(sent, path=INFILL, on=made).status == 200
    assert ask(other, path=OPENAI, on=again).status == 200
    assert made.asked[1].prompt_ids == again.asked[0].prompt_ids
    for bad in (
        {"input_suffix": None},
        {"input_prefix": 3},
        {"prompt": 3},
        {"input_extra": "a"},
        {"input_extra": ["a"]},
        {"input_extra": [{"filename": "a"}]},
        {"input_extra": [{"text": "a", "filename": 3}]},
        {"input_extra": [{"text": "a"}] * 1025},
    ):
        assert next(iter(bad)) in refusal({**sent, **bad}, path=INFILL, on=made)


FILES = [{"filename": "one.py", "text": "1"}, {"text": "2", "time": 3}]
GAP = b"<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"


@pytest.mark.parametrize(
    ("more", "before"),
    [
        ((), b"\n\n--- snippet ---\n\n1\n\n--- snippet ---\n\n2"),
        (
            ("<|repo_name|>", "<|file_sep|>"),
            b"<|repo_name|>myproject\n<|file_sep|>one.py\n1<|file_sep|>tmp\n2"
            b"<|file_sep|>filename\n",
        ),
    ],
)
def test_texts_of_other_files_precede_the_gap(more: tuple[str, ...], before: bytes) -> None:
    made = engine()
    made.tokenizer.marks = dict.fromkeys((*MARKS, *more), 1)
    sent = {"input_prefix": "a", "input_suffix": "b", "input_extra": FILES, "n_predict": 3}
    reply = ask(sent, path=INFILL, on=made)
    assert "x-quire-ignored-fields" not in reply.headers
    assert bytes(made.asked[0].prompt_ids) == before + GAP


def test_the_first_texts_of_other_files_are_left_out_if_all_do_not_fit() -> None:
    made = engine()
    made.tokenizer.marks = dict.fromkeys(MARKS, 1)
    files = [{"text": str(at) * 100} for at in range(9)]
    sent = {"input_prefix": "a", "input_suffix": "b", "input_extra": files}
    reply = ask(sent, path=INFILL, on=made)
    assert reply.headers["x-quire-ignored-fields"] == "input_extra[:6]"
    prompt = bytes(made.asked[0].prompt_ids)
    assert [prompt.count(str(at).encode()) for at in range(9)] == [0] * 6 + [100] * 3
    # A larger n_predict keeps no more room: the answer ends where the context is full.
    assert ask({**sent, "n_predict": 420}, path=INFILL, on=made).status == 200
    assert made.asked[1].prompt_ids == made.asked[0].prompt_ids
    # Only the texts around the gap, which are cut if they do not fit.
    assert ask({**sent, "input_prefix": "a" * 400}, path=INFILL, on=made).status == 200
    assert bytes(made.asked[2].prompt_ids).startswith(b"<|fim_prefix|>aaa")
    around = {"input_prefix": "a" * 600, "input_suffix": "b" * 99 + "c", "prompt": "d"}
    reply = ask({**sent, **around}, path=INFILL, on=made)
    assert (
        reply.headers["x-quire-ignored-fields"]
        == "input_extra[:9], input_prefix[:313], input_suffix[96:]"
    )
    prompt = bytes(made.asked[3].prompt_ids)
    assert prompt == GAP.replace(b">a", b">" + b"a" * 287 + b"d").replace(b">b", b">" + b"b" * 96)


def test_a_cut_leaves_no_part_of_a_character_and_all_of_the_text_beside_the_gap() -> None:
    sent = {"input_prefix": "\u00e9" * 9 + "\ufffd", "input_suffix": "\ufffd" + "\u00e9" * 9}
    texts = InfillTexts(sent)
    assert texts.shorten(ByteTokenizer(), 24) == ["input_prefix[:2]", "input_suffix[2:]"]
    assert texts.prompt(ByteTokenizer(marks=MARKS)) == GAP.decode().replace(
        ">a", ">" + "\u00e9" * 7 + "\ufffd"
    ).replace(">b", ">\ufffd\u00e9")


class GrowingTokenizer(ByteTokenizer):
    """A prompt has `more` tokens than its texts, as where a cut goes through a merge."""

    more = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        more = [65] * self.more if MARKS[0] in text else []
        return [*super().encode(text, add_special_tokens=add_special_tokens), *more]


@pytest.mark.parametrize("more", [0, 1, 9, 100, 2_000])
def test_a_gap_in_long_texts_is_cut_until_the_prompt_fits(more: int) -> None:
    made = engine()
    made.tokenizer = GrowingTokenizer(marks=MARKS)
    made.tokenizer.more = more
    sent = {"input_prefix": "a" * 600, "input_suffix": "b" * 600, "n_predict": 8}
    reply = ask(sent, path=INFILL, on=made)
    if more > made.card.max_model_len:  # nothing is left to cut
        assert (reply.status, made.asked) == (400, [])
        return
    assert reply.status == 200
    assert len(made.asked[0].prompt_ids) + 8 <= made.card.max_model_len
    assert reply.headers["x-quire-ignored-fields"].startswith("input_prefix[:")
    assert b"a<|fim_suffix|>b" in bytes(made.asked[0].prompt_ids)


def test_the_order_of_a_models_files_holds_unless_a_request_lists_another() -> None:
    made = engine()
    made.defaults = SamplingParams(samplers=("typical_p", "temperature"), temperature=0.5)
    reply = ask({**ASKED, "top_k": 5}, on=made)
    assert reply.json["generation_settings"]["samplers"] == [
        *("penalties", "dry", "typ_p", "temperature", "top_k"),
    ]
    assert made.asked[0].sampling.samplers == ("typical_p", "temperature", "top_k")
    props = ask(None, path="/props", method="GET", on=made).json["default_generation_settings"][
        "params"
    ]
    assert props["samplers"] == ["penalties", "dry", "typ_p", "temperature"]
    own = {**ASKED, "samplers": ["temperature", "top_k"], "top_k": 5}
    assert ask(own, on=made).status == 200
    assert made.asked[1].sampling.samplers == ()


@pytest.mark.parametrize(("value", "ignored"), [(False, "penalize_nl"), (True, None)])
def test_penalties_count_line_breaks(value: bool, ignored: str | None) -> None:
    reply = ask({**ASKED, "penalize_nl": value})
    assert reply.headers.get("x-quire-ignored-fields") == ignored
    assert "penalize_nl is 3" in refusal({**ASKED, "penalize_nl": 3})


def test_what_an_editor_sends_is_accepted() -> None:
    made = engine()
    made.tokenizer.marks = dict.fromkeys(MARKS, 1)
    made.defaults = replace(made.defaults, temperature=0.7, repetition_penalty=1.1)
    sent = {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": FILES,
        "prompt": "",
        "n_predict": 8,
        "stop": [""],
        "n_indent": 2,
        "top_k": 40,
        "top_p": 0.9,
        "stream": False,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "truncated", "none/such"],
    }
    reply = ask(sent, path=INFILL, on=made)
    assert reply.json == {"content": "Hello", "timings/prompt_n": ANY_COUNT, "truncated": False}
    assert reply.headers["x-quire-ignored-fields"] == "t_max_prompt_ms, samplers.infill"
    sampling = made.asked[0].sampling
    # Samplers that the list leaves out are off, whatever the model's files say.
    assert (sampling.top_k, sampling.top_p) == (40, 0.9)
    assert (sampling.temperature, sampling.repetition_penalty) == (1.0, 1.0)
    assert sampling.stop == ()
    surprising = {"mirostat": 2, "top_k": 0, "top_p": 1}
    assert ask({**sent, **surprising}, path=INFILL, on=made).status == 200
    assert made.asked[1].sampling.temperature == 0.7
    warm = {"samplers": [], "n_predict": 0, "response_fields": [""], "t_max_predict_ms": 1}
    assert ask({**sent, **warm}, path=INFILL, on=made).json == {}


@each_case("stream", [False, True])
@each_case(
    ("limits", "script", "text", "closed"),
    [
        ({"t_max_predict_ms": 7}, ("a", "b\nc", "d"), "ab\nc", True),
        ({"t_max_predict_ms": 7}, ("a", "b", "c"), "abc", False),
        ({"t_max_predict_ms": 9}, ("a\n", "b\n", "c"), "a\nb\nc", False),
        ({"t_max_predict_ms": -1}, ("a\n", "b\n", "c"), "a\nb\nc", False),
        ({"n_indent": 2}, ("a\n", "  b", "\n c", "d"), "a\n  b\n ", True),
        ({"n_indent": 2}, ("a\n", "\t\tb\n", "\n", "d"), "a\n\t\tb\n", True),
        ({"n_indent": 2}, ("a\n ", "  b\n", "  c", "d"), "a\n   b\n  cd", False),
        ({"n_indent": 2}, ("a\n", "\n", "b", "c"), "a\n", True),
    ],
)
def test_lines_end_an_answer(
    limits: dict[str, Any], script: tuple[str, ...], text: str, closed: bool, stream: bool
) -> None:
    made = engine(*script)
    reply = ask({**ASKED, **limits, "stream": stream}, on=made)
    said = reply.events if stream else [reply.json]
    assert "".join(each["content"] for each in said) == text
    assert said[-1]["stop_type"] == ("limit" if closed else "word")
    assert not said[-1]["truncated"]
    assert len(made.closed_early) == closed


def test_a_line_ends_an_answer_within_its_last_delta_too() -> None:
    made = engine("a\n", "  b\nc")
    reply = ask({**ASKED, "n_indent": 2, "stream": False}, on=made).json
    assert (reply["content"], reply["stop_type"]) == ("a\n  b\n", "limit")
    assert (reply["stopping_word"], made.closed_early) == ("", [])


def test_a_cut_delta_has_the_tokens_of_its_text() -> None:
    """Characters that were shown before their token count with it."""
    lines = AnswerLines(LineLimits(min_indent=2))
    delta = cast(TextDelta, FakeEngine("x", "y")._delta(0, "a\n ", 0, 3, SamplingParams()))
    first = structs.replace(delta, token_ids=(4,), token_chars=(2,), num_output_tokens=1)
    assert lines.cut(first) is None
    second = structs.replace(
        delta, text=" b\n c", token_ids=(5, 6, 7, 8), token_chars=(2, 2, 1, 1), num_output_tokens=5
    )
    cut = lines.cut(second)
    assert cut is not None
    assert (cut.text, cut.token_ids, cut.token_chars) == (" b\n ", (5, 6, 7), (2, 2, 1))
    assert (cut.num_output_tokens, cut.finish_reason) == (4, FinishReason.LENGTH)


def test_an_answer_that_fills_the_context_is_truncated() -> None:
    made = engine(*["a"] * 3, reason=FinishReason.LENGTH)
    made.card = replace(CARD, max_model_len=5)
    for sent, is_full in (({"n_predict": -1}, True), ({"n_predict": 2}, False)):
        made.script = ("a",) * (3 if is_full else 2)
        answer = ask({**ASKED, **sent}, on=made).json
        assert (answer["stop_type"], answer["truncated"]) == ("limit", is_full)


@pytest.mark.parametrize(
    ("sent", "names"),
    [
        ({"repeat_penalty": 1.1, "repeat_last_n": 128, **WARM}, ""),
        ({"sse_ping_interval": 5}, "sse_ping_interval"),
        ({"speculative.n_max": 8, "n_discard": 2, "n_cmpl": 1, "n": 1}, "speculative.n_max"),
    ],
)
def test_what_llama_cpp_does_otherwise_is_listed(sent: dict[str, Any], names: str) -> None:
    assert ask({**ASKED, **sent}).headers.get("x-quire-ignored-fields", "") == names


def test_biases_of_texts_and_bans_are_objects_too() -> None:
    sent = {"logit_bias": {"7": 2, "ab": -1.5, "c": False}}
    made = engine()
    settings = ask({**ASKED, **sent}, on=made).json["generation_settings"]
    assert made.asked[0].sampling.logit_bias == {7: 2, 97: -1.5, 98: -1.5, 99: -math.inf}
    assert settings["logit_bias"][:2] == [{"bias": 2.0, "token": 7}, {"bias": -1.5, "token": 97}]
    assert settings["logit_bias"][3] == {"bias": None, "token": 99}
    for bad in ({"": 1}, {"a": True}, {"a": "b"}, {"99999999999": "b"}):
        assert "logit_bias" in refusal({**ASKED, "logit_bias": bad})


def test_drafts_are_in_the_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = FakeEngine._delta

    def with_drafts(self: Any, *args: Any) -> Any:
        return structs.replace(given(self, *args), accepted_drafts=3, rejected_drafts=2)

    assert "draft_n" not in ask(ASKED).json["timings"]
    monkeypatch.setattr(FakeEngine, "_delta", with_drafts)
    timings = ask(ASKED).json["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (5, 3)


def test_several_prompts_and_answers_are_a_list_with_counts_of_their_own() -> None:
    made = engine()
    prompts = ["ab", [5, "c", 6], "a longer one"]
    answers = ask({**ASKED, "prompt": prompts, "n_cmpl": 2}, on=made).json
    assert [one["index"] for one in answers] == list(range(6))
    texts = ["ab", made.tokenizer.decode([5, 99, 6], skip_special_tokens=False), "a longer one"]
    assert [one["prompt"] for one in answers] == [text for text in texts for _ in range(2)]
    assert [one["tokens_evaluated"] for one in answers] == [2, 2, 3, 3, 12, 12]
    assert all(one["timings"]["predicted_n"] == one["tokens_predicted"] == 2 for one in answers)
    # One request for each prompt, so that limits of requests are those of n.
    assert [(one.sampling.n, one.prompt_ids) for one in made.asked] == [
        (2, [97, 98]),
        (2, [5, 99, 6]),
        (2, list(b"a longer one")),
    ]
    assert ask({**ASKED, "prompt": ["ab"]}).json == ask(ASKED).json


def test_a_stream_of_several_answers_has_the_last_object_of_each() -> None:
    sent = {**ASKED, "prompt": ["ab", "abc"], "stream": True, "timings_per_token": True}
    events = ask({**sent, "return_progress": True}).events
    for index, num_tokens in ((0, 2), (1, 3)):
        progress, *parts, last = [event for event in events if event["index"] == index]
        assert progress["prompt_progress"]["total"] == num_tokens
        assert "".join(part["content"] for part in parts) == "Hello"
        assert all(part["timings"]["predicted_n"] <= 2 for part in parts)
        assert (last["stop"], last["content"], last["tokens_evaluated"]) == (True, "", num_tokens)
    cut = {**ASKED, "prompt": ["ab", "abc"], "n_indent": 2}
    answers = ask(cut, on=engine("a\n", " b\n c", "d")).json
    assert [one["content"] for one in answers] == ["a\n "] * 2


def test_there_are_no_adapters() -> None:
    assert ask(None, path=ADAPTERS, method="GET").json == []
    assert ask([], path=ADAPTERS).json == {"success": True}
    assert "adapter 0" in refusal([{"id": 0, "scale": 0.5}], path=ADAPTERS)
    for bad in ({}, [1], [{"id": "a", "scale": 1}], None, "x"):
        assert "cannot be used" in refusal(bad, path=ADAPTERS)
    reply = ask(["x" * 70_000], path=ADAPTERS)
    assert (reply.status, reply.error["type"]) == (413, "invalid_request_error")
    assert "query" in refusal([], path=f"{ADAPTERS}?id=0")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt is missing"),
    ({"prompt": []}, "prompt is []"),
    ({"prompt": ["a", []]}, "an empty list at 1"),
    ({"prompt": ["a", ""]}, "the prompt is empty"),
    ({"prompt": ["a", [1, [2]]]}, "the prompt holds"),
    ({"prompt": ["a", {"prompt_string": "b"}]}, "the prompt holds"),
    ({"prompt": ["a"] * 1025}, "a list of 1025 prompts"),
    ({"prompt": ["a"] * 9, "n_cmpl": 128}, "9 prompts and n_cmpl is 128"),
    ({"prompt": [1, [2]]}, "the prompt holds"),
    ({"prompt": [256]}, "the prompt holds 256"),
    ({"prompt": [True]}, "the prompt holds"),
    ({"prompt": {"prompt_string": "a"}}, "prompt is {"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [1, ""] * 513}, "1026 texts and runs of ids"),
    ({"n_predict": -3}, "n_predict is -3"),
    ({"n_predict": "8"}, 'n_predict is "8"'),
    ({"n_predict": 8, "max_tokens": 9}, "they mean the same"),
    ({"n_probs": -1}, "n_probs is -1"),
    ({"n_probs": 21}, "n_probs is 21"),
    ({"n_probs": 2, "logprobs": 3}, "they mean the same"),
    ({"id_slot": -2}, "id_slot is -2"),
    ({"return_tokens": 1}, "return_tokens is 1"),
    ({"repeat_last_n": "a"}, "repeat_last_n is"),
    ({"repeat_last_n": -2}, "repeat_last_n is -2"),
    ({"mirostat": 3}, "mirostat is 3"),
    ({"dynatemp_range": 0.5}, "dynatemp_range is 0.5"),
    ({"t_max_predict_ms": 0.5}, "t_max_predict_ms is 0.5"),
    ({"n_indent": -1}, "n_indent is -1"),
    ({"response_fields": "content"}, "response_fields is"),
    ({"response_fields": [1]}, "response_fields is"),
    ({"response_fields": ["a"] * 257}, "response_fields is"),
    ({"post_sampling_probs": True}, "post_sampling_probs"),
    ({"lora": [{"id": 0}]}, "LoRA"),
    ({"samplers": ["fill"]}, "samplers holds"),
    ({"samplers": "kz"}, "samplers is"),
    ({"samplers": ["top_p", "penalties"], **WARM, "repeat_penalty": 2}, "samplers has"),
    ({"grammar": GBNF, "json_schema": SCHEMA}, "exactly one"),
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is true"),
    ({"n_cmpl": 129}, "n_cmpl (read as n) is 129"),
    ({"messages": []}, '"messages" is not a field'),
    ({"nonsense": 1}, '"nonsense" is not a field'),
]


@each_case(("sent", "words"), REFUSED)
def test_a_field_that_is_not_honoured_is_refused_by_name(sent: dict[str, Any], words: str) -> None:
    assert words in refusal({**ASKED, **sent})


def test_errors_have_code_and_type_before_and_within_a_stream() -> None:
    reply = ask({**ASKED, "model": "other"})
    assert (reply.status, reply.error["type"]) == (404, "not_found_error")
    reply = ask({**ASKED, "prompt": "a" * 600})
    assert (reply.error["code"], reply.error["type"]) == (400, "exceed_context_size_error")
    assert (reply.error["n_prompt_tokens"], reply.error["n_ctx"]) == (600, 512)
    failing = engine()
    failing.fails_with, failing.fails_after = WorkerError("it was killed"), 1
    first, last = ask({**ASKED, "stream": True}, on=failing).events
    assert first["content"] == "Hel"
    assert (last["error"]["code"], last["error"]["type"]) == (500, "server_error")
    reply = ask(None, path="/props", method="POST")
    assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_a_key_is_read_from_either_header(name: str) -> None:
    value = "Bearer k" if name == "authorization" else "k"
    assert ask(ASKED, api_key=("k",), headers={name: value}).status == 200
    reply = ask(ASKED, api_key=("k",), headers={name: value[:-1]})
    assert (reply.status, reply.error["type"]) == (401, "authentication_error")
    assert ask(ASKED, api_key=("k",)).status == 401


def test_props_have_the_defaults_and_the_template() -> None:
    made = engine()
    props = ask(None, path="/props", method="GET", on=made).json
    assert props["total_slots"] == CARD.max_num_seqs
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["temperature"] == 1.0
    assert props["default_generation_settings"]["params"]["dry_penalty_last_n"] == 64
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert props["chat_template_caps"]["supports_tools"]
    assert (props["endpoint_slots"], props["endpoint_props"]) == (True, False)
    assert props["chat_template"] == made.template.source()
    made.template = None
    assert ask(None, path="/props", method="GET", on=made).json["chat_template"] == ""


def test_slots_are_for_admins_and_have_counts() -> None:
    slots = ask(None, path="/slots", method="GET").json
    assert [slot["is_processing"] for slot in slots] == [True, *[False] * 7]
    assert (slots[0]["n_prompt_tokens"], slots[0]["n_decoded"]) == (20, 4)
    assert (slots[0]["n_prompt_tokens_processed"], slots[0]["n_prompt_tokens_cache"]) == (4, 16)
    assert slots[0]["params"] == {"n_predict": 44, "max_tokens": 44}
    assert slots[0]["next_token"][0]["n_remain"] == 40
    made = engine()
    path = "/slots?fail_on_no_slot=1"
    assert ask(None, path=path, method="GET", on=made).status == 200
    made.snapshot = replace(made.snapshot, slots_total=1)
    reply = ask(None, path=path, method="GET", on=made)
    assert (reply.status, reply.error["type"]) == (503, "unavailable_error")
    assert ask(None, path="/slots?fail_on_no_slot=", method="GET", on=made).status == 200
    assert ask(None, path="/slots?other=1", method="GET", on=made).status == 400
    key = {"authorization": "Bearer k"}
    reply = ask(
        None, path="/slots", method="GET", headers=key, api_key=("k",), client=("10.0.0.1", 1)
    )
    assert (reply.status, reply.error["type"]) == (403, "permission_error")


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_is_open_and_has_what_clients_wait_for(path: str) -> None:
    made = engine()
    reply = ask(None, path=path, method="GET", on=made, api_key=("k",))
    assert (reply.status, reply.json["status"], reply.json["ok"]) == (200, "ok", True)

    async def dead() -> Reply:
        site = Site(made)
        made.dead.set()
        return await site.get(path)

    reply = asyncio.run(dead())
    error = {"code": 503, "message": "it was killed", "type": "unavailable_error"}
    assert (reply.status, reply.json["status"], reply.json["error"]) == (503, "dead", error)


@pytest.mark.parametrize("path", ["/reranking", "/v1/reranking"])
def test_reranking_is_another_name(path: str) -> None:
    sent = {"query": "a", "documents": ["ab", "c"]}
    assert ask(sent, path=path).json["results"] == ask(sent, path="/v1/rerank").json["results"]


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_vectors_are_lists_of_numbers(path: str) -> None:
    plain = ask({"content": "ab"}, path=path).json
    assert len(plain[0]["embedding"][0]) == 4
    assert ask({"content": "ab", "encoding_format": "float"}, path=path).json == plain
    words = refusal({"content": "ab", "encoding_format": "base64"}, path=path)
    assert 'POST /v1/embeddings also has "base64"' in words


def test_texts_are_tokenized_and_ids_decoded_in_this_form_too() -> None:
    def tokenize(**body: Any) -> Any:
        return ask(body, path="/tokenize").json

    assert tokenize(content="hé")["tokens"] == [104, 195, 169]
    assert tokenize(content="hé", with_pieces=True, parse_special=True)["tokens"] == [
        {"id": 104, "piece": "h"},
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
    ]
    made = engine()
    made.tokenizer.bos_id = 2
    ids = [
        ask({"content": "a", **more}, path="/tokenize", on=made).json["tokens"]
        for more in ({}, {"add_special": True})
    ]
    assert ids == [[97], [2, 97]]
    assert ask({"prompt": "a"}, path="/tokenize", on=made).json["tokens"] == [2, 97]
    assert ask({"tokens": [104]}, path="/detokenize").json == {"prompt": "h", "content": "h"}
    for body in ({"content": 3}, {"content": "a", "prompt": "b"}, {"content": "a", "messages": []}):
        assert "content" in ask(body, path="/tokenize").error["message"]
    reply = ask({"content": "a", "parse_special": False}, path="/tokenize")
    assert "parse_special is false" in reply.error["message"]
