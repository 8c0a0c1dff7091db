"""Each field's value through the routes: what reaches the engine, and what is rejected by name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from quire.base.sampling_params import SamplingParams
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.unit.api.fake_engine import CARD, ByteTokenizer, FakeEngine, Reply, Site

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(engine: FakeEngine | None = None, settings: Any = None, **body: Any) -> Reply:
    async def exchange() -> Reply:
        site = Site(engine, **(settings or {}))
        return await site.post(COMPLETIONS, {"prompt": "abc", **body})

    return asyncio.run(exchange())


def chat(engine: FakeEngine | None = None, settings: Any = None, **body: Any) -> Reply:
    async def exchange() -> Reply:
        site = Site(engine, **(settings or {}))
        return await site.post(CHAT, {"messages": MESSAGES, **body})

    return asyncio.run(exchange())


def asked(**body: Any) -> SamplingParams:
    engine = FakeEngine()
    reply = completion(engine, **body)
    assert reply.status == 200, reply.body
    return engine.asked[0].sampling


@each_case(
    ("field", "value"),
    [
        ("n", 3),
        ("temperature", 0.25),
        ("temperature", 0),
        ("top_k", 5),
        ("top_k", -1),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.5),
        ("presence_penalty", -1.5),
        ("frequency_penalty", 2),
        ("seed", 2**63 - 1),
        ("seed", -3),
        ("max_tokens", 9),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 20),
        ("min_tokens", 4),
        ("ignore_eos", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
    ],
)
def test_a_sampling_field_reaches_the_engine_unchanged(field: str, value: Any) -> None:
    assert getattr(asked(**{field: value}), field) == value


def test_stops_and_biases_are_read_from_their_json_forms() -> None:
    sampling = asked(stop="END", stop_token_ids=[3, 4], logit_bias={"5": -100, "6": 2.5})
    assert sampling.stop == ("END",)
    assert sampling.stop_token_ids == (3, 4)
    assert sampling.logit_bias == {5: -100, 6: 2.5}
    assert asked(stop=["a", "b"]).stop == ("a", "b")


def test_log_probabilities_are_requested_in_each_apis_way() -> None:
    assert asked().logprobs is None
    assert asked(logprobs=0).logprobs == 0
    assert asked(logprobs=3).logprobs == 3
    for body, wanted in (
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ):
        engine = FakeEngine()
        assert chat(engine, **body).status == 200
        assert engine.asked[0].sampling.logprobs == wanted


BAD_VALUES: list[tuple[str, Any]] = [
    ("n", 0), ("n", -1), ("n", 129), ("n", 1.0), ("n", "1"), ("n", True), ("n", 10**30),
    ("temperature", -0.1), ("temperature", 101), ("temperature", "hot"), ("temperature", True),
    ("temperature", 1e999), ("temperature", -1e999), ("temperature", 10**39),
    ("top_k", -2), ("top_k", 1.5), ("top_k", 10**20), ("top_k", [1]),
    ("top_p", 1.01), ("top_p", -1), ("top_p", 1e999), ("top_p", "x"),
    ("min_p", -0.01), ("min_p", 1.1), ("min_p", {}),
    ("repetition_penalty", 0), ("repetition_penalty", 1e-39), ("repetition_penalty", -1),
    ("repetition_penalty", 1e999),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
    ("frequency_penalty", "x"), ("frequency_penalty", 10**39),
    ("seed", 2**63), ("seed", 1.5), ("seed", "1"), ("seed", -(2**63) - 1), ("seed", 1e3),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 1.5), ("max_tokens", 10**39),
    ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 2**40), ("min_tokens", 17),
    ("stop", [""]), ("stop", ""), ("stop", 5), ("stop", [1]), ("stop", {"a": 1}),
    ("stop", ["x"] * 17), ("stop", ["x" * 1025]), ("stop", [["x"]]),
    ("stop_token_ids", 5), ("stop_token_ids", ["1"]), ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**40]), ("stop_token_ids", list(range(65))), ("stop_token_ids", [True]),
    ("logit_bias", 5), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.5": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", {"²": 1}), ("logit_bias", {"1" * 30: 1}),
    ("logit_bias", [5]), ("logit_bias", [[5]]), ("logit_bias", [[5, True]]),
    ("logit_bias", [[5, "x"]]), ("logit_bias", [[True, 1]]), ("logit_bias", [[-1, 1]]),
    ("logit_bias", [[5, 60], [5, 60]]), ("logit_bias", [["", 1]]), ("logit_bias", [["x" * 257, 1]]),
    ("logit_bias", [[1, 1]] * 1025), ("logit_bias", {"1": False}),
    ("logit_bias", {"1": 1e999}), ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("prompt_logprobs", -2), ("prompt_logprobs", 21), ("prompt_logprobs", True),
    ("prompt_logprobs", "1"), ("prompt_logprobs", 1.0), ("logprob_token_ids", [1]),
    ("logprob_token_ids", 5), ("logprob_token_ids", {"1": 2}),
    ("logprobs", -2), ("logprobs", 21), ("logprobs", True), ("logprobs", "3"),
    ("ignore_eos", 1), ("ignore_eos", "yes"), ("include_stop_str_in_output", 0),
    ("stream", "true"), ("stream", 1), ("echo", 1), ("stream_options", {"include_usage": True}),
    ("best_of", 0), ("best_of", 129), ("best_of", 1.5), ("best_of", "2"), ("best_of", True),
    ("use_beam_search", 1), ("use_beam_search", "yes"), ("length_penalty", 2.0),
    ("length_penalty", "x"), ("early_stopping", "never"), ("early_stopping", "x"),
    ("early_stopping", 1), ("suffix", "end"), ("model", 5), ("model", ["fake"]),
    ("prompt", 5), ("prompt", {}), ("prompt", []), ("prompt", [[]]), ("prompt", [1.5]),
    ("prompt", ["a", 1]), ("prompt", [1, "a"]), ("prompt", [[1], "a"]), ("prompt", [[1], 1]),
    ("prompt", [[True]]), ("prompt", [256]), ("prompt", [-1]), ("prompt", [10**30]),
    ("prompt", [[1, None]]), ("prompt", ""), ("prompt", ["a", ""]), ("prompt", None),
    ("prompt", [None]), ("prompt", True), ("prompt", ["a"] * 1025),
]  # fmt: skip


@each_case(("field", "value"), BAD_VALUES, ids=lambda value: repr(value)[:40])
def test_a_bad_value_is_rejected_by_name_and_never_reaches_the_engine(
    field: str, value: Any
) -> None:
    engine = FakeEngine()
    reply = completion(engine, **{field: value})
    assert reply.status == 400
    assert reply.error["param"] == field
    assert field.replace("_", " ").split()[0] in reply.error["message"].replace("_", " ")
    assert len(reply.error["message"]) < 500
    assert not engine.asked


BAD_CHATS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": None}), ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}), ("messages", {"messages": {"role": "user"}}),
    ("messages", {"messages": ["hi"]}), ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"content": "hi"}]}),
    ("messages", {"messages": [{"role": "king", "content": "hi"}]}),
    ("messages", {"messages": [{"role": ["user"], "content": "hi"}]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("messages", {"messages": [{"role": "user", "content": [5]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]}),
    ("messages", {"messages": MESSAGES * 4097}),
    ("logprobs", {"logprobs": 1}), ("logprobs", {"logprobs": "yes"}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": -2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 1.5}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": "5"}),
    ("max_completion_tokens", {"max_completion_tokens": True}),
    ("max_completion_tokens", {"max_completion_tokens": 5, "max_tokens": 6}),
    ("stream_options", {"stream": True, "stream_options": []}),
    ("stream_options", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("stream_options", {"stream": True, "stream_options": {"other": True}}),
    ("stream_options", {"stream": True, "stream_options": {"continuous_usage_stats": 1}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": ""}}]}),
    ("response_format", {"response_format": {"type": "yaml"}}),
    ("tool_choice", {"tool_choice": "required"}),
]  # fmt: skip


@each_case(("field", "body"), BAD_CHATS, ids=lambda value: repr(value)[:60])
def test_a_bad_chat_is_rejected_by_name(field: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    reply = chat(engine, **body)
    assert (reply.status, reply.error["param"]) == (400, field)
    assert not engine.asked


def test_another_models_name_is_not_found() -> None:
    reply = completion(model="gpt-9")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert "fake" in reply.error["message"]


def test_the_models_own_defaults_fill_missing_fields() -> None:
    engine = FakeEngine()
    engine.defaults = SamplingParams(temperature=0.6, top_p=0.9, top_k=40)
    assert chat(engine, top_p=0.5).status == 200
    sampling = engine.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.5, 40)


def test_a_completion_has_16_tokens_by_default() -> None:
    assert asked().max_tokens == 16
    assert asked(max_tokens=None).max_tokens == 16


def test_a_completions_default_is_cut_to_the_rest_of_the_context() -> None:
    assert asked(prompt=[1] * 60).max_tokens == 4


def test_a_chat_may_take_the_rest_of_the_context() -> None:
    engine = FakeEngine()
    chat(engine)
    assert engine.asked[0].sampling.max_tokens == 64 - len("user:hi;")


def test_the_models_own_length_default_counts_for_chats() -> None:
    engine = FakeEngine(card=replace(CARD, generation_defaults={"max_new_tokens": 11}))
    chat(engine)
    assert engine.asked[0].sampling.max_tokens == 11


def test_the_servers_cap_is_default_and_limit() -> None:
    engine = FakeEngine()
    assert chat(engine, {"max_output_tokens": 5}).status == 200
    assert engine.asked[0].sampling.max_tokens == 5
    reply = chat(FakeEngine(), {"max_output_tokens": 5}, max_tokens=6)
    assert (reply.status, reply.error["param"]) == (400, "max_tokens")
    assert "at most 5" in reply.error["message"]


def test_both_names_of_the_length_may_be_given_if_they_agree() -> None:
    engine = FakeEngine()
    assert chat(engine, max_tokens=7, max_completion_tokens=7).status == 200
    assert engine.asked[0].sampling.max_tokens == 7


def test_a_prompt_as_long_as_the_context_is_rejected_with_both_numbers() -> None:
    for prompt in ([1] * 64, [[1] * 64, [1]]):
        reply = completion(prompt=prompt)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert reply.error["message"].count("64") == 2


def test_one_prompt_that_cannot_fit_rejects_all_before_any_starts() -> None:
    engine = FakeEngine()
    reply = completion(engine, prompt=["short", "x" * 70])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert "70" in reply.error["message"]
    assert not engine.asked


def test_an_empty_text_is_the_begin_token_if_there_is_one() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=1)
    assert completion(engine, prompt="").status == 200
    assert engine.asked[0].prompt_ids == [1]


def test_messages_reach_the_template_whole_with_extra_keys() -> None:
    engine = FakeEngine()
    engine.template = ChatTemplate({"default": "{{ messages | tojson }}"}, variables={})
    engine.card = replace(CARD, max_model_len=4096)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert chat(engine, messages=messages).status == 200
    seen = json.loads(bytes(engine.asked[0].prompt_ids))
    assert [message["role"] for message in seen][:3] == ["system", "user", "assistant"]
    assert seen[4]["tool_call_id"] == "c1"
    assert seen[1]["name"] == "ann"
    assert seen[2]["content"] == ""


def test_a_model_without_a_template_is_an_error_with_a_remedy() -> None:
    engine = FakeEngine()
    engine.template = None
    reply = chat(engine)
    assert reply.status == 400
    assert "no chat template" in reply.error["message"]
    assert "/v1/completions" in reply.error["message"]


@pytest.mark.parametrize("prompt", [["a", None], [[1], None], ["a", 1], [None, "a"], [None]])
def test_a_list_of_prompts_with_null_is_rejected(prompt: Any) -> None:
    async def exchange() -> None:
        reply = await Site().post("/v1/completions", {"prompt": prompt})
        assert (reply.status, reply.error["param"]) == (400, "prompt")

    asyncio.run(exchange())


@pytest.mark.parametrize(("said", "expected"), [(None, True), (True, True), (False, False)])
def test_a_completion_gets_special_tokens_by_default(said: bool | None, expected: bool) -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=2)
    assert completion(engine, add_special_tokens=said).status == 200
    assert engine.asked[0].prompt_ids == ([2] if expected else []) + list(b"abc")


@pytest.mark.parametrize(("said", "expected"), [(None, False), (True, True), (False, False)])
def test_a_chat_gets_special_tokens_only_on_request(said: bool | None, expected: bool) -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=2)
    assert chat(engine, add_special_tokens=said).status == 200
    assert engine.asked[0].prompt_ids == ([2] if expected else []) + list(b"user:hi;")


def test_an_empty_prompt_without_special_tokens_is_rejected_with_the_reason() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=2)
    reply = completion(engine, prompt="", add_special_tokens=False)
    assert reply.status == 400
    assert "add_special_tokens is false" in reply.error["message"]


@pytest.mark.parametrize("field", ["add_special_tokens", "skip_special_tokens"])
@pytest.mark.parametrize("ask", [completion, chat])
def test_an_invalid_special_tokens_flag_is_rejected(field: str, ask: Any) -> None:
    reply = ask(**{field: "yes"})
    assert reply.status == 400
    assert reply.error["param"] == field


@pytest.mark.parametrize(("skips", "echoed"), [(True, "hi"), (False, "\x02hi")])
def test_the_echo_of_ids_shows_special_tokens_like_the_answer(skips: bool, echoed: str) -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(bos=2)
    reply = completion(
        engine, prompt=[2, *b"hi"], echo=True, skip_special_tokens=skips, max_tokens=1
    )
    assert reply.json["choices"][0]["text"].startswith(echoed)
